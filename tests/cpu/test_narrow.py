"""Copies in bfloat16 of float32 weights: the same products, and changes of the weights that are noticed."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_smartspec.cpu.few_tokens import few_token_linear, has_kernels
from hf_smartspec.cpu.kernels.program import NARROW
from hf_smartspec.cpu.narrow import NarrowWeights, narrowed
from hf_smartspec.cpu.program import run_operator

from .helpers import numbers

pytestmark = pytest.mark.skipif(not has_kernels(torch.float32), reason="there are no compiled products for this CPU")


@given(st.integers(1, 70), st.integers(1, 10), st.integers(1, 40), st.booleans(), st.integers(1, 3))
@settings(max_examples=50, deadline=None)
def test_products_have_the_bits_of_the_float32_weight(num_outputs, sixteens, num_tokens, has_bias, num_threads):
    weight = numbers(num_outputs, 16 * sixteens).bfloat16().float()
    x, copy = numbers(num_tokens, 16 * sixteens), narrowed(weight)
    bias, outputs = numbers(num_outputs) if has_bias else None, torch.empty(num_tokens, num_outputs)
    addresses = copy.data_ptr(), x.data_ptr(), 0 if bias is None else bias.data_ptr(), outputs.data_ptr()
    run_operator(x.dtype, NARROW, num_threads, num_tokens, 16 * sixteens, num_outputs, 12, num_tokens, *addresses, 0, 0)
    assert torch.equal(outputs, few_token_linear(x, weight, bias))


def test_a_weight_with_any_other_number_is_not_copied():
    weight = numbers(3000, 32).bfloat16().float()
    assert torch.equal(narrowed(weight).float(), weight)
    for number in (1 + 2.0**-8, float("nan"), 1e-45):  # the last one is subnormal
        other = weight.clone()
        other[2100, 5] = number
        assert narrowed(other) is None
    weight[2100, 5:8] = torch.tensor([float("inf"), -0.0, 2.0**-133])
    assert torch.equal(narrowed(weight).float().view(torch.int32), weight.view(torch.int32))


@pytest.mark.parametrize("is_counted", [True, False])
@pytest.mark.parametrize("part", [..., 1733, (slice(None), 77), (1733, 77)], ids=str)
def test_changes_are_noticed(part, is_counted):
    """Change all numbers, a row, a column or one number, counted by torch or not."""
    weights = [torch.nn.Parameter(numbers(2000, 96).bfloat16().float()) for _ in range(2)]
    narrow = NarrowWeights(weights, weights)
    assert len(narrow.copies) == 2 and narrow.is_unchanged() and narrow.is_of(weights)
    with torch.no_grad():
        changed = weights[1] if is_counted else weights[1].data
        changed[part] *= 2
    assert narrow.is_unchanged() != is_counted
    assert not narrow.is_of(weights)


def test_weights_without_copies_are_not_compared():
    weights = [torch.nn.Parameter(numbers(20, 96)), torch.nn.Parameter(numbers(20, 96).bfloat16().float())]
    assert list(NarrowWeights(weights, weights).copies) == [weights[1].data_ptr()]
    narrow = NarrowWeights(weights[:1], weights[:1])
    with torch.no_grad():
        weights[0].mul_(2)
    assert not narrow.copies and narrow.is_unchanged() and narrow.is_of(weights[:1])
