"""Compiled norms: those of torch, rounded where models round."""

import pytest
import torch
from torch import nn
from transformers.models.cohere.modeling_cohere import CohereLayerNorm
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.nemotron.modeling_nemotron import NemotronLayerNorm1P
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm

from hf_smartspec.cpu import norms
from hf_smartspec.cpu.kernels.norms import CENTERED, CENTERED_SHIFTED, ONCE, PLAIN, SHIFTED
from hf_smartspec.cpu.norms import can_norm, can_norm_gated, few_token_norm, gated_rms_norm
from hf_smartspec.target_model.written.norms import Norm, written_norm

from .helpers import check_decoding, numbers

pytestmark = pytest.mark.skipif(not norms.has_norms(torch.float32), reason="there are no compiled norms for this CPU")

DTYPES = (torch.float32, torch.bfloat16)
FORMS = {
    LlamaRMSNorm: PLAIN, Olmo2RMSNorm: ONCE, GemmaRMSNorm: SHIFTED, nn.LayerNorm: CENTERED, CohereLayerNorm: CENTERED,
    NemotronLayerNorm1P: CENTERED_SHIFTED,
}  # fmt: skip


def new_norm(kind: type[nn.Module], size: int, dtype: torch.dtype) -> nn.Module:
    norm = kind(size, eps=1e-5).to(dtype).requires_grad_(False)
    norm.weight.copy_(numbers(size))
    if getattr(norm, "bias", None) is not None:
        norm.bias.copy_(numbers(size + 1)[1:])
    return norm


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", FORMS)
@pytest.mark.parametrize("size", [16, 48, 64, 1088])
def test_numbers_are_those_of_models(size, kind, dtype):
    norm = new_norm(kind, size, dtype)
    written = written_norm(norm)
    assert written.form == (PLAIN if dtype == torch.float32 and FORMS[kind] == ONCE else FORMS[kind])
    for x in (numbers(1, size), numbers(7, size) * 1e-3, numbers(2, 5, size) + 1):
        x = x.to(dtype)
        found, expected = few_token_norm(x, *written.weights(), 1e-5, FORMS[kind]), norm(x)
        assert found.dtype == dtype and found.shape == x.shape
        if dtype == torch.float32:
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
        else:  # sums in another order rarely round to a neighbouring number
            assert (found != expected).float().mean() < 0.02
            torch.testing.assert_close(found, expected, rtol=2**-7, atol=0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", [PLAIN, CENTERED])
def test_a_tokens_norm_does_not_depend_on_the_others(form, dtype):
    weight, x = numbers(96).to(dtype), numbers(40, 96).to(dtype)
    alone = torch.cat([few_token_norm(line[None], weight, None, 1e-6, form) for line in x])
    assert torch.equal(few_token_norm(x, weight, None, 1e-6, form), alone)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "size"), [(1, 16), (6, 64)])
def test_gated_norms_are_those_of_models(heads, size, dtype):
    """Gates lie among other numbers, as in the output of a map; rounded after the norm, the weight and the gate."""
    x, weight, others = numbers(5, heads, size), numbers(size).to(dtype), numbers(5, 3 + heads * size + 2).to(dtype)
    gates = others[:, 3:-2]
    assert can_norm_gated(x, gates, weight) and not can_norm_gated(x.to(torch.float64), gates, weight)
    normalized = torch.rms_norm(x, (size,), None, 1e-5).to(dtype) * weight
    expected = (normalized * nn.functional.silu(gates.float()).view(x.shape)).to(dtype)
    found = gated_rms_norm(x, gates, weight, 1e-5)
    assert found.dtype == dtype
    if dtype == torch.float32:
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    else:  # the roots and exponentials rarely round to a neighbouring number
        assert (found != expected).float().mean() < 0.02
        torch.testing.assert_close(found, expected, rtol=2**-6, atol=0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", [PLAIN, CENTERED])
def test_what_is_no_number_stays_its_own(form, dtype):
    x = numbers(4, 32).to(dtype)
    x[1, 3], x[2, 0] = torch.nan, torch.inf
    found = few_token_norm(x, numbers(32).to(dtype), numbers(32).to(dtype), 1e-6, form)
    assert found[[0, 3]].isfinite().all() and found[1].isnan().all() and found[2, 0].isnan()


@pytest.mark.parametrize(
    "change",
    [
        lambda x, weight: (x.double(), weight.double()),
        lambda x, weight: (x.bfloat16(), weight),
        lambda x, weight: (x[:, :24], weight[:24]),
        lambda x, weight: (x, weight[:16]),
        lambda x, weight: (x[:1].expand(2**16 + 1, -1), weight),
        lambda x, weight: (x[:0], weight),
        lambda x, weight: (x.to("meta"), weight.to("meta")),
        lambda x, weight: (x.clone().requires_grad_(), weight),
    ],
    ids="float64, two dtypes, no whole vectors, fewer weights, many tokens, no tokens, elsewhere, gradient".split(", "),
)
def test_anything_else_is_torchs(change):
    x, weight = numbers(3, 96), numbers(96)
    assert can_norm(x, weight) and can_norm(x.bfloat16(), weight.bfloat16()) and can_norm(x[None], weight)
    assert not can_norm(*change(x, weight))


def test_biases_are_read_as_weights_are():
    x, weight = numbers(3, 96), numbers(96)
    assert can_norm(x, weight, weight)
    for bias in (weight.bfloat16(), weight[:16], weight.clone().requires_grad_()):
        assert not can_norm(x, weight, bias)


def test_decoding_norms_with_compiled_code(monkeypatch):
    check_decoding(norms, monkeypatch)


@pytest.fixture
def anew():
    norms.has_norms.cache_clear()
    yield
    norms.has_norms.cache_clear()


def fail(*_):
    raise RuntimeError("no such instruction")


@pytest.mark.parametrize(
    ("name", "replacement"),
    [
        ("has_kernels", lambda dtype: False),
        ("run_operator", fail),
        ("few_token_norm", lambda x, weight, bias, eps, form: torch.zeros_like(x)),
    ],
)
def test_where_there_is_no_right_code_torch_serves(monkeypatch, anew, name, replacement):
    monkeypatch.setattr(norms, name, replacement)
    norm = new_norm(LlamaRMSNorm, 32, torch.float32)
    x, written = numbers(3, 32), written_norm(norm)
    assert not can_norm(x, norm.weight)
    assert isinstance(written, Norm)
    torch.testing.assert_close(written(x), norm(x))
