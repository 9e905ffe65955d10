"""Compiled products against the same in torch's operators: equal bit by bit, whatever is multiplied, and by whom."""

import copy
from concurrent.futures import ThreadPoolExecutor

import numba
import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import hf_smartspec
from hf_smartspec import Int8Linear, jit, quantize
from hf_smartspec.cpu import threads
from hf_smartspec.cpu.kernels import dots, int8
from hf_smartspec.cpu.quantized import native, product
from hf_smartspec.cpu.quantized.codes import to_codes
from hf_smartspec.cpu.quantized.levels import in_blocks, to_levels
from hf_smartspec.cpu.quantized.product import dequantized, plain_quantized_linear, quantized_linear
from hf_smartspec.jit.pointers import float32_at, int64_at
from hf_smartspec.target_model.written import written_decoder
from hf_smartspec.target_model.written.compiled import CompiledDecoder

from ...models import new_model

pytestmark = pytest.mark.skipif(not native.has_kernels(), reason="there are no compiled products for this CPU")

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
NUMBERS = (1, 2, 3, 5, 8, 9, 16, 17, 33, 75)  # of tokens


KINDS = {"int8": lambda rows: in_blocks(to_levels(rows)), "int4": to_codes}


@pytest.fixture(params=KINDS)
def kind(request):
    return request.param


def new_map(num_inputs: int, num_outputs: int, bias_dtype=None, kind: str = "int8"):
    """Weight, scale, bias, and the number of outputs."""
    generator = torch.Generator().manual_seed(num_inputs)
    weight, scale = KINDS[kind](torch.randn(num_outputs, num_inputs, generator=generator))
    bias = None if bias_dtype is None else torch.randn(num_outputs, generator=generator).to(bias_dtype)
    return weight, scale, bias, num_outputs


def new_tokens(num_tokens: int, num_inputs: int, dtype) -> torch.Tensor:
    """From subnormal to huge ones; the third has halves to round."""
    x = torch.randn(num_tokens, num_inputs, generator=torch.Generator().manual_seed(num_tokens))
    x = x * torch.logspace(-41, 30, num_tokens)[:, None]
    if num_tokens > 2:
        x[2] = torch.arange(num_inputs) % 254 - 126.5
        x[2, 0] = 127
    return x.to(dtype)


def largest_numbers(num_inputs: int, num_outputs: int, kind: str = "int8"):
    """A map, and tokens, whose levels are as large as they can be, so that sums are, too."""
    generator = torch.Generator().manual_seed(num_inputs)
    signs = torch.randint(0, 2, (num_outputs, num_inputs), generator=generator) * 2 - 1
    signs[:8], signs[8:16] = 1, -1
    weight, scale = KINDS[kind](signs.float())
    if kind == "int8":
        weight[0, 0, 0, 0] = -128  # no level of `to_levels`, but a file may hold it
    else:
        weight[0, 0, :, :] = 0xFF
    x = torch.stack([torch.ones(num_inputs), -torch.ones(num_inputs), signs[20].float(), -signs[21].float()])
    return (weight, scale, None, num_outputs), x


def assert_equal(actual: torch.Tensor, expected: torch.Tensor) -> None:
    assert actual.dtype == expected.dtype and actual.shape == expected.shape
    torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_inputs, num_outputs", [(1, 1), (63, 37), (64, 32), (70, 203), (1088, 96)])
def test_numbers_are_those_of_torchs_operators(num_inputs, num_outputs, dtype, kind):
    for bias_dtype in (None, *DTYPES):
        arguments = new_map(num_inputs, num_outputs, bias_dtype, kind)
        for num_tokens in NUMBERS:
            x = new_tokens(num_tokens, num_inputs, dtype)
            if dtype is not torch.float16 and bias_dtype in (None, dtype):
                assert native.can_multiply(x, *arguments)
            assert_equal(quantized_linear(x, *arguments), plain_quantized_linear(x, *arguments))


def test_a_tokens_numbers_do_not_depend_on_the_others(kind):
    arguments = new_map(576, 320, kind=kind)
    x = new_tokens(128, 576, torch.bfloat16)
    whole = quantized_linear(x, *arguments)
    for size in range(1, 128):
        assert torch.equal(torch.cat([quantized_linear(part, *arguments) for part in x.split(size)]), whole)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_tokens", [9, 18])
