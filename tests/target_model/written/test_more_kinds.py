"""Decoders of further kinds: other names of norms, activations with numbers of their own, experts that are called."""

import numpy as np
import pytest
import torch
from transformers.activations import XIELUActivation

from hf_smartspec.cpu.few_tokens import has_kernels
from hf_smartspec.target_model.forward.packed import PackedForward
from hf_smartspec.target_model.layout.rows import RowInput
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
LFM3 = LLAMA | {"hidden_size": 64, "layer_types": ["conv", "sliding_attention", "full_attention"], "sliding_window": 64}
LFM3 |= {"num_hidden_layers": 3}
AFMOE = LLAMA | {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32, "num_shared_experts": 1}
AFMOE |= {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 64, "num_dense_layers": 1}
AFMOE |= {"mup_enabled": True, "route_scale": 1.7}
FLINT = LLAMA | EXPERTS | {"moe_intermediate_size": 32, "shared_expert_intermediate_size": 32, "sliding_window": 64}
FLINT |= {"layer_types": ["sliding_attention", "full_attention"], "mlp_only_layers": [0], "decoder_sparse_step": 1}
COHERE = LLAMA | EXPERTS | {"num_shared_experts": 2, "num_hidden_layers": 3, "sliding_window": 64}
COHERE |= {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
COHERE |= {"mlp_layer_types": ["dense", "sparse", "sparse"], "prefix_dense_intermediate_size": 48}
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
    "hunyuan_v1_moe": ("HunYuanMoEV1Config", LLAMA | {"num_experts": 4, "moe_topk": 2}),
    "ernie4_5_moe": (
        "Ernie4_5_MoeConfig",
        LLAMA
        | {"moe_num_experts": 8, "moe_k": 3, "moe_intermediate_size": 32, "moe_num_shared_experts": 2}
        | {"moe_layer_start_index": 1, "moe_layer_interval": 1, "moe_norm_min": 0.3},
    ),
    "nanochat": ("NanoChatConfig", LLAMA | {"final_logit_softcapping": 3.0}),
    "cohere2_moe": ("Cohere2MoeConfig", COHERE),
    "cohere2_moe, sums": (
        "Cohere2MoeConfig",
        COHERE
        | {"expert_selection_fn": "sigmoid", "norm_topk_prob": True, "shared_expert_combination_strategy": "sum"},
    ),
    "apertus1p5_text": ("Apertus1p5TextConfig", LLAMA),
    "gemma4_unified_text": (
        "Gemma4UnifiedTextConfig",
        models.PACKED["gemma4_text+equal"][1] | {"head_dim": 16, "global_head_dim": 32, "sliding_window": 64},
    ),
    "lfm3": ("Lfm3Config", LFM3),
    "lfm3, plain": ("Lfm3Config", LFM3 | {"use_sandwich_norm": False, "use_attention_gate": False, "conv_bias": True}),
    "afmoe": ("AfmoeConfig", AFMOE),
    "afmoe, small": ("AfmoeConfig", AFMOE | {"mup_enabled": False, "num_dense_layers": 0}),
}


IN_FLOAT32 = {"flint": ("FlintConfig", FLINT)}  # in other dtypes, sinks stay in float32


@pytest.fixture(autouse=True)
def _configs(monkeypatch):
    for name, item in (CONFIGS | IN_FLOAT32).items():
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
    for parameter_name, parameter in model.named_parameters():
        if parameter.dim() == 1 and not parameter_name.endswith(("alpha_p", "alpha_n")):  # those of xIELU
            parameter.add_(torch.randn(parameter.shape, generator=generator).to(parameter) * 0.2)
    for module_name, module in model.named_modules():
        if "expert_bias" in module._parameters:
            module.expert_bias.uniform_(-0.3, 0.3, generator=generator)
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


@pytest.mark.skipif(not has_kernels(torch.float32), reason="there is no compiled code for this CPU")
@torch.no_grad()
def test_sinks_in_the_dtype_of_the_rest_are_read_by_compiled_code(programs):
    check_program(made("flint"), programs)
    model = made("flint", torch.bfloat16)
    for layer in model.model.layers:
        layer.self_attn.sinks.data = layer.self_attn.sinks.data.float().uniform_(-3, 3)
    assert is_written(model) and not can_compile(written_decoder(model).plan)
    assert torch.isfinite(logits_of(packed_forward(model))).all()


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


@pytest.mark.parametrize("name", ["lfm3", "afmoe"])
@torch.no_grad()
def test_gates_of_other_kinds_are_left_to_the_models_own_forward(name):
    model = made(name)
    for layer in model.model.layers:
        if (attention := layer._modules.get("self_attn")) is not None:
            kind = type(attention)
            attention.__class__ = type("Other", (kind,), {"__module__": kind.__module__})
    assert not is_written(model)


@pytest.mark.parametrize("name", ["lfm3", "afmoe"])
@torch.no_grad()
def test_changed_gates_are_seen(name):
    model = made(name)
    before = logits_of(packed_forward(model))
    attention = model.model.layers[1].self_attn
    (attention.g_proj if name == "lfm3" else attention.gate_proj).weight.mul_(-3)
    found, expected = logits_of(packed_forward(model)), logits_of(PackedForward(model))
    assert is_written(model) and are_near(found, expected) and not are_near(found, before)


@torch.no_grad()
def test_embeddings_that_are_normalized_are_told_by_their_decoder():
    model = made("nanochat")
    assert is_written(model) and make_plan(model)[0].embedding_norm is not None
    model, kind = made("nanochat"), type(model.model)
    model.model.__class__ = type("Other", (kind,), {"__module__": kind.__module__})
    assert not is_written(model), "a trial shows that the logits are others"


@torch.no_grad()
def test_changed_ways_of_adding_shared_experts_are_seen():
    model = made("cohere2_moe")
    before = logits_of(packed_forward(model))
    for layer in model.model.layers[1:]:
        layer.mlp.shared_expert_combination_strategy = "sum"
    found, expected = logits_of(packed_forward(model)), logits_of(PackedForward(model))
    assert is_written(model) and are_near(found, expected) and not are_near(found, before)


@pytest.mark.skipif(not has_kernels(torch.float32), reason="there is no compiled code for this CPU")
@pytest.mark.parametrize("name", ["ernie4_5_moe", "hunyuan_v1_moe", "afmoe", "cohere2_moe", "nanochat"])
@torch.no_grad()
def test_numbers_of_tokens_do_not_depend_on_their_forward(name):
    """Compare a text alone, in pieces, and beside another one."""
    model, rng = made(name, torch.bfloat16), np.random.default_rng(0)
    text, other, found = rng.integers(3, 90, 40), rng.integers(3, 90, 31), []
    for ends in ([40], [9, 23, 40]):
        forward, begin = packed_forward(model), 0
        row, beside = forward.add(), forward.add()
        for end in ends:
            items = [RowInput(row, text[begin:end])]
            items += [RowInput(beside, other)] if begin == 9 else []
            logits, offsets = forward.forward(items)
            begin = end
        found.append(logits[offsets[0]])
    assert torch.equal(*found) and written_decoder(model).is_reproducible
