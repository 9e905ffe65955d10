"""Recognition of decoders: norms and rotations by what they compute, transposed weights, what is left alone."""

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter

from hf_smartspec.cpu.few_tokens import has_kernels
from hf_smartspec.cpu.kernels.norms import CENTERED, PLAIN, SHIFTED
from hf_smartspec.target_model.forward.packed import PackedForward
from hf_smartspec.target_model.support.twin import sharpened
from hf_smartspec.target_model.written import packed_forward, parts, written_decoder
from hf_smartspec.target_model.written.experts import Experts
from hf_smartspec.target_model.written.mlps import CalledMLP
from hf_smartspec.target_model.written.norms import written_norm
from hf_smartspec.target_model.written.recognition import make_plan
from hf_smartspec.target_model.written.rotations import OwnRotation, Rotation, _rotation_of, written_rotation

from ...models import RECURRENT, new_model, shared_model
from .test_written import is_written, logits_of


def test_norms_are_told_by_what_they_compute():
    norms = [shared_model(name).model.layers[0].input_layernorm for name in ("llama", "gemma2", "starcoder2")]
    written = [written_norm(norm) for norm in norms]
    assert [norm.form for norm in written] == [PLAIN, SHIFTED, CENTERED]
    x = torch.randn(4, 32)
    for norm, own in zip(written, norms):
        assert torch.equal(norm.by_torch(x), own(x))
        torch.testing.assert_close(norm(x), own(x))  # compiled norms add up in an order of their own


def test_rotations_are_told_by_what_they_compute():
    kinds = {"llama": (False, False, False), "glm4": (True, True, False), "ernie4_5": (True, True, True)}
    kinds["cohere"] = (True, False, True)
    for name, kind in kinds.items():
        found = written_rotation(shared_model(name).model.layers[0].self_attn)
        assert isinstance(found, Rotation)
        assert (found.is_interleaved, found.repeats_first, found.rounds_once) == kind
    assert isinstance(_rotation_of(lambda query, key, cos, sin: (query * cos, key * cos)), OwnRotation)


@torch.no_grad()
def test_transposed_weights_stay_the_models_own(tmp_path):
    """Transpose GPT-2's in copies: the weights themselves stay where they are, contiguous, and are saved as before."""
    model = new_model("gpt2", n_embd=64)
    weight = model.transformer.h[0].attn.c_attn.weight
    address = weight.data_ptr()
    assert is_written(model) and weight.data_ptr() == address and weight.is_contiguous()
    product = written_decoder(model).plan.layers[0].query_key_value
    assert product.whole().weight.is_contiguous() and torch.equal(product.whole().weight, weight.t())
    save_file({"weight": weight.data}, tmp_path / "weight.safetensors")  # which refuses gaps
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path)
    assert torch.equal(loaded.transformer.h[0].attn.c_attn.weight, weight)


@pytest.mark.parametrize("is_counted", [True, False])
@torch.no_grad()
def test_copies_of_transposed_weights_follow_changes_in_place(is_counted):
    """See changes that torch counts at the next look, and any others at the next call of `generate`."""
    model = new_model("gpt2", n_embd=64)
    forward = packed_forward(model)
    logits_of(forward)
    for name, weight in model.named_parameters():
        if "c_" in name:
            (weight if is_counted else weight.data).mul_(1.5)
    expected = logits_of(PackedForward(model))
    found = logits_of(forward if is_counted else packed_forward(model))
    assert (found - expected).abs().max() <= 1e-5 * max(expected.abs().max(), 1)


@torch.no_grad()
def test_without_memory_transposed_weights_are_read_as_they_are(monkeypatch):
    monkeypatch.setattr(parts, "free_bytes", lambda device: 1000)
    model = new_model("gpt2", n_embd=64)
    expected = logits_of(PackedForward(model))
    assert (
        is_written(model) and not written_decoder(model).plan.layers[0].query_key_value.whole().weight.is_contiguous()
    )
    found = logits_of(packed_forward(model))
    assert (found - expected).abs().max() <= 1e-5 * max(expected.abs().max(), 1)


@pytest.mark.parametrize("change", [{"do_layer_norm_before": False}, {"layerdrop": 0.1}, {"word_embed_proj_dim": 16}])
def test_decoders_with_further_steps_are_left_to_their_own_forward(change):
    """Norms after sums, layers that are left out in training, and embeddings that are mapped."""
    assert is_written(new_model("opt")) and not is_written(new_model("opt", **change))