def test_zeros_and_what_is_no_number(dtype, num_tokens, kind):
    arguments = new_map(72, 40, dtype, kind)
    x = torch.randn(num_tokens, 72, generator=torch.Generator().manual_seed(0)).to(dtype)
    x[0] = 0
    x[1, 71], x[3, 0], x[4, 1], x[5, :2] = torch.nan, torch.inf, -torch.inf, torch.tensor([torch.nan, torch.inf])
    if dtype is not torch.float16:
        x[6] *= 1e35  # sums stay finite, but not 128 times these
    actual = quantized_linear(x, *arguments)
    assert_equal(actual, plain_quantized_linear(x, *arguments))
    assert torch.equal(actual[0], arguments[2]) and actual[[2, 6, 7, 8]].isfinite().all()
    assert not actual[[1, 3, 4, 5]].isfinite().any()


@pytest.fixture(scope="module", params=KINDS)
def large_products(request):
    """Enough work for all threads: many shares of the weight, the last of them with fewer outputs."""
    arguments = new_map(4096, 991, kind=request.param)
    tokens = [new_tokens(num_tokens, 4096, torch.float32) for num_tokens in (1, 9, 40)]
    return arguments, [(x, plain_quantized_linear(x, *arguments)) for x in tokens]


def test_the_largest_numbers_do_not_overflow(kind):
    arguments, x = largest_numbers(1088, 40, kind)
    assert_equal(native.quantized_linear(x, *arguments), plain_quantized_linear(x, *arguments))


@pytest.mark.parametrize("num_threads", [1, 2, 3])
def test_any_number_of_threads(large_products, num_threads):
    arguments, products = large_products
    torch.set_num_threads(num_threads)
    for x, expected in products:
        assert_equal(native.quantized_linear(x, *arguments), expected)


def test_several_callers_at_the_same_time(kind):
    arguments = new_map(1024, 512, kind=kind)
    tokens = [new_tokens(num_tokens, 1024, torch.bfloat16) for num_tokens in range(1, 25)] * 3
    expected = [plain_quantized_linear(x, *arguments) for x in tokens]
    with ThreadPoolExecutor(4) as pool:
        for actual, wanted in zip(pool.map(lambda x: native.quantized_linear(x, *arguments), tokens), expected):
            assert_equal(actual, wanted)


@pytest.mark.parametrize("name", ["avxvnni", "avx2"])
def test_instructions_of_processors_without_avx512(monkeypatch, name, kind):
    found = list(dots._INSTRUCTIONS)
    if not dots.instructions() or found.index(name) < found.index(dots.instructions()):
        pytest.skip("the CPU lacks the instruction")
    monkeypatch.setattr(dots, "instructions", lambda: name)
    monkeypatch.setattr(int8, "_tile", jit.inner(int8._tile.py_func))  # not as compiled for this CPU
    multiply, is_small = jit.inner(int8.multiply_levels.py_func), kind == "int4"

    @numba.njit
    def run(address):
        multiply(int64_at(address), float32_at(0), is_small)

    tokens = [new_tokens(num_tokens, 77, torch.float32) for num_tokens in (1, 2, 3, 4, 7, 11)]
    largest, signs = largest_numbers(77, 40, kind)
    usual = new_map(77, 40, kind=kind)
    for (weight, scale, bias, num_outputs), x in [*((usual, x) for x in tokens), (largest, signs)]:
        num_tokens = len(x)
        levels, outputs = to_levels(x, 32), torch.zeros(num_tokens, num_outputs)
        totals = levels.values.sum(-1, dtype=torch.int32)
        added = totals * levels.steps if is_small else -dots.OFFSET * totals
        tensors = weight, scale, *levels, added, bias, outputs
        places = [0 if item is None else item.data_ptr() for item in tensors]
        tape = np.array([0, 0, num_tokens, weight.shape[1], num_outputs, 2, *places])
        run(tape.ctypes.data)
        assert_equal(outputs, plain_quantized_linear(x, weight, scale, bias, num_outputs))


def test_blocks_hold_the_rows():
    rows = torch.randn(37, 150, generator=torch.Generator().manual_seed(0))
    levels = to_levels(rows)
    expected = (levels.values * levels.steps[..., None]).flatten(1)
    found = dequantized(*in_blocks(levels))
    assert found.shape == (48, 192) and torch.equal(found[:37], expected) and not found[37:].any()
    assert (found[:37, :150] - rows).abs().max() <= 0.51 * levels.steps.max()


