"""Activations: the numbers of torch, to the last bit where torch computes them in vectors."""

import copy

import pytest
import torch
from torch.nn.functional import relu, silu
from transformers.activations import XIELUActivation

from hf_smartspec.cpu import gates
from hf_smartspec.cpu.gates import (
    FUNCTIONS,
    ClampedGate,
    activated,
    can_gate,
    clamped_gated,
    gated,
    sigmoid_gated,
    xielu,
)
from hf_smartspec.cpu.kernels.gates import GELU, GELU_TANH, RELU, RELU_SQUARED, SILU

pytestmark = pytest.mark.skipif(not gates.has_gates(torch.float32), reason="there is no compiled code for this CPU")

DTYPES = (torch.float32, torch.bfloat16)


def numbers(num_tokens: int, size: int, scale: float) -> torch.Tensor:
    return torch.randn(num_tokens, 2 * size, generator=torch.Generator().manual_seed(size)) * scale


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", [0.1, 3.0, 40.0])
@pytest.mark.parametrize("size", [32, 544, 1536])
def test_silu_is_torchs_bit_for_bit(size, scale, dtype):
    hidden = numbers(7, size, scale).to(dtype)
    gate, up = hidden.chunk(2, dim=1)
    assert torch.equal(gated(hidden, SILU), silu(gate).mul_(up))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", [0.1, 3.0, 40.0])
@pytest.mark.parametrize("activation", [GELU_TANH, GELU])
def test_gelu_is_as_near_as_torchs(activation, scale, dtype):
    hidden, function = numbers(7, 544, scale).to(dtype), FUNCTIONS[activation]
    gate, up = hidden.chunk(2, dim=1)
    exact = function(gate.double()) * up.double()
    errors = [(found - exact).abs().max() for found in (gated(hidden, activation), function(gate) * up)]
    assert errors[0] <= 2 * errors[1]
    exact = function(hidden.double())
    errors = [(found - exact).abs().max() for found in (activated(hidden, activation), function(hidden))]
    assert errors[0] <= 2 * errors[1]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", [RELU, RELU_SQUARED])
def test_relu_is_torchs_bit_for_bit(activation, dtype):
    hidden, function = numbers(7, 544, 3.0).to(dtype), FUNCTIONS[activation]
    gate, up = hidden.chunk(2, dim=1)
    assert torch.equal(gated(hidden, activation), function(gate) * up)
    expected = relu(hidden.float()) if activation == RELU else relu(hidden.float()).square()
    assert torch.equal(activated(hidden, activation), expected.to(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", [0.01, 3.0, 40.0])
@torch.no_grad()
def test_xielu_is_as_near_as_transformers(scale, dtype):
    module = XIELUActivation(1.3, 0.9, 0.4, -1e-3, dtype=dtype)
    hidden, own = numbers(7, 544, scale).to(dtype), [module.alpha_p, module.alpha_n, module.beta, module.eps]
    found, expected, exact = xielu(hidden, own), module(hidden), copy.deepcopy(module).double()(hidden.double())
    assert (found - exact).abs().max() <= 2 * (expected - exact).abs().max()
    special = torch.tensor([torch.nan, torch.inf, -torch.inf, 0.0] * 4).to(dtype)[None]
    torch.testing.assert_close(xielu(special, own), module(special), equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", FUNCTIONS)
def test_what_is_no_number_stays_so(activation, dtype):
    gate = torch.tensor([torch.nan, torch.inf, -torch.inf, 0.0, -0.0, 200.0, -200.0, -90.0] * 4).to(dtype)
    hidden = torch.cat([gate, torch.ones_like(gate)])[None]
    expected, infinite = FUNCTIONS[activation](gate), gate.isinf()
    # torch's GELU of infinity is no number on some CPUs, but in float64.
    expected[infinite] = FUNCTIONS[activation](gate.double())[infinite].to(dtype)
    for found in (gated(hidden, activation)[0], activated(gate[None], activation)[0]):
        torch.testing.assert_close(found, expected, equal_nan=True, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", [0.1, 3.0, 40.0])
@pytest.mark.parametrize("size", [32, 544])
def test_clamped_gates_are_rounded_once(size, scale, dtype):
    """Compare with float64, whose numbers are rounded; those that are none stay so."""
    hidden, gate = numbers(7, size, scale).to(dtype), ClampedGate(1.702, 7.0)
    hidden[0, :4] = torch.tensor([torch.nan, 1.0, 1.0, torch.nan])
    hidden[1, :4] = torch.tensor([torch.inf, -torch.inf, -torch.inf, torch.inf])
    found, expected = clamped_gated(hidden, gate), gate.by_torch(hidden.double())
    assert found[0, :2].isnan().all() and expected[1].isnan().sum() == 1
    if dtype is torch.float32:
        torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-30, equal_nan=True)
    else:
        differs = ~torch.isclose(found, expected.to(dtype), rtol=0, atol=1e-30, equal_nan=True)
        assert differs.float().mean() < 0.01


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num", [6, 96])
def test_sigmoids_of_gates_are_rounded_and_then_products(num, dtype):
    """One gate for each part of a token's numbers, and one for each number."""
    x, gates = numbers(7, 48, 3.0).to(dtype), numbers(7, num // 2, 5.0).to(dtype)
    found, expected = sigmoid_gated(x, gates), x * gates.sigmoid().repeat_interleave(96 // num, dim=1)
    bound = 4 * torch.finfo(dtype).eps if dtype is torch.float32 else 0.0  # torch's last sigmoids may differ in a bit
    torch.testing.assert_close(found, expected, rtol=bound, atol=0.0)


@pytest.mark.parametrize(
    "change",
    [
        lambda hidden: hidden.double(),
        lambda hidden: hidden.half(),
        lambda hidden: hidden[:, ::2],
        lambda hidden: hidden.to("meta"),
        lambda hidden: hidden.clone().requires_grad_(),
    ],
    ids="float64, float16, gaps, elsewhere, gradient".split(", "),
)
def test_anything_else_is_torchs(change):
    hidden = numbers(3, 32, 1.0)
    assert can_gate(hidden) and can_gate(hidden.bfloat16())
    assert not can_gate(change(hidden))
