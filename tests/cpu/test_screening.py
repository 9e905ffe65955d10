"""Best tokens by a screen of the head: those of its whole product, to the last bit."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_smartspec.cpu import screening
from hf_smartspec.cpu.few_tokens import few_token_linear
from hf_smartspec.cpu.kernels.dots import GROUP, PART
from hf_smartspec.cpu.kernels.screen import CHUNK
from hf_smartspec.cpu.quantized.product import to_levels
from hf_smartspec.cpu.screening import Screen, best_tokens, can_screen, has_screening

pytestmark = pytest.mark.skipif(not has_screening(torch.float32), reason="there is no faster code for this CPU")

DTYPES = (torch.float32, torch.bfloat16)


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def expected(x, weight):
    """The arg max of the product; torch's takes the first of several that are equal."""
    return few_token_linear(x, weight).argmax(dim=1).tolist()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_tokens", [1, 2, 7, 16, 40])
@pytest.mark.parametrize(("num_outputs", "num_inputs"), [(1, 16), (CHUNK, 64), (CHUNK + 1, 80), (3001, 176)])
def test_best_tokens_are_those_of_the_product(num_outputs, num_inputs, num_tokens, dtype):
    weight, x = numbers(num_outputs, num_inputs).to(dtype), numbers(num_tokens, num_inputs, seed=1).to(dtype)
    found = best_tokens(x, weight, Screen(weight))
    assert found.tokens == expected(x, weight)
    assert found.scores.shape == (num_tokens, num_outputs)
    for chunk, bounds in zip(found.scores.split(CHUNK, dim=1), found.bounds.T, strict=True):
        assert (chunk.amax(dim=1).numpy() <= bounds).all()


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    dtype=st.sampled_from(DTYPES),
    num_copies=st.integers(1, 300),
    apart=st.sampled_from([0.0, 1e-7, 1e-3]),
    outliers=st.booleans(),
    scale=st.sampled_from([1e-20, 1e-3, 1.0, 1e6]),
)
def test_rows_that_are_nearly_equal(seed, dtype, num_copies, apart, outliers, scale):
    """Copies of the best row, far below what int8 tells apart; equal ones go to the first."""
    rng = np.random.default_rng(seed)
    weight, x = numbers(1500, 96, seed=seed % 2**31), numbers(3, 96, seed=seed % 2**31 + 1)
    if outliers:
        weight[:, 5] *= 50
        x[:, 70] *= 200
    best = int((x @ weight.T)[0].argmax())
    for row in rng.integers(0, 1500, num_copies):
        weight[row] = weight[best] * (1 + apart * rng.standard_normal())
    weight, x = (weight * scale).to(dtype), x.to(dtype)
    assert best_tokens(x, weight, Screen(weight)).tokens == expected(x, weight)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("scale", "own"), [(1e-24, 1.0), (1e-36, 1.0), (1e-39, 1e3), (1.0, 1e-24), (1e-16, 1e-20)])
def test_numbers_whose_squares_vanish(scale, own, dtype):
    """Lengths would be 0 if squares were added up in float32; some sums are rounded to 0."""
    weight = (numbers(1, 64) + 0.01 * numbers(1000, 64, seed=2)) * scale  # rows that int8 hardly tells apart
    weight, x = weight.to(dtype), (numbers(16, 64, seed=1) * own).to(dtype)
    assert best_tokens(x, weight, Screen(weight)).tokens == expected(x, weight)


@pytest.mark.parametrize("dtype", DTYPES)
def test_zeros(dtype):
    weight, x = numbers(700, 64).to(dtype), torch.zeros(2, 64, dtype=dtype)
    assert best_tokens(x, weight, Screen(weight)).tokens == [0, 0]
    weight = torch.zeros_like(weight)
    assert best_tokens(numbers(2, 64).to(dtype), weight, Screen(weight)).tokens == [0, 0]


@pytest.mark.parametrize("dtype", DTYPES)
def test_scores_err_by_no_more_than_their_bounds(dtype):
    weight, x = numbers(1000, 160).to(dtype), numbers(5, 160, seed=1).to(dtype)
    screen = Screen(weight)
    scores = best_tokens(x, weight, screen).scores
    levels, steps = to_levels(x, PART)
    rounded = (levels * steps[..., None]).flatten(1)[:, :160].double()
    assert rounded.shape[1] % GROUP  # the last group is filled up
    lost, length = (x.double() - rounded).norm(dim=1), x.double().norm(dim=1)
    bounds = length[:, None] * screen.errors + lost[:, None] * screen.norms
    assert ((scores - x.double() @ weight.double().T).abs() <= bounds).all()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e30])
@pytest.mark.parametrize("dtype", DTYPES)
def test_numbers_without_bounds(value, dtype):
    """They are left to the whole product, as are weights of that kind."""
    weight, x = numbers(600, 64).to(dtype), numbers(3, 64).to(dtype)
    other = weight.clone()
    other[300, 7] = value
    assert Screen(weight).is_finite and not Screen(other).is_finite
    x[1, 5] = value
    assert best_tokens(x, weight, Screen(weight)) is None


def test_changes_of_the_weight():
    weight = torch.nn.Parameter(numbers(300, 64))
    screen = Screen(weight)
    assert screen.is_of(weight, thoroughly=True)
    with torch.no_grad():
        weight[7, 7] += 1
    assert not screen.is_of(weight)
    screen = Screen(weight)
    weight.data[[3, 5]] = weight.data[[5, 3]]  # which torch does not count
    assert screen.is_of(weight) and not screen.is_of(weight, thoroughly=True)
    screen = Screen(weight)
    weight.data.copy_(weight.data.roll(32, dims=1))  # no row has other numbers than before
    assert not screen.is_of(weight, thoroughly=True)


def test_weights_of_inference_tensors():
    with torch.inference_mode():
        weight = numbers(300, 64)
        assert Screen(weight).is_of(weight, thoroughly=True)


def test_large_plain_weights_are_screened(monkeypatch):
    monkeypatch.setattr(screening, "_LEAST", 600 * 64)
    weight = numbers(600, 64)
    assert can_screen(weight) and can_screen(weight.bfloat16()) and can_screen(torch.nn.Parameter(weight))
    assert not can_screen(weight[:-1]) and not can_screen(weight.half()) and not can_screen(weight.T)
    assert not can_screen(weight.view(-1, 40))
    assert not can_screen(numbers(600 * 64 + 1)[1:].view(600, 64))  # its bits are not integers of 64 bits


@pytest.mark.parametrize("number", [1, 3])
def test_any_number_of_threads(number):
    weight, x, before = numbers(5000, 64), numbers(4, 64, seed=1), torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        assert best_tokens(x, weight, Screen(weight)).tokens == expected(x, weight)
    finally:
        torch.set_num_threads(before)