@pytest.mark.skipif(not has_kernels(torch.float32), reason="there is no compiled code for this CPU")
def test_routers_are_told_by_what_they_compute():
    """Recognise softmax and sigmoids, weights that are normalized or not, and factors."""
    kinds = {"qwen3_moe": (False, False), "mixtral": (False, True), "granitemoe": (False, True)}
    for name, kind in kinds.items():
        experts = make_plan(shared_model(name))[0].layers[0].mlp
        assert isinstance(experts, Experts) and (experts.routing.is_sigmoid, experts.routing.norms) == kind
    experts = make_plan(new_model("qwen3_moe", norm_topk_prob=True))[0].layers[0].mlp
    assert experts.routing.norms and experts.routing.num_chosen == 2
    if "lfm2_moe" in RECURRENT:
        model = new_model("lfm2_moe", routed_scaling_factor=1.5)
        experts = make_plan(model)[0].layers[-1].mlp
        assert (experts.routing.is_sigmoid, experts.routing.factor) == (True, 1.5) and experts.bias() is not None


class Other(MixtralTopKRouter):
    def forward(self, hidden_states):
        logits, weights, choices = super().forward(hidden_states)
        return logits, weights**2, choices


def test_experts_that_are_chosen_or_weighed_otherwise_are_called():
    model = new_model("mixtral")
    model.model.layers[0].mlp.gate.__class__ = Other
    plan, bypassed = make_plan(model)
    assert isinstance(plan.layers[0].mlp, CalledMLP) and plan.calls_modules
    assert model.model.layers[0].mlp not in bypassed
    model = new_model("mixtral", router_jitter_noise=0.1)
    assert isinstance(make_plan(model)[0].layers[0].mlp, CalledMLP), "noise in training"


@pytest.mark.skipif(not has_kernels(torch.float32), reason="there is no compiled code for this CPU")
@torch.no_grad()
def test_experts_are_those_of_the_model():
    """Compare experts of many tokens, of which some have no token, with the block's own."""
    for name in ("mixtral", "qwen2_moe", "granitemoe"):
        model = sharpened(new_model(name, hidden_size=64))
        layer = model.model.layers[0]
        own = layer.block_sparse_moe if name == "granitemoe" else layer.mlp
        x = torch.randn(1, 3, 64, generator=torch.Generator().manual_seed(0))
        torch.testing.assert_close(make_plan(model)[0].layers[0].mlp(x[0]), own(x)[0], rtol=1e-4, atol=1e-4)


@pytest.mark.skipif(not has_kernels(torch.float32), reason="there is no compiled code for this CPU")
@pytest.mark.parametrize("change", ["in place", "uncounted", "replaced", "one expert"])
@torch.no_grad()
def test_changes_of_experts_are_seen(change):
    model = new_model("mixtral", hidden_size=64)
    logits_of(packed_forward(model))
    experts = model.model.layers[0].mlp.experts
    if change == "in place":
        experts.down_proj.mul_(1.5)
    elif change == "uncounted":
        experts.down_proj.data.mul_(1.5)
    elif change == "replaced":
        experts.down_proj = nn.Parameter(experts.down_proj * 1.5)
    else:
        experts.gate_up_proj[2].zero_()
    expected = logits_of(PackedForward(model))
    found = logits_of(packed_forward(model))
    assert (found - expected).abs().max() <= 1e-5 * max(expected.abs().max(), 1)


@pytest.mark.skipif("lfm2_moe" not in RECURRENT, reason="this release's layers with states are not known")
@pytest.mark.parametrize("change", ["in place", "replaced"])
@torch.no_grad()
def test_changes_of_biases_of_routers_are_seen(change):
    model = new_model("lfm2_moe", hidden_size=64)
    forward = packed_forward(model)
    logits_of(forward)
    (block,) = [module for module in model.modules() if "expert_bias" in module._buffers]
    if change == "in place":
        block.expert_bias.copy_(torch.tensor([0.5, -0.5, 0.5, -0.5]))
    else:
        block.expert_bias = torch.tensor([0.5, -0.5, 0.5, -0.5])
    expected = logits_of(PackedForward(model))
    assert (logits_of(forward) - expected).abs().max() <= 1e-5 * max(expected.abs().max(), 1)


def test_experts_that_others_compute_are_called():
    """Leave experts whose config names another implementation, or whose gates lie between the other numbers."""
    model = new_model("mixtral")
    model.config._experts_implementation = "mine"
    assert isinstance(make_plan(model)[0].layers[0].mlp, CalledMLP)
    model = new_model("mixtral")
    model.model.layers[0].mlp.experts.is_concatenated = False
    assert isinstance(make_plan(model)[0].layers[0].mlp, CalledMLP)
