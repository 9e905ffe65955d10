"""Mixtures of experts on a CPU: each token's experts, and the sum of their outputs, in one call each."""

from typing import NamedTuple

import torch

from .kernels.program import COMBINE, ROUTE
from .program import run_operator


class Routing(NamedTuple):
    """
    How experts are chosen from scores, and weighed; see `route`.

    Args:
        num_chosen (`int`): Experts of a token.
        is_sigmoid (`bool`): Whether scores become sigmoids of their own; else their softmax.
        norms (`bool`): Whether a token's weights are divided by their sum plus `eps`, or by `least` if that is more.
        factor (`float`): Factor of weights.
        scale (`float`): Factor of scores, above 0.
        groups, num_groups (`int`): Groups of equal size that the experts are divided into, and how many of these are
            chosen first, which must have `num_chosen` experts or more; 0 without groups.
        adds_two (`bool`): Whether groups, of two experts or more, are chosen by the sum of their two largest
            probabilities, bias included; else by the largest.
        cap (`float`, *optional*): Of sparse mixers (PhiMoE), how far below an expert's score others may be that share
            the softmax with it, relative to the larger size of both; none of those chosen before it does.
    """

    num_chosen: int
    is_sigmoid: bool
    norms: bool
    eps: float = 0.0
    factor: float = 1.0
    scale: float = 1.0
    groups: int = 0
    num_groups: int = 0
    adds_two: bool = False
    cap: float | None = None
    least: float = 0.0


def route(
    scores: torch.Tensor, bias: torch.Tensor | None, routing: Routing, factors: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Choose each token's experts.

    Args:
        scores (`torch.Tensor` of shape `[N, experts]`): Scores, contiguous, in float32 or bfloat16.
        bias (`torch.Tensor` of shape `[experts]`, *optional*): Summand of probabilities where experts are chosen, in
            float32 or the dtype of scores.
        factors (`torch.Tensor` of shape `[experts]`, *optional*): Factors of each expert's weights, in the dtype of
            scores.

    Returns:
        Experts, int64, and their weights, float32, `[N, num_chosen]` each, the largest first.
    """
    sparse = routing.cap is not None, routing.cap or 0.0
    (num, num_experts), chosen = scores.shape, routing.num_chosen
    choices = scores.new_empty(num, chosen, dtype=torch.int64)
    weights = scores.new_empty(num, chosen, dtype=torch.float32)
    probabilities = torch.empty_like(scores, dtype=torch.float32)
    ranks = scores.new_empty(num, 2 * routing.groups, dtype=torch.float32)
    is_wide = bias is not None and bias.dtype is torch.float32
    assert bias is None or is_wide or bias.dtype is scores.dtype, "compiled code reads no other bias"
    run_operator(
        scores.dtype, ROUTE, 1, num, num_experts, chosen, routing.is_sigmoid, routing.norms, scores.data_ptr(),
        0 if bias is None else bias.data_ptr(), is_wide, probabilities.data_ptr(), choices.data_ptr(),
        weights.data_ptr(), 0 if factors is None else factors.data_ptr(), routing.groups, routing.num_groups,
        routing.adds_two, ranks.data_ptr(), routing.eps, routing.factor, routing.scale, *sparse,
        routing.least,
    )  # fmt: skip
    return choices, weights


def combined(
    x: torch.Tensor,
    weights: torch.Tensor,
    shared: torch.Tensor | None = None,
    gates: torch.Tensor | None = None,
    factor: float = 1.0,
) -> torch.Tensor:
    """
    Return the sums of lines `[N, num_chosen, size]` times weights `[N, num_chosen]` in float32 and, where they are
    given, of lines `[N, size]` that all tokens share, times the sigmoids of their gates `[N, 1]` where these are given:
    times `factor`, `[N, size]`, rounded once. All are contiguous.
    """
    num, chosen, size = x.shape
    places, outputs = torch.arange(num * chosen, device="cpu"), x.new_empty(num, size)
    addresses = [0 if item is None else item.data_ptr() for item in (x, places, weights, shared, gates, outputs)]
    run_operator(x.dtype, COMBINE, 1, num, size, chosen, *addresses, factor)
    return outputs
