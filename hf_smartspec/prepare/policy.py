"""The length policies of models: what a policy has learnt about a model's speed and its drafts outlives the call."""

from collections.abc import Iterator
from contextlib import contextmanager

from transformers import PreTrainedModel

from ..decoding.call import ModelForward
from ..goodput import CostModel, LengthPolicy
from ..target_model.cost.profiling import doubt_profile, load_or_profile
from ..target_model.forward.packed import PackedForward
from .model_state import state_of, warn_once
from .resolve import Assistant


def cost_of(model: PreTrainedModel) -> CostModel | None:
    """What the model's forward costs; None, with a warning, where that cannot be measured (no memory, say)."""
    try:
        return load_or_profile(model)
    except (ValueError, RuntimeError) as error:
        warn_once(
            model,
            f"The speed of {type(model).__name__} cannot be measured, so drafts have their sources' usual size, "
            f"whether it pays or not: {error!r}",
        )
        return None


@contextmanager
def policy_of(model: PreTrainedModel, assistant: Assistant, forward: ModelForward) -> Iterator[LengthPolicy]:
    """
    The length policy for a call: what the caller has asked for, else the goodput auction, for the first time on this
    machine after measuring the model's speed. Models that run row by row get drafts of the source's usual size: what
    rows cost there does not depend on one another.
    """
    config, source = assistant
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
    with state_of(model).policy(source.name, cost) as policy:
        yield policy
    doubt_profile(model, cost)  # by what this call's steps took
