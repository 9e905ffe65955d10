"""Gemma 4's mixtures of experts, beside MLPs: their routers, which norm and scale, and the sum of both."""

import pytest
import torch
from torch import nn

from hf_smartspec.cpu.few_tokens import has_kernels
from hf_smartspec.target_model.forward.packed import PackedForward
from hf_smartspec.target_model.written import packed_forward, written_decoder
from hf_smartspec.target_model.written.mixed_mlps import MixedMLP
from hf_smartspec.target_model.written.recognition import make_plan

from ...models import GEMMA_4, new_model
from .test_written import are_near, is_written, logits_of

NAME = "gemma4_text+experts"
pytestmark = [
    pytest.mark.skipif(not has_kernels(torch.float32), reason="there is no compiled code for this CPU"),
    pytest.mark.skipif(not GEMMA_4, reason="this release's layers do not call the known functions"),
]
OWN = {"head_dim": 16, "global_head_dim": 32, "sliding_window": 64, "hidden_size_per_layer_input": 16}


def new_gemma(**options):
    """A model whose scales count."""
    model = new_model(NAME, **OWN | options)
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        if name.endswith("router.scale") or name.endswith("per_expert_scale"):
            parameter.normal_(generator=generator)
    return model


@torch.no_grad()
def test_routers_are_told_by_what_they_compute():
    model = new_gemma()
    mlp, layer = make_plan(model)[0].layers[0].mlp, model.model.layers[0]
    assert isinstance(mlp, MixedMLP) and mlp.experts.routing.norms and not mlp.experts.routing.is_sigmoid
    assert mlp.experts.routing.num_chosen == 2 and mlp.experts.routing.scale == 32**-0.5
    x = torch.randn(7, 32, generator=torch.Generator().manual_seed(0))
    _, weights, choices = layer.router(x)
    own = layer.experts(layer.pre_feedforward_layernorm_2(x), choices, weights)
    own = layer.post_feedforward_layernorm_2(own)
    own += layer.post_feedforward_layernorm_1(layer.mlp(layer.pre_feedforward_layernorm(x)))
    torch.testing.assert_close(mlp(x), own, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("options", [{}, {"top_k_experts": 4}, {"hidden_size_per_layer_input": 0}])
@torch.no_grad()
def test_logits_are_the_models_own(options, programs):
    model = new_gemma(**options)
    assert are_near(logits_of(packed_forward(model)), logits_of(PackedForward(model)))
    assert programs and written_decoder(model)._is_tried


@pytest.mark.parametrize("change", ["scale", "per_expert_scale", "proj", "norm", "experts", "top_k"])
@pytest.mark.parametrize("is_counted", [True, False])
@torch.no_grad()
def test_changes_are_seen(change, is_counted):
    model = new_gemma()
    before, layer = logits_of(packed_forward(model)), model.model.layers[0]
    parameters = {"proj": layer.router.proj.weight, "experts": layer.experts.gate_up_proj}
    parameters["norm"] = layer.pre_feedforward_layernorm_2.weight
    if change == "top_k":
        model.config.top_k_experts = 3
    else:
        parameter = parameters.get(change)
        parameter = getattr(layer.router, change) if parameter is None else parameter
        (parameter if is_counted else parameter.data).mul_(-1.5)
    found, expected = logits_of(packed_forward(model)), logits_of(PackedForward(model))
    assert are_near(found, expected) and not are_near(found, before)
    assert written_decoder(model)._is_tried


class Other(nn.Linear):
    def forward(self, x):
        return super().forward(x) * 2


@pytest.mark.parametrize("change", ["implementation", "projection", "activation"])
def test_experts_of_other_kinds_are_left_to_the_models_own_forward(change):
    model = new_gemma()
    layer = model.model.layers[0]
    if change == "implementation":
        model.config._experts_implementation = "mine"
    elif change == "projection":
        layer.router.proj.__class__ = Other
    else:
        layer.experts.act_fn = nn.Tanh()
    assert not is_written(model)
