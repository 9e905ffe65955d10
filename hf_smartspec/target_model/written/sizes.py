"""The products of a decoder, and how many numbers a token takes between them."""

from typing import Any, NamedTuple

from .plan import DecoderPlan


class Widths(NamedTuple):
    """Most numbers of a token in any layer; those of gated MLPs before and after their gate."""

    queries: int
    attended: int
    states: int  # queries, keys and values, and gates
    hidden: int
    gated: int


def products_of(plan: DecoderPlan) -> list[Any]:
    """Return all products of a forward."""
    mlps: list[Any] = [layer.mlp for layer in plan.layers]
    others: list[Any] = [item for layer in plan.layers for item in (layer.query_key_value, layer.attention_output)]
    others += [] if plan.features is None else [plan.features.states_map]
    return [plan.head, *others, *[item for mlp in mlps for item in (mlp.inputs, mlp.output)]]


def widths_of(plan: DecoderPlan) -> Widths:
    layers = plan.layers
    attended = [layer.delta.sizes[1] if layer.delta else layer.num_heads * layer.head_dim for layer in layers]
    maps: list[Any] = [layer.query_key_value for layer in layers if layer.delta is None]
    mlps: list[Any] = [layer.mlp for layer in layers]
    hidden = max(mlp.inputs.shape[0] for mlp in mlps)
    return Widths(
        queries=max(layer.num_heads * layer.head_dim for layer in layers),
        attended=max(attended),
        states=max([item.shape[0] for item in maps], default=0),
        hidden=hidden,
        gated=hidden // 2,
    )


def numbers_per_token(plan: DecoderPlan) -> int:
    """Return about how many numbers a program has memory for with every further token."""
    norm: Any = plan.final_norm
    num = 3 * norm.shape[0] + sum(widths_of(plan))
    if plan.features is None:
        return num
    states_map: Any = plan.features.states_map
    return num + 3 * norm.shape[0] + states_map.shape[1]
