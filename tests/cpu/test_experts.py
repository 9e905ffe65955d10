"""Compiled mixtures of experts: the choices and weights of torch, and sums that are rounded once."""

import pytest
import torch
from transformers.models.phimoe.modeling_phimoe import sparsemixer

from hf_smartspec.cpu import few_tokens
from hf_smartspec.cpu.experts import Routing, combined, route

from .helpers import numbers

pytestmark = pytest.mark.skipif(
    not few_tokens.has_kernels(torch.float32), reason="there is no compiled code for this CPU"
)
DTYPES = (torch.float32, torch.bfloat16)


def by_torch(scores, bias, routing, factors=None):
    scores = scores.float() * routing.scale
    probabilities = scores.sigmoid() if routing.is_sigmoid else scores.softmax(dim=1)
    keys = probabilities if bias is None else probabilities + bias.float()
    if routing.groups:
        of_groups = keys.unflatten(1, (routing.groups, -1)).topk(2 if routing.adds_two else 1, dim=2).values.sum(dim=2)
        dropped = torch.ones_like(of_groups).scatter_(1, of_groups.topk(routing.num_groups, dim=1).indices, 0)
        keys = keys.masked_fill(dropped.bool().repeat_interleave(60 // routing.groups, dim=1), -torch.inf)
    choices = keys.topk(routing.num_chosen, dim=1).indices
    weights = probabilities.gather(1, choices)
    if routing.norms:
        weights = weights / (weights.sum(dim=1, keepdim=True) + routing.eps).clamp(min=routing.least)
    return choices, weights * routing.factor * (1 if factors is None else factors.float()[choices])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", [None, torch.float32, "own"])
@pytest.mark.parametrize(
    "routing",
    [
        Routing(1, False, False),
        Routing(4, False, True),
        Routing(8, True, True, 1e-6, 2.5),
        Routing(4, False, True, least=0.3),
        Routing(60, True, False, factor=0.5),
        Routing(8, True, True, 1e-20, 2.5, groups=6, num_groups=2, adds_two=True),
        Routing(5, False, False, groups=12, num_groups=1),
        Routing(6, False, True, groups=60, num_groups=7, adds_two=False),
    ],
)
def test_experts_are_chosen_and_weighed_as_by_torch(routing, bias, dtype):
    scores = (numbers(33, 60) * 3).to(dtype)
    if bias is not None:
        bias = numbers(60).to(dtype if bias == "own" else bias) * 0.1
    (choices, weights), (expected, expected_weights) = (way(scores, bias, routing) for way in (route, by_torch))
    # Equal keys may come in any order: the sums of bfloat16 scores and biases often are.
    order, expected_order = choices.argsort(dim=1), expected.argsort(dim=1)
    is_same = (choices.gather(1, order) == expected.gather(1, expected_order)).all(dim=1)
    assert is_same.all() if dtype is torch.float32 else is_same.float().mean() > 0.8
    pairs = weights.gather(1, order)[is_same], expected_weights.gather(1, expected_order)[is_same]
    torch.testing.assert_close(*pairs, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("is_sigmoid", [False, True])
def test_scores_and_weights_are_scaled(is_sigmoid, dtype):
    scores, factors = (numbers(33, 60) * 3).to(dtype), numbers(60).to(dtype)
    routing = Routing(1, is_sigmoid, False, scale=0.3)
    (choices, weights), (expected, expected_weights) = (
        way(scores, None, routing, factors) for way in (route, by_torch)
    )
    is_same = choices == expected
    assert is_same.all() if dtype is torch.float32 else is_same.float().mean() > 0.8
    torch.testing.assert_close(weights[is_same], expected_weights[is_same], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("distance", [0.005, 0.05, 0.5])
def test_sparse_mixers_are_those_of_transformers(distance, dtype):
    """Compare scores near one another, and others, of both signs."""
    scores = (numbers(33, 1) + numbers(33, 16) * 0.1).to(dtype)
    choices, weights = route(scores, None, Routing(2, False, False, cap=2 * distance))
    expected_weights, expected = sparsemixer(scores, distance, training=False)
    is_same = choices == expected
    assert is_same.all() if dtype is torch.float32 else is_same.float().mean() > 0.8  # equal ones in any order
    expected_weights = expected_weights.float()
    rtol = 1e-5 if dtype is torch.float32 else 2**-7
    torch.testing.assert_close(weights[is_same], expected_weights[is_same], rtol=rtol, atol=1e-7)
    assert (weights < 0.99).any() and (distance == 0.5 or (weights == 1.0).any())


@pytest.mark.parametrize("is_sigmoid", [False, True])
@pytest.mark.parametrize(("groups", "num_groups"), [(0, 0), (2, 2), (2, 1)])
def test_scores_that_are_no_numbers_are_chosen_first_as_by_torch(is_sigmoid, groups, num_groups):
    scores = torch.full((4, 8), torch.nan)
    scores[1, :6], scores[2] = 0.0, -torch.inf
    scores[3] = torch.linspace(3, -3, 8)
    scores[3, 5] = torch.nan
    routing = Routing(4, is_sigmoid, True, groups=groups, num_groups=num_groups)
    choices, weights = route(scores, None, routing)
    assert all(len(set(line)) == 4 and set(line) <= set(range(8)) for line in choices.tolist())
    assert {6, 7} <= set(choices[1].tolist()) or not is_sigmoid
    assert choices[3, 0] == 5 or not is_sigmoid
    assert weights[[0, 1, 3]].isnan().any(dim=1).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shared", ["none", "gated", "whole"])
@pytest.mark.parametrize(("size", "factor"), [(16, 1.0), (1040, 1.0), (16, 0.3)])
def test_sums_are_rounded_once(size, factor, shared, dtype):
    x, weights = numbers(5, 3, size).to(dtype), numbers(5, 3).abs()
    gates = numbers(5, 1).to(dtype) if shared == "gated" else None
    shared = None if shared == "none" else numbers(5, size).to(dtype)
    expected = (x.double() * weights.double()[..., None]).sum(dim=1)
    if shared is not None:
        expected += (1 if gates is None else gates.double().sigmoid()) * shared.double()
    expected *= factor
    found = combined(x, weights, shared, gates, factor)
    assert found.dtype == dtype
    if dtype is torch.float32:
        torch.testing.assert_close(found, expected.float(), rtol=1e-5, atol=1e-6)
    else:
        assert (found != expected.to(dtype)).float().mean() < 0.01
