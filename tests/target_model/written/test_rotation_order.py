"""Layers that rotate queries and keys, before norms of these or after, or not: found by their own forwards."""

import pytest
import torch
from transformers.models.cohere2.modeling_cohere2 import Cohere2Attention
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention

from hf_smartspec.cpu.few_tokens import has_kernels
from hf_smartspec.target_model.forward.packed import PackedForward
from hf_smartspec.target_model.written import packed_forward, written_decoder
from hf_smartspec.target_model.written.compiled import can_compile
from hf_smartspec.target_model.written.recognition import make_plan
from hf_smartspec.target_model.written.rotation_order import rotation_order

from ...models import new_model, shared_model
from .test_compiled import check_program
from .test_written import are_near, is_written, logits_of

KINDS = {
    "llama": [True, True],
    "cohere2": [True, False],
    "smollm3": [True, False],
    "exaone4": [True, False],
    "gemma3_text": [True, True],
    "stablelm": [True, True],
}


@pytest.mark.parametrize("name", KINDS)
def test_layers_that_rotate_are_told_by_what_they_read(name):
    plan, _ = make_plan(shared_model(name))
    assert [layer.rotation is not None for layer in plan.layers] == KINDS[name]
    assert not any(layer.norms_last for layer in plan.layers)


@pytest.mark.parametrize("implementation", ["sdpa", "eager", "flash_attention_2"])
def test_modules_are_neither_called_nor_changed(implementation):
    model, seen = new_model("cohere2"), []
    attention = model.model.layers[1].self_attn
    attention.config._attn_implementation_internal = implementation
    for module in attention.modules():
        module.register_forward_hook(lambda *args: seen.append(1))
    before = dict(vars(attention))
    assert not rotation_order(attention, None).rotates and not seen
    assert vars(attention) == before and attention.config._attn_implementation == implementation


class Rotating(Cohere2Attention):
    """Attention that rotates in layers without a window, too."""

    def forward(self, *args, **kwargs):
        window, self.sliding_window = self.sliding_window, 10**6
        try:
            return super().forward(*args, **kwargs)
        finally:
            self.sliding_window = window


@torch.no_grad()
def test_kinds_of_attention_that_rotate_otherwise_are_told_apart_or_left_alone():
    model = new_model("cohere2")
    model.model.layers[1].self_attn.__class__ = Rotating
    assert rotation_order(model.model.layers[1].self_attn, None).rotates and not is_written(model)
    assert are_near(logits_of(packed_forward(model)), logits_of(PackedForward(model)))


@torch.no_grad()
def test_changes_of_layers_that_rotate_are_seen():
    model = new_model("smollm3")
    before = logits_of(packed_forward(model))
    for layer in model.model.layers:
        layer.self_attn.use_rope = not layer.self_attn.use_rope
    found, expected = logits_of(packed_forward(model)), logits_of(PackedForward(model))
    assert are_near(found, expected) and not are_near(found, before) and is_written(model)


def new_hunyuan(dtype: torch.dtype = torch.float32, **options):
    """A model whose norms of queries and keys have weights that differ, so that the order counts."""
    model = new_model("hunyuan_v1_dense", dtype=dtype, head_dim=16, **options)
    generator = torch.Generator().manual_seed(0)
    for layer in model.model.layers:
        for norm in (layer.self_attn.query_layernorm, layer.self_attn.key_layernorm):
            norm.weight.uniform_(0.5, 1.5, generator=generator)
    return model


class Earlier(Qwen3Attention):
    """Attention with HunYuan's names that normalizes before it rotates."""

    q_norm = property(lambda self: self.query_layernorm)
    k_norm = property(lambda self: self.key_layernorm)
    sliding_window = None


@torch.no_grad()
def test_norms_after_rotations():
    model = new_hunyuan()
    assert all(layer.norms_last and layer.rotation is not None for layer in make_plan(model)[0].layers)
    expected = logits_of(PackedForward(model))
    assert is_written(model) and are_near(logits_of(packed_forward(model)), expected)
    for layer in model.model.layers:
        layer.self_attn.__class__ = Earlier
        assert rotation_order(layer.self_attn, layer.self_attn.query_layernorm) == (True, False)
    other = logits_of(PackedForward(model))
    assert are_near(logits_of(packed_forward(model)), other) and not are_near(other, expected)


@pytest.mark.skipif(not has_kernels(torch.float32), reason="there is no compiled code for this CPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.no_grad()
def test_every_bit_of_norms_after_rotations_is_that_of_the_layers(dtype, programs):
    check_program(new_hunyuan(dtype), programs)


@torch.no_grad()
def test_norms_after_rotations_that_differ_by_more_than_weights_run_layer_by_layer():
    model = new_hunyuan()
    model.model.layers[1].self_attn.key_layernorm.variance_epsilon = 0.5
    assert is_written(model) and not can_compile(written_decoder(model).plan)
    assert are_near(logits_of(packed_forward(model)), logits_of(PackedForward(model)))


@pytest.mark.parametrize("way", ["in place", "replaced"])
@torch.no_grad()
def test_changes_of_norms_after_rotations_are_seen(way):
    model = new_hunyuan()
    before, norm = logits_of(packed_forward(model)), model.model.layers[0].self_attn.key_layernorm
    if way == "in place":
        norm.weight.mul_(torch.linspace(-1, 2, 16))
    else:
        norm.weight = torch.nn.Parameter(norm.weight * torch.linspace(-1, 2, 16), requires_grad=False)
    found, expected = logits_of(packed_forward(model)), logits_of(PackedForward(model))
    assert are_near(found, expected) and not are_near(found, before)
