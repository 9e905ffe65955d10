"""Decoders of further kinds: other names of norms, activations with numbers of their own, experts that are called."""

import pytest
import torch
from transformers.activations import XIELUActivation

from hf_smartspec.cpu.few_tokens import has_kernels
from hf_smartspec.target_model.forward.packed import PackedForward
from hf_smartspec.target_model.written import packed_forward, written_decoder
from hf_smartspec.target_model.written.compiled import can_compile
from hf_smartspec.target_model.written.mlps import CalledMLP

from ... import models
from ...models import new_model
from .test_compiled import check_program
from .test_written import are_near, is_written, logits_of

LLAMA = models.PACKED["llama"][1] | {"head_dim": 16}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2}
CONFIGS = {
    "cwm": ("CwmConfig", LLAMA | {"sliding_window": 64}),
    "vaultgemma": ("VaultGemmaConfig", LLAMA | {"sliding_window": 64}),
    "arcee": ("ArceeConfig", LLAMA),
    "jais2": ("Jais2Config", LLAMA),
    "minimax_m2": ("MiniMaxM2Config", LLAMA | {"num_local_experts": 8, "num_experts_per_tok": 2}),
    "granitemoeshared": (  # with scores as large as usual: by default, rounding alone moves logits by the tolerance
        "GraniteMoeSharedConfig",
        LLAMA
        | {"hidden_size": 64, "num_local_experts": 4, "num_experts_per_tok": 2, "shared_intermediate_size": 32}
        | {"attention_multiplier": 0.25},
    ),
    "flex_olmo": ("FlexOlmoConfig", LLAMA | EXPERTS | {"hidden_size": 64}),
}
CALLED = {"hunyuan_v1_moe": ("HunYuanMoEV1Config", LLAMA | {"num_experts": 4, "moe_topk": 2})}


@pytest.fixture(autouse=True)
def _configs(monkeypatch):
    for name, item in (CONFIGS | CALLED).items():
        if not hasattr(models.transformers, item[0]):
            continue
        monkeypatch.setitem(models.CONFIGS, name, item)


def made(name: str, dtype: torch.dtype = torch.float32):
    if name not in models.CONFIGS:
        pytest.skip("this release has no such model")
    model, generator = new_model(name, dtype=dtype), torch.Generator().manual_seed(0)
    for buffer_name, buffer in model.named_buffers():
        if buffer_name.endswith("e_score_correction_bias"):
            buffer.uniform_(-0.3, 0.3, generator=generator)
    return model


@pytest.mark.skipif(not has_kernels(torch.float32), reason="there is no compiled code for this CPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CONFIGS)
@torch.no_grad()
def test_every_bit_is_that_of_the_layers(name, dtype, programs):
    """Whose numbers are also the model's own, in float32."""
    check_program(made(name, dtype), programs)


@torch.no_grad()
def test_experts_of_other_kinds_are_called():
    model = made("hunyuan_v1_moe")
    assert is_written(model) and are_near(logits_of(packed_forward(model)), logits_of(PackedForward(model)))
    layers = written_decoder(model).plan.layers
    assert all(isinstance(layer.mlp, CalledMLP) and layer.norms_last for layer in layers)


@pytest.mark.skipif(not has_kernels(torch.float32), reason="there is no compiled code for this CPU")
@pytest.mark.parametrize("way", ["in place", "uncounted", "replaced"])
@torch.no_grad()
def test_changes_of_biases_of_routers_are_seen(way):
    model = made("minimax_m2")
    before = logits_of(packed_forward(model))
    for layer in model.model.layers:
        block = layer.mlp
        if way == "replaced":
            block.e_score_correction_bias = block.e_score_correction_bias * -5
        else:
            bias = block.e_score_correction_bias
            (bias if way == "in place" else bias.data).mul_(-5)
    found, expected = logits_of(packed_forward(model)), logits_of(PackedForward(model))
    assert are_near(found, expected) and not are_near(found, before)


@pytest.mark.parametrize("name", ["alpha_p", "alpha_n", "beta", "eps"])
@pytest.mark.parametrize("way", ["in place", "replaced"])
@torch.no_grad()
def test_changes_of_numbers_of_activations_are_seen(name, way):
    model = new_model("apertus", hidden_size=64)
    before = logits_of(packed_forward(model))
    for layer in model.model.layers:
        number, more = getattr(layer.mlp.act_fn, name), -1.0 if name == "eps" else 1.0
        if way == "in place":
            number.add_(more)
        else:
            changed = (number + more).detach()
            is_parameter = name in layer.mlp.act_fn._parameters
            setattr(layer.mlp.act_fn, name, torch.nn.Parameter(changed, False) if is_parameter else changed)
    found, expected = logits_of(packed_forward(model)), logits_of(PackedForward(model))
    assert is_written(model) and are_near(found, expected) and not are_near(found, before)


class Other(XIELUActivation):
    def forward(self, input):
        return super().forward(input) + 1


@torch.no_grad()
def test_activations_of_other_kinds_are_called():
    model = new_model("apertus", hidden_size=64)
    model.model.layers[0].mlp.act_fn.__class__ = Other
    assert are_near(logits_of(packed_forward(model)), logits_of(PackedForward(model)))
    model = new_model("apertus", hidden_size=64)
    model.model.layers[0].mlp.act_fn.bfloat16()
    assert are_near(logits_of(packed_forward(model)), logits_of(PackedForward(model)))
    assert not can_compile(written_decoder(model).plan), "numbers of another dtype"
