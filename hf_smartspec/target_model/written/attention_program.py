"""Operators that multiply queries and outputs of attention in the program of a decoder's forward."""

from typing import Any

from ...cpu.kernels import program as codes
from .plan import LayerPlan
from .query_factors import QueryFactors


def multiply_queries(own: Any, factors: QueryFactors, size: int) -> None:
    """Write what multiplies queries, `size` numbers of each token, by factors of positions in a `ForwardWriter`."""
    queries = own.queries.data_ptr()
    fields = {"x": queries, "x_stride": size, "factor_stride": 1, "is_one": True, "outputs": queries}
    own.factors[own.add(codes.TIMES, size=size, **fields)] = factors


def gate_outputs(own: Any, plan: LayerPlan, normed: Any) -> None:
    """Write what multiplies outputs of attention by gates of its input `normed` in a `ForwardWriter`."""
    gates: Any = plan.output_gates
    own.multiply(gates, normed, own.gates)
    is_by_head, places = gates.shape[0] == plan.num_heads, own.attended.data_ptr()
    size = plan.head_dim if is_by_head else plan.num_heads * plan.head_dim
    fields = {"x": places, "x_stride": size, "factors": own.gates.data_ptr(), "outputs": places}
    strides = {"factor_stride": 1 if is_by_head else size, "is_one": is_by_head, "is_sigmoid": True}
    number = own.add(codes.TIMES, size=size, **fields, **strides)
    if is_by_head:
        own.times[number] = plan.num_heads
