"""Compiled products of a few tokens: those of `linear`, whoever else is multiplied with them."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.functional import linear

from hf_smartspec.cpu import few_tokens
from hf_smartspec.cpu.few_tokens import can_multiply, few_token_linear, product
from hf_smartspec.cpu.kernels.vectors import num_lanes

from .helpers import check_decoding, numbers

pytestmark = pytest.mark.skipif(
    not few_tokens.has_kernels(torch.float32), reason="there are no compiled products for this CPU"
)

DTYPES = (torch.float32, torch.bfloat16)
# Of tokens: every tile, more than one, and more than stay in the cache at once, or are multiplied in parts at once.
NUMBERS = (*range(1, 17), 31, 32, 64, 97, 131)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize(("num_outputs", "num_inputs"), [(1, 160), (3, 16), (12, 176), (37, 160), (64, 32), (203, 48)])
def test_numbers_are_those_of_linear(num_outputs, num_inputs, with_bias, dtype):
    """Whole vectors, and half of one behind them."""
    weight, bias = numbers(num_outputs, num_inputs).to(dtype), numbers(num_outputs).to(dtype) if with_bias else None
    for num_tokens in NUMBERS:
        x = numbers(num_tokens, num_inputs).to(dtype)
        expected = linear(x.double(), weight.double(), None if bias is None else bias.double())
        found = few_token_linear(x, weight, bias)
        assert found.dtype == dtype and found.shape == expected.shape
        rounding = expected.abs() * (2**-8 if dtype == torch.bfloat16 else 0)  # once, to the nearest
        assert ((found - expected).abs() <= 1e-4 + rounding).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_outputs", "num_inputs"), [(37, 1600), (600, 1600), (37, 3120), (203, 4096)])
def test_a_tokens_result_does_not_depend_on_the_others(num_outputs, num_inputs, dtype):
    """Bit by bit: verifying a draft gives what decoding its tokens one by one gives; also in parts of long rows."""
    weight, bias, x = (
        numbers(*shape).to(dtype) for shape in ((num_outputs, num_inputs), (num_outputs,), (NUMBERS[-1], num_inputs))
    )
    alone = torch.cat([few_token_linear(line[None], weight, bias) for line in x])
    for num_tokens in NUMBERS:
        assert torch.equal(few_token_linear(x[:num_tokens], weight, bias), alone[:num_tokens])


@pytest.fixture
def anew():
    def forget():
        few_tokens.has_kernels.cache_clear()
        few_tokens.most_tokens.cache_clear()

    forget()
    yield
    forget()


def fail(*_):
    raise RuntimeError("no such instruction")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("number", [1, 2, 3])
def test_any_number_of_threads(number, dtype):
    weight, x = numbers(991, 5600).to(dtype), numbers(30, 5600).to(dtype)
    expected = torch.cat([few_token_linear(line[None], weight, None) for line in x])
    torch.set_num_threads(number)
    assert torch.equal(few_token_linear(x, weight, None), expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_several_callers_at_the_same_time(dtype):
    torch.set_num_threads(2)
    weight = numbers(512, 1024).to(dtype)
    tokens = [numbers(num_tokens, 1024).to(dtype) for num_tokens in NUMBERS] * 4
    expected = [few_token_linear(x, weight, None) for x in tokens]
    with ThreadPoolExecutor(4) as pool:
        found = pool.map(lambda x: few_token_linear(x, weight, None), tokens)
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_no_number_stays_so_and_its_own(dtype):
    weight, x = numbers(40, 64).to(dtype), numbers(6, 64).to(dtype)
    x[1, 63], x[3, 0], x[4, 1] = torch.nan, torch.inf, -torch.inf
    found = few_token_linear(x, weight, None)
    torch.testing.assert_close(found, linear(x, weight), rtol=1e-2, atol=1e-4, equal_nan=True)
    assert found[[0, 2, 5]].isfinite().all() and not found[[1, 3, 4]].isfinite().any()


@pytest.mark.exhaustive
@pytest.mark.skipif(num_lanes() == 8, reason="the other tests see to it")
def test_cpus_with_narrower_vectors(tmp_path):
    """What is compiled for them runs here, too; numba is told that this is one."""
    environment = {"NUMBA_CPU_NAME": "haswell", "NUMBA_CPU_FEATURES": "+avx2,+fma", "NUMBA_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-k", "not cpus_with"]
    command += [__file__, *(str(Path(__file__).with_name(name)) for name in ("test_norms.py", "test_screening.py"))]
    found = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True)
    assert found.returncode == 0 and "passed" in found.stdout, found.stdout
    assert "skipped" not in found.stdout, found.stdout


@pytest.mark.parametrize("default", ["bfloat16", "meta"])
def test_torchs_defaults_do_not_matter(monkeypatch, anew, default):
    """Neither for what is computed nor for the memory in which bfloat16 is widened."""
    num_tokens = min(9, few_tokens.most_tokens(torch.bfloat16))  # few where torch's own products are fast
    weight, x, wide = numbers(24, 64).bfloat16(), numbers(num_tokens, 64).bfloat16(), []
    expected, allocated = few_token_linear(x, weight, None), torch.Tensor.new_empty
    monkeypatch.setattr(
        torch.Tensor, "new_empty", lambda *args, **kwargs: wide.append(allocated(*args, **kwargs)) or wide[-1]
    )
    try:
        if default == "meta":
            torch.set_default_device("meta")
        else:
            torch.set_default_dtype(torch.bfloat16)
        assert can_multiply(x, weight)
        assert torch.equal(few_token_linear(x, weight, None), expected)
    finally:
        torch.set_default_device(None)
        torch.set_default_dtype(torch.float32)
    assert {(item.dtype, item.device.type) for item in wide} <= {(torch.bfloat16, "cpu"), (torch.float32, "cpu")}
    if num_lanes() == 8:
        assert max(item.nbytes for item in wide) >= 4 * num_tokens * 64


def test_nothing_is_compiled_for_other_devices(monkeypatch):
    monkeypatch.setattr(few_tokens, "most_tokens", fail)
    assert not can_multiply(torch.empty(3, 32, device="meta"), torch.empty(8, 32, device="meta"))


def test_tokens_may_lie_anywhere():
    weight, x = numbers(24, 64), numbers(64, 5).t()
    assert torch.equal(few_token_linear(x, weight, None), few_token_linear(x.contiguous(), weight, None))


@pytest.mark.parametrize(
    "change",
    [
        lambda x, weight: (x.double(), weight.double()),
        lambda x, weight: (x.bfloat16(), weight),
        lambda x, weight: (x.half(), weight.half()),
        lambda x, weight: (x[:, :24], weight[:, :24].contiguous()),
        lambda x, weight: (x[:, :16], weight[:, :16]),
        lambda x, weight: (x[:1].expand(2**16 + 1, -1), weight),
        lambda x, weight: (x.to("meta"), weight.to("meta")),
        lambda x, weight: (x[:0], weight),
        lambda x, weight: (x[:, :0], weight[:, :0].contiguous()),
        lambda x, weight: (x[:, :16], weight),
        lambda x, weight: (x, weight.requires_grad_()),
        lambda x, weight: (x, weight, numbers(8).bfloat16()),
        lambda x, weight: (x, weight, numbers(16)[::2]),
        lambda x, weight: (x, weight, numbers(1).expand(8)),
        lambda x, weight: (x, weight, numbers(1)),
        lambda x, weight: (x, weight, numbers(8).to("meta")),
    ],
    ids=(
        "float64, two dtypes, float16, no whole vectors, not contiguous, many tokens, elsewhere, no tokens, no inputs, "
        "fewer inputs, gradient, bias of another dtype, bias with gaps, one for all, one bias, bias elsewhere"
    ).split(", "),
)
def test_anything_else_is_torchs(change):
    x, weight = numbers(3, 32), numbers(8, 32)
    assert can_multiply(x, weight) and can_multiply(x.bfloat16(), weight.bfloat16())
    assert not can_multiply(*change(x, weight))


def test_fake_tensors_have_no_memory():
    with FakeTensorMode():
        assert not can_multiply(torch.empty(3, 32), torch.empty(8, 32))


@pytest.mark.filterwarnings("ignore")  # of what a trace does not follow
def test_traced_products_are_torchs():
    layer, x = torch.nn.Linear(32, 8).requires_grad_(False), numbers(4, 32)
    traced = torch.jit.trace(
        lambda tokens: product(tokens, layer.weight, layer.bias), numbers(3, 32), check_trace=False
    )
    torch.testing.assert_close(traced(x), layer(x))


def test_decoding_multiplies_with_compiled_code(monkeypatch):
    check_decoding(few_tokens, monkeypatch)


@pytest.mark.parametrize(
    ("name", "replacement"),
    [
        ("has_threads", lambda: False),
        ("num_lanes", lambda: 0),
        ("run_operator", fail),
        ("few_token_linear", lambda x, weight, bias: torch.zeros(len(x), len(weight))),
    ],
)
def test_where_there_is_no_right_code_torch_serves(monkeypatch, anew, name, replacement):
    monkeypatch.setattr(few_tokens, name, replacement)
    assert not can_multiply(numbers(3, 32), numbers(8, 32))


@pytest.mark.parametrize(
    ("lanes", "name", "features", "float32", "bfloat16"),
    [
        (8, "znver1", "+avx2", 256, few_tokens.ANY),
        (16, "icelake-server", "+avx512f", 64, few_tokens.ANY),
        (16, "cooperlake", "+avx512bf16", 64, few_tokens.ANY),
        (16, "sapphirerapids", "+avx512bf16 +amx-bf16", 64, 6),
        (16, "znver5", "+avx512bf16", few_tokens.ANY, few_tokens.ANY),
    ],
)
def test_for_how_many_tokens_depends_on_the_cpu(monkeypatch, lanes, name, features, float32, bfloat16):
    monkeypatch.setattr(few_tokens, "num_lanes", lambda: lanes)
    monkeypatch.setattr(few_tokens, "cpu_name", lambda: name)
    monkeypatch.setattr(few_tokens, "cpu_features", lambda: frozenset(features.split()))
    assert [few_tokens._most_tokens(dtype) for dtype in DTYPES] == [float32, bfloat16]
    monkeypatch.setenv("HF_SMARTSPEC_REPRODUCIBLE", "1")
    assert [few_tokens._most_tokens(dtype) for dtype in DTYPES] == [float32, few_tokens.ANY]


def test_nothing_is_tried_or_said_of_dtypes_without_code(monkeypatch, anew):
    """float16 has none: a warning with an error's name said nothing to anybody."""
    messages = []
    monkeypatch.setattr(few_tokens.logger, "warning", messages.append)
    assert not few_tokens.has_kernels(torch.float16) and not messages
