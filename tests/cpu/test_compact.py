"""Copies of weights in fewer bits: the same products, and changes of the weights that are noticed."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_smartspec.cpu import compact
from hf_smartspec.cpu.compact import CompactWeights, can_pack, compact_bytes, narrowed, packed
from hf_smartspec.cpu.few_tokens import few_token_linear, has_kernels
from hf_smartspec.cpu.kernels.packed import (
    BLOCK,
    BLOCK_BYTES,
    CODES,
    FIFTHS,
    MOST_CODES,
    MOST_TOKENS,
    PLACES,
    can_unpack,
)
from hf_smartspec.cpu.kernels.program import NARROW
from hf_smartspec.cpu.program import run_operator

from .helpers import numbers

pytestmark = pytest.mark.skipif(not has_kernels(torch.float32), reason="there are no compiled products for this CPU")
needs_packing = pytest.mark.skipif(not can_unpack(), reason="this CPU has no code for packed weights")


def copies_of(weights):
    copies = CompactWeights(weights)
    for weight in weights:
        copies.add(weight)
    return copies


@given(st.integers(1, 70), st.integers(1, 10), st.integers(1, 40), st.booleans(), st.integers(1, 3))
@settings(max_examples=50, deadline=None)
def test_products_have_the_bits_of_the_float32_weight(num_outputs, sixteens, num_tokens, has_bias, num_threads):
    weight = numbers(num_outputs, 16 * sixteens).bfloat16().float()
    x, copy = numbers(num_tokens, 16 * sixteens), narrowed(weight)
    bias, outputs = numbers(num_outputs) if has_bias else None, torch.empty(num_tokens, num_outputs)
    addresses = copy.data_ptr(), x.data_ptr(), 0 if bias is None else bias.data_ptr(), outputs.data_ptr()
    sizes = num_tokens, 16 * sixteens, num_outputs, 12, num_tokens
    run_operator(x.dtype, NARROW, num_threads, *sizes, *addresses, 0, 0, 0)
    assert torch.equal(outputs, few_token_linear(x, weight, bias))


@pytest.mark.parametrize("counts_changes", [True, False])
def test_replaced_weights_are_noticed(counts_changes):
    with torch.inference_mode(not counts_changes):
        weights = [numbers(8, 32).bfloat16().float() for _ in range(2)]
    copies = copies_of(weights)
    assert copies.is_unchanged() and weights[0].is_inference() != counts_changes
    weights.pop()
    assert not copies.is_unchanged()


def test_a_weight_with_any_other_number_is_not_copied():
    weight = numbers(3000, 32).bfloat16().float()
    assert torch.equal(narrowed(weight).float(), weight)
    for number in (1 + 2.0**-8, float("nan"), 1e-45):  # the last one is subnormal
        other = weight.clone()
        other[2100, 5] = number
        assert narrowed(other) is None
    weight[2100, 5:8] = torch.tensor([float("inf"), -0.0, 2.0**-133])
    assert torch.equal(narrowed(weight).float().view(torch.int32), weight.view(torch.int32))


@needs_packing
@given(st.integers(1, 70), st.integers(1, 5), st.integers(1, MOST_TOKENS), st.booleans(), st.integers(1, 31))
@settings(max_examples=100, deadline=None)
def test_products_have_the_bits_of_the_packed_weight(num_outputs, num_blocks, num_tokens, has_bias, spread):
    """Multiply by numbers of one to all of the exponents that a packed weight may have."""
    weight, x = numbers(num_outputs, BLOCK * num_blocks), numbers(num_tokens, BLOCK * num_blocks).bfloat16()
    mantissas, exponents = torch.frexp(weight)
    weight = torch.ldexp(mantissas, exponents % spread - 16).bfloat16()
    copy, bias = packed(weight), numbers(num_outputs).bfloat16() if has_bias else None
    assert copy is not None
    found = few_token_linear(x, weight, bias, copy)
    assert torch.equal(found.view(torch.int16), few_token_linear(x, weight, bias).view(torch.int16))


@needs_packing
def test_any_numbers_can_be_packed():
    weight, x = numbers(40, 128).bfloat16(), numbers(3, 128).bfloat16()
    weight[:, 64:] = 0
    weight[3, 5:9] = torch.tensor([0.0, -0.0, torch.inf, 2.0**-133])  # the last one is subnormal
    weight[7, 100] = torch.nan
    copy = packed(weight)
    assert copy is not None
    found = few_token_linear(x, weight, None, copy)
    assert torch.equal(found.view(torch.int16), few_token_linear(x, weight).view(torch.int16))


@needs_packing
def test_which_weights_are_packed():
    """Pack only weights of few first bytes, in rows of whole blocks, into 13 bits a number."""
    bits = torch.arange(MOST_CODES + 1, dtype=torch.int16).repeat_interleave(2 * BLOCK).reshape(-1, 2 * BLOCK) << 8
    assert packed(bits.view(torch.bfloat16)) is None
    weight = bits[1:].view(torch.bfloat16)
    assert len(packed(weight)) == MOST_CODES + compact_bytes(weight) == MOST_CODES + weight.numel() * 13 // 8
    assert packed(numbers(10, BLOCK + 16).bfloat16()) is None
    assert packed(numbers(0, BLOCK).bfloat16()) is None


@needs_packing
def test_packed_weights_can_be_unpacked():
    """Unpack by the definition."""
    weight = numbers(30, 3 * BLOCK).bfloat16()
    copy = packed(weight).numpy()
    blocks = copy[MOST_CODES:].reshape(-1, BLOCK_BYTES)[:, :, None]
    fours, fifths = blocks[:, CODES:FIFTHS, 0], blocks[:, FIFTHS:]
    codes = np.concatenate([fours & 15, fours >> 4], 1) | ((fifths >> np.arange(8)) & 1).reshape(-1, BLOCK) << 4
    found = np.stack([blocks[:, :BLOCK, 0], copy[codes]], -1)[:, PLACES]
    assert np.array_equal(found.reshape(-1), weight.view(torch.uint8).reshape(-1).numpy())


@needs_packing
def test_a_model_is_read_as_it_is_where_nothing_can_be_packed(monkeypatch):
    monkeypatch.setattr(compact, "packed", lambda weight: 1 / 0)
    can_pack.cache_clear()
    try:
        assert not can_pack()
    finally:
        can_pack.cache_clear()


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=needs_packing)], ids=str)
@pytest.mark.parametrize("is_counted", [True, False])
@pytest.mark.parametrize("part", [..., 1733, (slice(None), 77), (1733, 77)], ids=str)
def test_changes_are_noticed(part, is_counted, dtype):
    """Change all numbers, a row, a column or one number, counted by torch or not."""
    weights = [torch.nn.Parameter(numbers(2000, 128).bfloat16().to(dtype)) for _ in range(2)]
    copies = copies_of(weights)
    assert len(copies.copies) == 2 and copies.is_unchanged() and copies.is_of(weights)
    with torch.no_grad():
        changed = weights[1] if is_counted else weights[1].data
        changed[part] *= 2
    assert copies.is_unchanged() != is_counted
    assert not copies.is_of(weights)


def test_weights_without_copies_are_not_compared():
    weights = [torch.nn.Parameter(numbers(20, 96)), torch.nn.Parameter(numbers(20, 96).bfloat16().float())]
    assert list(copies_of(weights).copies) == [weights[1].data_ptr()]
    copies = copies_of(weights[:1])
    with torch.no_grad():
        weights[0].mul_(2)
    assert not copies.copies and copies.is_unchanged() and copies.is_of(weights[:1])
