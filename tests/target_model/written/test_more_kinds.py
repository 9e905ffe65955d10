"""Decoders of further kinds: other names of norms, activations with numbers of their own, experts that are called."""

import pytest
import torch
from transformers.activations import XIELUActivation

from hf_smartspec.cpu.few_tokens import has_kernels
from hf_smartspec.target_model.forward.packed import PackedForward
from hf_smartspec.target_model.written import packed_forward, written_decoder
from hf_smartspec.target_model.written.compiled import can_compile
from hf_smartspec.target_model.written.mlps import MLP, CalledMLP
from hf_smartspec.target_model.written.recognition import make_plan

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
    "flex_olmo": ("FlexOlmoConfig", LLAMA | EXPERTS | {"hidden_size": 64}),
    "hunyuan_v1_moe": ("HunYuanMoEV1Config", LLAMA | {"num_experts": 4, "moe_topk": 2}),
    "ernie4_5_moe": (
        "Ernie4_5_MoeConfig",
        LLAMA
        | {"moe_num_experts": 8, "moe_k": 3, "moe_intermediate_size": 32, "moe_num_shared_experts": 2}
        | {"moe_layer_start_index": 1, "moe_layer_interval": 1, "moe_norm_min": 0.3},
    ),
}


@pytest.fixture(autouse=True)
def _configs(monkeypatch):
    for name, item in CONFIGS.items():
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
    for module_name, module in model.named_modules():
        if module_name.endswith("moe_statics"):
            module.e_score_correction_bias.uniform_(-0.3, 0.3, generator=generator)
            model.get_submodule(module_name.rpartition(".")[0]).float()  # as files are loaded
    return model


@pytest.mark.skipif(not has_kernels(torch.float32), reason="there is no compiled code for this CPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CONFIGS)
@torch.no_grad()
def test_every_bit_is_that_of_the_layers(name, dtype, programs):
    """Whose numbers are also the model's own, in float32."""
    check_program(made(name, dtype), programs)


def halved(forward):
    """A forward of a router with other weights."""
    return lambda self, x: [item * (0.5 if item.is_floating_point() else 1) for item in forward(self, x)]


@pytest.mark.parametrize("name", ["hunyuan_v1_moe", "ernie4_5_moe"])
@torch.no_grad()
def test_experts_of_other_kinds_are_called(name):
    model = made(name)
    for block in [layer.mlp for layer in model.model.layers if hasattr(layer.mlp, "gate")]:
        kind = type(block.gate)
        block.gate.__class__ = type("Other", (kind,), {"forward": halved(kind.forward), "__module__": kind.__module__})
    blocks = [layer.mlp for layer in make_plan(model)[0].layers if not isinstance(layer.mlp, MLP)]
    assert blocks and all(isinstance(block, CalledMLP) for block in blocks)
    assert are_near(logits_of(packed_forward(model)), logits_of(PackedForward(model)))


@pytest.mark.skipif(not has_kernels(torch.float32), reason="there is no compiled code for this CPU")
@torch.no_grad()
def test_biases_that_are_parameters_are_seen_to_change():
    model = made("ernie4_5_moe")
    before = logits_of(packed_forward(model))
    gate = model.model.layers[1].mlp.gate
    gate.moe_statics.e_score_correction_bias.mul_(-5)
    found, expected = logits_of(packed_forward(model)), logits_of(PackedForward(model))
    assert are_near(found, expected) and not are_near(found, before)
    gate.norm_min = 2.0
    before, found, expected = found, logits_of(packed_forward(model)), logits_of(PackedForward(model))
    assert are_near(found, expected) and not are_near(found, before)
    gate.moe_statics.bfloat16()
    assert isinstance(make_plan(model)[0].layers[1].mlp, CalledMLP), "biases of another dtype"


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
