"""Fields of the operators that rotate queries and keys in the program of a decoder's forward."""

from typing import cast

from .norms import Norm
from .plan import LayerPlan


def places(plan: LayerPlan) -> dict[str, int]:
    """Return where the queries, keys and values of a token lie, in heads; see `ROTATE_FIELDS`."""
    step = 2 if plan.has_gates else 1
    first = step * plan.num_heads
    found = first + 2 * plan.num_stored, step, first, 1, first + plan.num_stored, 1
    if plan.is_by_head:
        found = 3 * plan.num_heads, 3, 1, 3, 2, 3
    return dict(zip(("width", "query_step", "key_place", "key_step", "value_place", "value_step"), found))


def last_norms(plan: LayerPlan) -> dict[str, float]:
    """Return the fields of norms after rotation."""
    query, key = cast(tuple[Norm, Norm], (plan.query_norm, plan.key_norm))
    if not plan.norms_last:
        return {}
    weights = {"query_weight": query.weights()[0].data_ptr(), "key_weight": key.weights()[0].data_ptr()}
    return {**weights, "form": query.form, "eps": query.eps}


def width_of(plan: LayerPlan) -> int:
    """Return how many numbers a token's queries, keys and values have."""
    return places(plan)["width"] * plan.head_dim
