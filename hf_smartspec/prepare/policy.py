"""The length policies of models: what a policy has learnt about a model's speed and its drafts outlives the call."""

from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from threading import Lock
from weakref import WeakKeyDictionary

from transformers import PreTrainedModel
from transformers.utils.logging import get_logger

from ..candidates.base import TreeCandidateGenerator
from ..decoding.call import ModelForward
from ..goodput import CostModel, GoodputAuction, LengthPolicy
from ..target.packed import PackedForward
from ..target.profiling import load_or_profile
from .config import SmartSpecConfig

logger = get_logger(__name__)

# Policies that nobody uses at present. A policy serves one loop at a time.
_idle: WeakKeyDictionary[PreTrainedModel, dict[Hashable, list[GoodputAuction]]] = WeakKeyDictionary()
_lock = Lock()


def cost_of(model: PreTrainedModel) -> CostModel | None:
    """What the model's forward costs; None, with a warning, where that cannot be measured (no memory, say)."""
    try:
        return load_or_profile(model)
    except (ValueError, RuntimeError) as error:
        logger.warning_once(
            f"The speed of {type(model).__name__} cannot be measured, so drafts have their sources' usual size, "
            f"whether it pays or not: {error!r}"
        )
        return None


@contextmanager
def policy_of(
    model: PreTrainedModel, config: SmartSpecConfig, source: TreeCandidateGenerator, forward: ModelForward
) -> Iterator[LengthPolicy]:
    """
    The length policy for a call: what the caller has asked for, else the goodput auction, for the first time on this
    machine after measuring the model's speed. Models that run row by row get drafts of the source's usual size: what
    rows cost there does not depend on one another.
    """
    fixed = config.policy_for(source)
    if fixed is not None:
        yield fixed
        return
    if not isinstance(forward, PackedForward):
        yield config.fixed_policy_for(source)
        return
    cost = cost_of(model)
    if cost is None:
        yield config.fixed_policy_for(source)
        return
    key = type(source), id(getattr(source, "model", None))
    with _lock:
        idle = _idle.setdefault(model, {}).setdefault(key, [])
        idle[:] = (policy for policy in idle if policy.cost is cost)  # the model may have been moved or cast
        policy = idle.pop() if idle else GoodputAuction(cost)
    try:
        yield policy
    finally:
        with _lock:
            idle.append(policy)
