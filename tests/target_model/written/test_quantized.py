"""Programs of quantized decoders: every bit is that of the layers one by one."""

import copy

import pytest
import torch

import hf_smartspec
from hf_smartspec.cpu.quantized.native import has_kernels

from ...models import GEMMA_4
from .deepseek import LATENT, new_deepseek
from .test_compiled import DTYPES, by_layers, model_of, tried
from .test_written import logits_of

pytestmark = pytest.mark.skipif(not has_kernels(), reason="there is no compiled code for this CPU")

NAMES = [*"llama qwen2 gemma3_text phi3 gpt_neox opt qwen2_moe lfm2".split(), *GEMMA_4[-1:]]
IN_INT4 = "llama", "qwen2_moe", "gpt_oss", *GEMMA_4[-1:]
CASES = [(name, "int8") for name in NAMES] + [(name, "int4") for name in IN_INT4]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("name", "kind"), CASES)
def test_every_bit_is_that_of_the_layers(name, kind, dtype, programs):
    model = hf_smartspec.quantize(model_of(name, dtype), kind)
    other = copy.deepcopy(model)
    forward = tried(model)
    programs.clear()
    found = logits_of(forward)
    assert len(programs) == (0 if name == "gemma3_text" else 2)  # whose window is short
    assert torch.equal(found, logits_of(by_layers(other)))


@pytest.mark.skipif(not LATENT, reason="this release's caches hold no latents")
@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_attention_to_latents(kind, programs):
    """Whose maps from latents stay as they are."""
    model = hf_smartspec.quantize(new_deepseek("deepseek_v3"), kind)
    assert type(model.model.layers[0].self_attn.kv_b_proj) is torch.nn.Linear
    other, forward = copy.deepcopy(model), tried(model)
    programs.clear()
    assert torch.equal(logits_of(forward), logits_of(by_layers(other))) and len(programs) == 2
