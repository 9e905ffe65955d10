"""Compiled products against the same in torch's operators: equal bit by bit, whatever is multiplied, and by whom."""

import copy
from concurrent.futures import ThreadPoolExecutor

import numba
import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import hf_smartspec
from hf_smartspec import Int8Linear, quantize
from hf_smartspec.cpu import threads
from hf_smartspec.cpu.quantized import native, product
from hf_smartspec.cpu.quantized.kernels import dots
from hf_smartspec.cpu.quantized.product import int8_linear, plain_int8_linear, to_levels
from hf_smartspec.target_model.written import written_decoder

from ...models import new_model

pytestmark = pytest.mark.skipif(not native.has_kernels(), reason="there are no compiled products for this CPU")

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
NUMBERS = (1, 2, 3, 5, 8, 12, 15, 16, 17, 32)  # of tokens
MANY = (33, 64, 75)


def new_map(num_inputs: int, num_outputs: int, bias_dtype=None):
    """Weight, scale and bias."""
    generator = torch.Generator().manual_seed(num_inputs)
    levels = to_levels(torch.randn(num_outputs, num_inputs, generator=generator))
    bias = None if bias_dtype is None else torch.randn(num_outputs, generator=generator).to(bias_dtype)
    return levels.values, levels.steps.flatten(), bias


def new_tokens(num_tokens: int, num_inputs: int, dtype) -> torch.Tensor:
    """From subnormal to huge ones; the third has halves to round."""
    x = torch.randn(num_tokens, num_inputs, generator=torch.Generator().manual_seed(num_tokens))
    x = x * torch.logspace(-41, 30, num_tokens)[:, None]
    if num_tokens > 2:
        x[2] = torch.arange(num_inputs) % 254 - 126.5
        x[2, 0] = 127
    return x.to(dtype)


def assert_equal(actual: torch.Tensor, expected: torch.Tensor) -> None:
    assert actual.dtype == expected.dtype and actual.shape == expected.shape
    torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_inputs, num_outputs", [(1, 1), (63, 37), (64, 32), (70, 203), (1088, 96)])