class Operators(TorchDispatchMode):
    """Names of what torch is asked to do."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        self.names.append(str(function))
        return function(*arguments, **keywords or {})


def test_a_product_takes_few_calls(monkeypatch):
    calls, run = [], native.run_operator
    arguments = new_map(70, 40, torch.bfloat16)
    x = new_tokens(4, 70, torch.bfloat16)
    quantized_linear(x, *arguments)  # the first of all looks at the CPU
    monkeypatch.setattr(native, "run_operator", lambda *own: (calls.append(own), run(*own)))
    with Operators() as operators:
        quantized_linear(x, *arguments)
    assert len(calls) == 2 and len(operators.names) == 2 and all("empty" in name for name in operators.names)


@pytest.mark.parametrize("is_written", [True, False])
def test_decoding_multiplies_with_compiled_code(monkeypatch, is_written):
    model, calls, run = quantize(new_model("llama", head_dim=16)), [], native.run_operator
    programs, run_program = [], CompiledDecoder.run
    monkeypatch.setattr(CompiledDecoder, "run", lambda *own: (programs.append(own), run_program(*own))[1])
    plain = copy.deepcopy(model)
    monkeypatch.setattr(native, "run_operator", lambda *arguments: (calls.append(arguments), run(*arguments)))
    with hf_smartspec.target_model.written.written_decoders(is_written):
        assert (written_decoder(model) is not None) == is_written
        with hf_smartspec.enabled(model):
            ids, arguments = torch.arange(3, 12)[None], {"max_new_tokens": 12, "do_sample": False}
            calls.clear()
            actual = model.generate(ids, **arguments, assistant="auto")
            assert len(programs) > 5 and len(calls) < 50 if is_written else len(calls) > 100 and not programs
    monkeypatch.setattr(native, "can_multiply", lambda *_: False)
    calls.clear()
    assert torch.equal(plain.generate(ids, **arguments), actual) and not calls


def test_what_compiled_code_cannot_read_is_left_to_torch(monkeypatch):
    weight, scale, bias, num = new_map(70, 40, torch.float32)
    x = new_tokens(4, 70, torch.float32)
    assert not native.can_multiply(x[:0], weight, scale, bias, num)
    assert not native.can_multiply(x.double(), weight, scale, bias, num)
    assert not native.can_multiply(x, weight, scale, bias.double(), num)
    other = weight.transpose(0, 1).contiguous().transpose(0, 1)
    assert not native.can_multiply(x, other, scale, bias, num)
    assert not native.can_multiply(x, weight.to("meta"), scale, bias, num)
    assert not native.can_multiply(x[:, :6], weight, scale, bias, num)
    expected = quantized_linear(x, weight, scale, bias, num)
    assert_equal(quantized_linear(x.t().contiguous().t(), weight, scale, bias, num), expected)
    assert_equal(quantized_linear(x, other, scale, bias, num), expected)
    assert quantized_linear(x[:0], weight, scale, bias, num).shape == (0, 40)


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


@pytest.mark.parametrize("change", [lambda v: v.repeat_interleave(2)[::2], lambda v: v[:1].expand(40)])
def test_biases_that_do_not_lie_side_by_side_are_torchs(change):
    weight, scale, bias, num = new_map(70, 40, torch.float32)
    x = new_tokens(4, 70, torch.float32)
    assert native.can_multiply(x, weight, scale, bias, num)
    assert not native.can_multiply(x, weight, scale, change(bias), num)


@pytest.mark.filterwarnings("ignore")  # of what a trace does not follow
def test_traced_models_multiply_with_torchs_operators():
    arguments = new_map(70, 40, torch.float32)
    tokens = new_tokens(3, 70, torch.float32)
    traced = torch.jit.trace(lambda x: quantized_linear(x, *arguments), tokens, check_trace=False)
    x = new_tokens(3, 70, torch.float32) + 1
    assert_equal(traced(x), plain_quantized_linear(x, *arguments))


def test_where_nothing_can_be_compiled_torchs_operators_serve(monkeypatch):
    def fail(*_):
        raise RuntimeError("no such instruction")

    monkeypatch.setattr(native, "run_operator", fail)
    product.has_right_kernels.cache_clear()
    try:
        arguments = new_map(70, 40, torch.float32)
        x = new_tokens(3, 70, torch.float32)
        assert_equal(quantized_linear(x, *arguments), plain_quantized_linear(x, *arguments))
    finally:
        product.has_right_kernels.cache_clear()


def test_a_dtype_is_tried_without_compiling_the_code_of_another(monkeypatch):
    run, tried = native.run_operator, set()
    monkeypatch.setattr(native, "run_operator", lambda dtype, *fields: tried.add(dtype) or run(dtype, *fields))
    product.has_right_kernels.cache_clear()
    assert product.has_right_kernels(torch.float32) and tried == {torch.float32}
