"""GPT-OSS written out: clamped experts with biases, their router, sinks of attention, and half rotary embeddings."""

import numpy as np
import pytest
import torch
from torch import nn
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

import hf_smartspec
from hf_smartspec.cpu.few_tokens import has_kernels
from hf_smartspec.cpu.gates import ClampedGate
from hf_smartspec.target_model.forward.packed import PackedForward
from hf_smartspec.target_model.layout.rows import RowInput
from hf_smartspec.target_model.written import packed_forward, written_decoder
from hf_smartspec.target_model.written.experts import Experts
from hf_smartspec.target_model.written.mlps import CalledMLP
from hf_smartspec.target_model.written.recognition import make_plan
from hf_smartspec.target_model.written.rotations import written_rotation

from ...models import new_model
from .test_written import are_near, logits_of

pytestmark = pytest.mark.skipif(not has_kernels(torch.float32), reason="there is no compiled code for this CPU")
# Sinks and biases of routers of about 1, and limits that many numbers pass.
COUNTING = {"head_dim": 16, "initializer_range": 1.0, "swiglu_limit": 0.7, "swiglu_alpha": 0.9}


def new_gpt_oss(**options):
    return new_model("gpt_oss", **COUNTING | options)


def logits_after(forward, length: int) -> torch.Tensor:
    """Logits after a prompt, in pieces."""
    row, text = forward.add(), np.random.default_rng(0).integers(3, 90, length)
    for piece in np.split(text, [length // 2, length - 1]):
        logits, _ = forward.forward([RowInput(row, piece)])
    return logits


def test_parts_are_told_by_what_they_compute():
    model = new_gpt_oss()
    layer = make_plan(model)[0].layers[0]
    assert isinstance(layer.mlp, Experts) and layer.mlp.activation == ClampedGate(0.9, 0.7)
    assert layer.mlp.routing.norms and not layer.mlp.routing.is_sigmoid and layer.mlp.routing.num_chosen == 2
    assert layer.sinks.numbers() is model.model.layers[0].self_attn.sinks
    rotation = written_rotation(model.model.layers[0].self_attn)
    assert rotation.is_half and not rotation.is_interleaved


@torch.no_grad()
def test_experts_are_those_of_the_model():
    """Compare experts of many tokens, of which some have no token, with the block's own; limits count."""
    model = new_gpt_oss(num_local_experts=8)
    block, x = model.model.layers[0].mlp, torch.randn(1, 3, 32, generator=torch.Generator().manual_seed(0))
    found = make_plan(model)[0].layers[0].mlp(x[0])
    torch.testing.assert_close(found, block(x)[0][0], rtol=1e-5, atol=1e-5)
    block.experts.limit = 7.0
    assert (block(x)[0][0] - found).abs().max() > 0.1


@pytest.mark.parametrize("window", [5, 64])
@torch.no_grad()
def test_texts_longer_than_windows(window, programs):
    model = new_gpt_oss(sliding_window=window)
    assert are_near(logits_after(packed_forward(model), 150), logits_after(PackedForward(model), 150))
    assert programs


@pytest.mark.parametrize("change", ["sinks", "router bias", "gate bias", "output bias", "gates", "outputs", "limit"])
@pytest.mark.parametrize("way", ["in place", "uncounted", "replaced"])
@torch.no_grad()
def test_changes_are_seen(change, way):
    model = new_gpt_oss(sliding_window=64)
    before = logits_of(packed_forward(model))
    attention, block = model.model.layers[0].self_attn, model.model.layers[0].mlp
    if change == "limit":
        block.experts.limit = 0.3
    else:
        names = {"gate bias": "gate_up_proj_bias", "output bias": "down_proj_bias"}
        names |= {"gates": "gate_up_proj", "outputs": "down_proj"}
        owners = {"sinks": (attention, "sinks"), "router bias": (block.router, "bias")}
        owner, name = owners.get(change) or (block.experts, names[change])
        parameter = getattr(owner, name)
        if way == "replaced":
            setattr(owner, name, nn.Parameter(parameter * -1.5))
        else:
            (parameter if way == "in place" else parameter.data).mul_(-1.5)
    found, expected = logits_of(packed_forward(model)), logits_of(PackedForward(model))
    assert are_near(found, expected) and not are_near(found, before)
    assert written_decoder(model)._is_tried


def called(model) -> bool:
    return isinstance(make_plan(model)[0].layers[0].mlp, CalledMLP)


def test_experts_of_other_kinds_are_called():
    """Leave those that others compute, that lie otherwise in memory, or whose gates are others."""
    model = new_gpt_oss()
    model.config._experts_implementation = "mine"
    assert called(model)
    model = new_gpt_oss()
    model.model.layers[0].mlp.experts.is_transposed = False
    assert called(model)
    model = new_gpt_oss()
    experts = model.model.layers[0].mlp.experts
    experts.down_proj = nn.Parameter(experts.down_proj.mT.contiguous().mT, requires_grad=False)
    assert called(model)
    model = new_gpt_oss()
    model.model.layers[0].mlp.experts.__class__ = Other
    assert called(model)


class Other(GptOssExperts):
    def _apply_gate(self, gate_up):
        return super()._apply_gate(gate_up) * 2


def test_tokens_are_those_of_generate():
    """Decode ragged rows past windows, with drafts, in float32."""
    model = new_gpt_oss(sliding_window=64)
    ids = torch.randint(3, 90, (2, 60), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    ids[0, :7], mask[0, :7] = 0, 0
    arguments = {"attention_mask": mask, "max_new_tokens": 40, "do_sample": False}
    expected = model.generate(ids, **arguments)
    with hf_smartspec.enabled(model):
        assert torch.equal(model.generate(ids, **arguments, assistant="auto"), expected)
    assert written_decoder(model)._is_tried