def test_numbers_are_those_of_torchs_operators(num_inputs, num_outputs, dtype):
    for bias_dtype in (None, *DTYPES):
        weight, scale, bias = new_map(num_inputs, num_outputs, bias_dtype)
        for num_tokens in NUMBERS:
            x = new_tokens(num_tokens, num_inputs, dtype)
            assert native.can_multiply(x, weight, scale, bias)
            actual, expected = (map_(x, weight, scale, bias) for map_ in (native.int8_linear, plain_int8_linear))
            assert_equal(actual, expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_inputs, num_outputs", [(4, 16), (64, 33), (76, 203), (1088, 96)])
def test_numbers_of_many_tokens(num_inputs, num_outputs, dtype):
    """From matrix registers, or where torch's sums are not exact."""
    if dots.has_dots() and not native.has_matrix_registers():
        pytest.skip("they are left to torch")
    weight, scale, bias = new_map(num_inputs, num_outputs, torch.float32)
    for num_tokens in MANY:
        x = new_tokens(num_tokens, num_inputs, dtype)
        assert native.can_multiply(x, weight, scale, bias)
        assert_equal(native.int8_linear(x, weight, scale, bias), plain_int8_linear(x, weight, scale, bias))


def test_numbers_without_matrix_registers(monkeypatch):
    monkeypatch.setattr(native, "has_matrix_registers", lambda: False)
    weight, scale, bias = new_map(76, 203, torch.float32)
    for num_tokens in NUMBERS:
        x = new_tokens(num_tokens, 76, torch.bfloat16)
        assert_equal(native.int8_linear(x, weight, scale, bias), plain_int8_linear(x, weight, scale, bias))
    assert native.can_multiply(x.repeat(2, 1), weight, scale, bias) == (not dots.has_dots()), "else torch is faster"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_tokens", [9, 18])
def test_zeros_and_what_is_no_number(dtype, num_tokens):
    weight, scale, bias = new_map(72, 40, dtype)
    x = torch.randn(num_tokens, 72, generator=torch.Generator().manual_seed(0)).to(dtype)
    x[0] = 0
    x[1, 71], x[3, 0], x[4, 1], x[5, :2] = torch.nan, torch.inf, -torch.inf, torch.tensor([torch.nan, torch.inf])
    actual = native.int8_linear(x, weight, scale, bias)
    assert_equal(actual, plain_int8_linear(x, weight, scale, bias))
    assert torch.equal(actual[0], bias) and actual[[2, 6, 7, 8]].isfinite().all()
    assert not actual[[1, 3, 4, 5]].isfinite().any()


@pytest.fixture
def few_threads():
    num_threads = torch.get_num_threads()
    yield
    torch.set_num_threads(num_threads)


@pytest.mark.parametrize("num_threads", [1, 2, 3])
def test_any_number_of_threads(few_threads, num_threads):
    """Enough work for all of them: 31 shares of the weight, the last of them with fewer outputs."""
    weight, scale, _ = new_map(4096, 991)
    for num_tokens in (1, 9, 40):
        x = new_tokens(num_tokens, 4096, torch.float32)
        torch.set_num_threads(num_threads)
        assert_equal(native.int8_linear(x, weight, scale), plain_int8_linear(x, weight, scale))


def test_several_callers_at_the_same_time():
    weight, scale, _ = new_map(1024, 512)
    tokens = [new_tokens(num_tokens, 1024, torch.bfloat16) for num_tokens in range(1, 25)] * 3
    expected = [plain_int8_linear(x, weight, scale) for x in tokens]
    with ThreadPoolExecutor(4) as pool:
        for actual, wanted in zip(pool.map(lambda x: native.int8_linear(x, weight, scale), tokens), expected):
            assert_equal(actual, wanted)


def test_nothing_behind_the_weight_counts():
    """Rows are read in vectors, the last one in part."""
    weight, scale, _ = new_map(72, 48)
    padded = torch.full((48 * 72 + 64,), 99, dtype=torch.int8)
    padded[: 48 * 72] = weight.flatten()
    for num_tokens in (3, 16):
        x = new_tokens(num_tokens, 72, torch.float32)
        expected = plain_int8_linear(x, weight, scale)
        assert_equal(native.int8_linear(x, padded[: 48 * 72].view(48, 72), scale), expected)


@pytest.mark.parametrize("num_tokens", [1, 4, 7])
@pytest.mark.parametrize("width", [32, 16])
def test_vectors_of_processors_without_avx512(monkeypatch, width, num_tokens):
    if width == 32 and not dots.has_dots():
        pytest.skip("the CPU lacks the instruction")
    monkeypatch.setattr(dots, "widest", lambda: width)
    own, generator = dots._dots(2, num_tokens), np.random.default_rng(0)
    weight = generator.integers(-127, 128, (2, 77)).astype(np.int8)
    levels = np.zeros((num_tokens, 128), np.int8)
    levels[:, :77] = generator.integers(-127, 128, (num_tokens, 77))
    offsets = (dots.OFFSET * levels.astype(np.int32).sum(1)).astype(np.int32)
    sums = np.zeros((num_tokens, 2), np.int32)

    @numba.njit
    def multiply(weight, levels, offsets, sums):
        own(weight, 77, levels, 128, offsets, sums, 2)

    multiply(*(item.ctypes.data for item in (weight, levels, offsets, sums)))
    assert np.array_equal(sums, levels[:, :77].astype(int) @ weight.T.astype(int))


class Operators(TorchDispatchMode):
    """Names of what torch is asked to do."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        self.names.append(str(function))
        return function(*arguments, **keywords or {})


def test_a_product_of_few_tokens_takes_few_calls(monkeypatch):
    calls, run = [], native.run
    weight, scale, bias = new_map(70, 40, torch.float32)
    x = new_tokens(4, 70, torch.bfloat16)
    int8_linear(x, weight, scale, bias)  # the first of all looks at the CPU
    monkeypatch.setattr(native, "run", lambda *arguments: (calls.append(arguments), run(*arguments)))
    with Operators() as operators:
        int8_linear(x, weight, scale, bias)
    assert len(calls) == 2 and operators.names == ["aten.empty.memory_format"] * 2


@pytest.mark.parametrize("is_written", [True, False])
def test_decoding_multiplies_with_compiled_code(monkeypatch, is_written):
    model, calls, run = quantize(new_model("llama")), [], native.run
    plain = copy.deepcopy(model)
    monkeypatch.setattr(native, "run", lambda *arguments: (calls.append(arguments), run(*arguments)))
    with hf_smartspec.target_model.written.written_decoders(is_written):
        assert (written_decoder(model) is not None) == is_written
        with hf_smartspec.enabled(model):
            ids, arguments = torch.arange(3, 12)[None], {"max_new_tokens": 12, "do_sample": False}
            calls.clear()
            actual = model.generate(ids, **arguments, assistant="auto")
            assert len(calls) > 100
    monkeypatch.setattr(native, "can_multiply", lambda *_: False)
    calls.clear()
    assert torch.equal(plain.generate(ids, **arguments), actual) and not calls


def test_what_compiled_code_cannot_read_is_left_to_torch(monkeypatch):
    weight, scale, bias = new_map(70, 40, torch.float32)
    x = new_tokens(4, 70, torch.float32)
    assert not native.can_multiply(x[:0], weight, scale, bias)
    if dots.has_dots():
        assert not native.can_multiply(x.repeat(99, 1), weight, scale, bias)
        assert not native.can_multiply(torch.zeros(513, 72), *new_map(72, 40))
    assert not native.can_multiply(x.double(), weight, scale, bias)
    assert not native.can_multiply(x, weight, scale, bias.double())
    assert not native.can_multiply(x, weight.t().contiguous().t(), scale, bias)
    assert not native.can_multiply(x, weight.to("meta"), scale, bias)
    assert not native.can_multiply(x[:, :69], weight, scale, bias)
    expected = int8_linear(x, weight, scale, bias)
    assert_equal(int8_linear(x.t().contiguous().t(), weight, scale, bias), expected)
    assert_equal(int8_linear(x, weight.t().contiguous().t(), scale, bias), expected)


def test_without_torchs_threads_there_are_no_kernels(monkeypatch):
    monkeypatch.setattr(threads.torch, "__file__", "/nowhere/__init__.py")
    for function in (threads._parallel, native.has_kernels):
        function.cache_clear()
    try:
        assert not native.has_kernels()
        module = Int8Linear(torch.randn(5, 7))
        assert module(torch.randn(2, 7)).shape == (2, 5)
    finally:
        monkeypatch.undo()
        for function in (threads._parallel, native.has_kernels):
            function.cache_clear()


@pytest.mark.parametrize("which", ["scale", "bias"])
@pytest.mark.parametrize("change", [lambda v: v.repeat_interleave(2)[::2], lambda v: v[:1].expand(40), lambda v: v[:1]])
def test_vectors_that_do_not_lie_side_by_side_are_torchs(which, change):
    weight, scale, bias = new_map(70, 40, torch.float32)
    vectors = {"scale": scale, "bias": bias}
    assert native.can_multiply(new_tokens(4, 70, torch.float32), weight, **vectors)
    vectors[which] = change(vectors[which])
    assert not native.can_multiply(new_tokens(4, 70, torch.float32), weight, **vectors)


@pytest.mark.filterwarnings("ignore")  # of what a trace does not follow
def test_traced_models_multiply_with_torchs_operators():
    weight, scale, bias = new_map(70, 40, torch.float32)
    tokens = new_tokens(3, 70, torch.float32)
    traced = torch.jit.trace(lambda x: int8_linear(x, weight, scale, bias), tokens, check_trace=False)
    x = new_tokens(2, 70, torch.float32)
    assert_equal(traced(x), plain_int8_linear(x, weight, scale, bias))


def test_where_nothing_can_be_compiled_torchs_operators_serve(monkeypatch):
    def fail(*_):
        raise RuntimeError("no such instruction")

    monkeypatch.setattr(native, "run", fail)
    product.has_right_kernels.cache_clear()
    try:
        weight, scale, bias = new_map(70, 40, torch.float32)
        x = new_tokens(3, 70, torch.float32)
        assert_equal(int8_linear(x, weight, scale, bias), plain_int8_linear(x, weight, scale, bias))
    finally:
        product.has_right_kernels.cache_clear()
