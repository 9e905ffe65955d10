"""Linear maps in int8 and int4: close to what they stand for, and the same for a token whatever runs beside it."""

import copy

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from hf_smartspec import Int4Linear, Int8Linear
from hf_smartspec.cpu.quantized import unrounded_tokens
from hf_smartspec.cpu.quantized.codes import unpacked
from hf_smartspec.cpu.quantized.levels import in_blocks, to_levels
from hf_smartspec.cpu.quantized.product import plain_quantized_linear

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.fixture(params=[Int8Linear, Int4Linear])
def layer(request):
    return request.param


def new_linear(dtype=torch.float32, bias: bool = True) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(70, 50, bias=bias, dtype=dtype).requires_grad_(False)


def new_tokens(num_tokens: int = 33, dtype=torch.float32) -> torch.Tensor:
    """Of different sizes, one with an outlier, one of zeros."""
    x = torch.randn(num_tokens, 70, generator=torch.Generator().manual_seed(1))
    x = x * torch.logspace(-3, 3, num_tokens)[:, None]
    x[2, 5] *= 100
    x[3] = 0
    return x.to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", [True, False])
def test_values_are_within_half_a_step_of_weight_and_token(dtype, bias):
    linear, x = new_linear(dtype, bias), new_tokens(dtype=dtype)
    module = Int8Linear(linear.weight, linear.bias)
    actual, expected = module(x), nn.functional.linear(x.double(), linear.weight.double())
    weight, (values, steps) = module.dequantized().double(), to_levels(x, 32)
    rounding = (x.double() - (values * steps[..., None]).flatten(1)[:, :70].double()).abs()
    scales = to_levels(linear.weight).steps.repeat_interleave(64, 1)[:, :70].double()
    # x w - a b = x (w - b) + (x - a) b, and |w - b| is at most half a scale
    bound = x.double().abs() @ scales.t() / 2 + rounding @ weight.abs().t()
    assert (rounding <= steps.repeat_interleave(32, 1)[:, :70] * 0.5001).all()
    if bias:
        expected = expected + linear.bias.double()
    bound = bound * 1.0001 + expected.abs() * torch.finfo(dtype).eps + 1e-12
    assert actual.dtype == dtype and actual.shape == (33, 50)
    assert ((actual.double() - expected).abs() <= bound).all()
    assert (actual[3] == (linear.bias if bias else 0)).all()


def test_sums_of_groups_are_exact():
    linear, x = new_linear(), new_tokens()
    (values, steps), own = to_levels(x, 32), to_levels(linear.weight)
    expected = torch.zeros(33, 50)
    for group in range(2):
        sums = torch.zeros(33, 50)
        for part in range(2):
            number, inputs = 2 * group + part, slice(32 * part, 32 * (part + 1))
            exact = values[:, number].long() @ own.values[:, group, inputs].long().t()
            sums += exact.float() * steps[:, number, None]
        expected += sums * own.steps[:, group]
    assert torch.equal(Int8Linear(linear.weight)(x), expected)
    assert values.abs().max() == 127 and own.values.abs().amax(-1).eq(127).all()


