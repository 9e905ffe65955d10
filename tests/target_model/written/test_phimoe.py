"""PhiMoE written out: sparse mixers as routers, biases of norms and of the head, windows that masks alone have."""

import numpy as np
import pytest
import torch
from transformers.models.phimoe.modeling_phimoe import PhimoeTopKRouter

import hf_smartspec
from hf_smartspec.cpu.few_tokens import has_kernels
from hf_smartspec.target_model.forward.packed import PackedForward
from hf_smartspec.target_model.layout.rows import RowInput
from hf_smartspec.target_model.written import packed_forward, written_decoder
from hf_smartspec.target_model.written.experts import Experts
from hf_smartspec.target_model.written.mlps import CalledMLP
from hf_smartspec.target_model.written.recognition import make_plan

from ...models import new_model
from .test_compiled import check_program
from .test_written import are_near, is_written, logits_of

pytestmark = pytest.mark.skipif(not has_kernels(torch.float32), reason="there is no compiled code for this CPU")


def new_phimoe(**options):
    """A model with biases of all sizes, of whose experts some have scores near one another."""
    options = {"hidden_size": 64, "attention_bias": True, "lm_head_bias": True, "router_jitter_noise": 0.1} | options
    model = new_model("phimoe", **options)
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            parameter.uniform_(-0.5, 0.5, generator=generator)
    return model


def mlp_of(model):
    return make_plan(model)[0].layers[0].mlp


def test_routers_are_told_by_what_they_compute():
    experts = mlp_of(new_phimoe())
    assert isinstance(experts, Experts) and experts.routing.cap == 0.2 and experts.routing.num_chosen == 2


class Other(PhimoeTopKRouter):
    def forward(self, hidden_states):
        logits, weights, choices = super().forward(hidden_states)
        return logits, weights.sqrt(), choices


def test_routers_of_other_kinds_are_called():
    """Leave those of other weights, and those that are random in training although there is no noise."""
    model = new_phimoe()
    model.model.layers[0].mlp.router.__class__ = Other
    assert isinstance(mlp_of(model), CalledMLP)
    assert isinstance(mlp_of(new_phimoe(router_jitter_noise=0.0)), CalledMLP)


@torch.no_grad()
def test_experts_are_those_of_the_model():
    model = new_phimoe(num_local_experts=8)
    x = torch.randn(1, 40, 64, generator=torch.Generator().manual_seed(0)) * 0.3
    torch.testing.assert_close(mlp_of(model)(x[0]), model.model.layers[0].mlp(x)[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.no_grad()
def test_every_bit_is_that_of_the_layers(dtype, programs):
    check_program(new_phimoe(num_local_experts=8).to(dtype), programs)


def test_models_in_training_run_their_own_forward():
    model = new_phimoe()
    assert is_written(model)
    model.train()
    assert not is_written(model)
    model.eval()
    assert is_written(model)


@torch.no_grad()
def test_changes_of_the_distance_are_seen():
    model = new_phimoe(num_local_experts=8)
    before = logits_of(packed_forward(model))
    for layer in model.model.layers:
        layer.mlp.router.router_jitter_noise = 10.0
    found, expected = logits_of(packed_forward(model)), logits_of(PackedForward(model))
    assert are_near(found, expected) and not are_near(found, before)


@torch.no_grad()
def test_windows_that_masks_alone_have():
    """Past windows, the forwards agree with one another and with the model's own, of which masks are given."""
    model, text = new_phimoe(sliding_window=64), np.random.default_rng(0).integers(3, 90, 150)
    found = []
    for forward in (packed_forward(model), PackedForward(model)):
        row = forward.add()
        for piece in np.split(text, [70, 149]):
            logits, _ = forward.forward([RowInput(row, piece)])
        found.append(logits)
    assert written_decoder(model) is not None and are_near(*found)
    assert are_near(found[0][-1], model(torch.tensor(text)[None]).logits[0, -1])


@pytest.mark.parametrize("name", ["llama", "nemotron"])
@torch.no_grad()
def test_windows_that_neither_attention_nor_masks_have(name):
    """Configs may name one that the model does not know."""
    model, text = new_model(name, sliding_window=16), np.random.default_rng(0).integers(3, 90, 60)
    for forward in (packed_forward(model), PackedForward(model)):
        logits, _ = forward.forward([RowInput(forward.add(), text)])
        assert are_near(logits[-1], model(torch.tensor(text)[None]).logits[0, -1])


def test_tokens_are_those_of_generate():
    model = new_phimoe(sliding_window=64)
    ids = torch.randint(3, 90, (2, 60), generator=torch.Generator().manual_seed(0))
    arguments = {"max_new_tokens": 30, "do_sample": False}
    expected = model.generate(ids, **arguments)
    with hf_smartspec.enabled(model):
        assert torch.equal(model.generate(ids, **arguments, assistant="auto"), expected)
    assert written_decoder(model)._is_tried
