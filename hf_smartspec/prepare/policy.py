"""Length policies of models, which keep between calls what they have learnt about a model's speed and its drafts."""

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
    """Return the cost model of the model's forward; None, with a warning, if it cannot be measured (no memory, say)."""
    try:
        return load_or_profile(model)
    except (ValueError, RuntimeError) as error:
        warn_once(
            model,
            f"The speed of {type(model).__name__} cannot be measured, so drafts have their sources' usual size, "
            f"whether that pays or not: {error!r}",
        )
        return None


@contextmanager
def policy_of(model: PreTrainedModel, assistant: Assistant, forward: ModelForward) -> Iterator[LengthPolicy]:
    """
    Yield the length policy of a call: the caller's own, else the goodput auction, which measures the model's speed at
    its first use on this machine. Models that run row by row get drafts of the source's default size: the cost of a
    row does not depend on the other rows there.
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
    doubt_profile(model, cost)  # if this call's steps took other times than predicted
