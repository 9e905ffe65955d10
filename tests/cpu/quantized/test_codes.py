"""Weights in four bits: near to what they stand for, and the same where four bits hold it."""

import pytest
import torch
from hypothesis import given, settings, strategies

from hf_smartspec.cpu.quantized.codes import MOST, check, dequantized, to_codes

SHAPES = (1, 1), (16, 64), (17, 31), (37, 150), (600, 576)


def restored(rows: torch.Tensor) -> torch.Tensor:
    """Return rows after they were in four bits."""
    return dequantized(*to_codes(rows))[: len(rows), : rows.shape[1]]


def parts_of(rows: torch.Tensor) -> list[torch.Tensor]:
    return list(rows.split(32, dim=1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", SHAPES)
def test_numbers_stay_within_their_parts_steps(shape, dtype):
    rows = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    found = restored(rows)
    for own, part in zip(parts_of(found), parts_of(rows.float())):
        lowest, highest = part.amin(1, keepdim=True), part.amax(1, keepdim=True)
        # Numbers beyond the range of codes, which may be cut off, are up to a step and a half away.
        assert ((own - part).abs() <= (highest - lowest) / 10 + 1e-3 * part.abs()).all()
    assert (found - rows).norm() <= 0.08 * rows.float().norm() + 1e-3


def test_errors_are_less_than_those_of_the_lowest_and_the_highest_number_as_ends():
    rows = torch.randn(256, 256, generator=torch.Generator().manual_seed(0))
    parts = rows.view(256, 8, 32)
    lowest = parts.amin(-1, keepdim=True)
    step = (parts.amax(-1, keepdim=True) - lowest) / 15
    plain = ((parts - lowest) / step).round() * step + lowest
    assert (restored(rows) - rows).norm() < 0.95 * (plain.flatten(1) - rows).norm()


@pytest.mark.parametrize("num_codes", [12, 14, 16])
def test_multiples_of_a_scale_stay_as_they_are(num_codes):
    """Files of four bits hold such weights, also some whose parts do not use all codes."""
    generator = torch.Generator().manual_seed(num_codes)
    codes = torch.randint(0, num_codes, (48, 4, 32), generator=generator).float()
    codes[..., 5], codes[..., 9] = 0, num_codes - 1
    scale, least = (torch.rand(48, 4, 1, generator=generator).half().float() - offset for offset in (-0.01, 0.5))
    rows = (codes * scale.half().float() + least.half().float()).flatten(1)
    assert torch.allclose(restored(rows), rows, rtol=0, atol=1e-6)


@pytest.mark.parametrize("value", [0.0, 0.5, -3.0, 2e-8])
def test_equal_numbers_stay_as_they_are(value):
    rows = torch.full((3, 70), value)
    assert torch.allclose(restored(rows), rows, rtol=0, atol=3e-8)


def test_what_fills_up_the_last_part_does_not_count():
    rows = torch.full((16, 33), 7.0)
    rows[:, :32] = torch.randn(16, 32, generator=torch.Generator().manual_seed(0))
    assert torch.equal(restored(rows)[:, 32], rows[:, 32]), "its part has this number alone, and no zeros"
    _, scales = to_codes(rows)
    assert not scales[:, :, 1, 0].any()


def test_outputs_that_fill_up_a_block_are_zeros():
    assert not dequantized(*to_codes(torch.randn(5, 64)))[5:].any()


@settings(max_examples=50, deadline=None)
@given(strategies.integers(0, 2**32), strategies.floats(-6, 2), strategies.integers(1, 70))
def test_errors_are_small_at_any_size(seed, power, size):
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(3, size, generator=generator) * 10**power
    rows[0, 0] *= 20  # an outlier
    found = restored(rows)
    assert found.isfinite().all()
    for own, part in zip(parts_of(found), parts_of(rows)):
        span = part.amax(1, keepdim=True) - part.amin(1, keepdim=True)
        # float16 has 11 bits, and steps of 6e-8 near 0.
        assert ((own - part).abs() <= span / 10 + part.abs().amax(1, keepdim=True) / 500 + 1e-6).all()


@pytest.mark.parametrize("value", [1.1 * MOST, -1.1 * MOST, torch.inf, torch.nan])
def test_what_float16_does_not_hold_is_refused(value):
    rows = torch.zeros(3, 64)
    rows[1, 7] = value
    with pytest.raises(ValueError, match=r"Weights in int4 .* may be 32,768 at most, got"):
        check(rows)
    check(torch.zeros(0, 4))


def test_where_the_scale_is_zero_in_float16_numbers_become_their_mean():
    rows = torch.linspace(-1.5e-7, 1.7e-7, 32)[None]
    assert restored(rows).abs().max() < 6e-8 and torch.equal(restored(rows * 0.1), torch.zeros(1, 32))