def test_sums_of_parts_are_exact_in_int4():
    linear, x = new_linear(), new_tokens()
    module, (values, steps) = Int4Linear(linear.weight), to_levels(x, 32)
    codes = unpacked(module.weight).flatten(0, 1)[:50].long()
    expected = torch.zeros(33, 50)
    for number in range(4):
        scale, least = module.scale.float()[:, number // 2, number % 2].transpose(0, 1).flatten(1)[:, :50]
        exact = values[:, number].long() @ codes[:, 32 * number : 32 * (number + 1)].t()
        step = steps[:, number, None]
        expected += exact.float() * step * scale
        expected += values[:, number].sum(1, keepdim=True).float() * step * least
    assert torch.equal(module(x), expected)


def test_an_outlier_coarsens_its_neighbours_only():
    x = torch.randn(4, 128)
    outlier = x.clone()
    outlier[:, 3] = 1e4
    found, changed = to_levels(x, 32), to_levels(outlier, 32)
    assert torch.equal(found.values[:, 1:], changed.values[:, 1:])
    assert (changed.values[:, 0].count_nonzero(-1) == 1).all()


class _Sizes(TorchDispatchMode):
    """Notes the numbers of every floating-point tensor that an operator returns."""

    def __init__(self):
        super().__init__()
        self.largest = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result.is_floating_point():
            self.largest = max(self.largest, result.numel())
        return result


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", [True, False])
def test_without_rounded_tokens_weights_are_never_whole_in_float32(dtype, bias, layer):
    linear, x = nn.Linear(70, 600, bias=bias, dtype=dtype).requires_grad_(False), new_tokens(dtype=dtype)[:5]
    module, sizes = layer(linear.weight, linear.bias), _Sizes()
    with unrounded_tokens(), sizes:
        actual = module(x)
    weight = module.dequantized().double()
    expected = nn.functional.linear(x.double(), weight, None if linear.bias is None else linear.bias.double())
    error = (actual.double() - expected).abs()
    assert actual.dtype == dtype
    sums = x.double().abs() @ weight.abs().t()
    assert (error <= torch.finfo(dtype).eps * expected.abs() + 1e-6 * sums + torch.finfo(dtype).tiny).all()
    assert 0 < sizes.largest < 608 * 128 / 2, "of 38 blocks"


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_tokens_result_is_the_same_bit_by_bit_in_any_batch(dtype, layer):
    linear, x = new_linear(dtype), new_tokens(dtype=dtype)
    module = layer(linear.weight, linear.bias)
    whole = module(x)
    for size in (1, 2, 5, 16, 31):
        assert torch.equal(torch.cat([module(part) for part in x.split(size)]), whole)
    assert torch.equal(module(x.view(3, 11, 70)), whole.view(3, 11, 50))
    assert torch.equal(module(x[::2]), whole[::2])


def test_what_is_no_number_stays_in_its_token(layer):
    module, x = layer(new_linear().weight), new_tokens(6)
    expected = module(x)
    x[1, 3], x[4, 0] = float("nan"), float("inf")
    actual, others = module(x), [0, 2, 3, 5]
    assert torch.equal(actual[others], expected[others])
    assert not actual[[1, 4]].isfinite().any()


def test_no_tokens(layer):
    assert layer(new_linear().weight)(torch.zeros(2, 0, 70)).shape == (2, 0, 50)


def test_the_input_stays_as_it_is(layer):
    x = new_tokens()
    kept = x.clone()
    layer(new_linear().weight)(x)
    assert torch.equal(x, kept)


def test_memory():
    linear = new_linear(torch.bfloat16)
    module = Int8Linear(linear.weight, linear.bias)
    sizes = {name: item.numel() * item.itemsize for name, item in module.named_parameters()}
    assert sizes == {"weight": 64 * 128, "scale": 64 * 2 * 4, "bias": 50 * 2}, "whole blocks and groups"
    assert (module.in_features, module.out_features) == (70, 50)
    assert repr(module) == "Int8Linear(in_features=70, out_features=50, bias=True)"
    sizes = {name: item.nbytes for name, item in Int4Linear(linear.weight, linear.bias).named_parameters()}
    assert sizes == {"weight": 64 * 128 / 2, "scale": 64 * 4 * 2 * 2, "bias": 50 * 2}


def test_torchs_default_dtype_does_not_matter():
    linear, x = new_linear(), new_tokens()
    arguments = *in_blocks(to_levels(linear.weight)), linear.bias, 50
    expected = plain_quantized_linear(x, *arguments)
    try:
        torch.set_default_dtype(torch.bfloat16)
        assert torch.equal(plain_quantized_linear(x, *arguments), expected)
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_casting_keeps_the_scale(dtype, layer):
    linear = new_linear()
    module = layer(linear.weight, linear.bias)
    scale, kept = module.scale.clone(), (module.weight.dtype, module.scale.dtype)
    module.to(dtype)
    assert (module.weight.dtype, module.scale.dtype) == kept and module.bias.dtype == dtype
    assert torch.equal(module.scale, scale)
    assert module.to("meta").scale.device.type == "meta"


def test_copies_and_state_dicts(layer):
    linear, x = new_linear(), new_tokens()
    module = layer(linear.weight, linear.bias)
    duplicate = copy.deepcopy(module)
    assert torch.equal(duplicate(x), module(x)) and duplicate.weight is not module.weight
    other = layer(torch.zeros(50, 70), torch.zeros(50))
    other.load_state_dict(module.state_dict())
    assert torch.equal(other(x), module(x))


@pytest.mark.parametrize("assign", [True, False])
def test_weights_that_are_not_quantized_are_as_they_are_loaded(assign, layer):
    linear, x = new_linear(), new_tokens()
    other = layer(torch.zeros(50, 70), torch.zeros(50))
    other.load_state_dict(linear.state_dict(), assign=assign)
    assert not other.weight.is_floating_point()
    assert torch.equal(other(x), layer(linear.weight, linear.bias)(x))


def test_gradients_are_refused(layer):
    module, x = layer(new_linear().weight), new_tokens().requires_grad_()
    with pytest.raises(RuntimeError, match="no gradients"):
        module(x)
    with torch.no_grad():
        module(x)


def test_other_devices_are_refused(layer):
    module = layer(new_linear().weight)
    with pytest.raises(RuntimeError, match="run on the CPU"):
        module.to("meta")(new_tokens().to("meta"))
