"""Layer norms without weights (OLMo), and with factors of one plus the weight (Nemotron)."""

import copy

import pytest
import torch
from transformers.models.nemotron.modeling_nemotron import NemotronLayerNorm1P
from transformers.models.olmo.modeling_olmo import OlmoLayerNorm

from hf_smartspec.cpu.few_tokens import has_kernels
from hf_smartspec.cpu.kernels.norms import CENTERED, CENTERED_SHIFTED, ONCE
from hf_smartspec.target_model.forward.packed import PackedForward
from hf_smartspec.target_model.written import packed_forward
from hf_smartspec.target_model.written.norms import unweighted_norm, written_norm
from hf_smartspec.target_model.written.parts import Called

from ...models import new_model
from .test_compiled import by_layers
from .test_written import are_near, is_written, logits_of


class Doubled(OlmoLayerNorm):
    def forward(self, hidden_states):
        return 2 * super().forward(hidden_states)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norms_without_weights_are_told_by_what_they_compute(dtype):
    like, x = torch.empty(32, dtype=dtype), torch.randn(4, 32).to(dtype)
    modules = OlmoLayerNorm(32), torch.nn.LayerNorm(32, 0.1, elementwise_affine=False)
    for module in modules:
        norm = unweighted_norm(module, like)
        assert norm.form == CENTERED
        torch.testing.assert_close(norm(x), module(x))
    assert unweighted_norm(torch.nn.RMSNorm(32, 1e-6, elementwise_affine=False), like).form == ONCE
    assert isinstance(unweighted_norm(Doubled(32), like), Called)
    assert isinstance(unweighted_norm(torch.nn.Identity(), like), Called)


def test_values_that_are_clipped_are_left_to_the_models_own_forward():
    assert is_written(new_model("olmo")) and not is_written(new_model("olmo", clip_qkv=1.0))


@torch.no_grad()
def test_a_norm_that_is_replaced_is_seen():
    model = new_model("olmo")
    before = logits_of(packed_forward(model))
    model.model.norm = Doubled(32)
    found, expected = logits_of(packed_forward(model)), logits_of(PackedForward(model))
    assert are_near(found, expected) and not are_near(found, before)


class Other(NemotronLayerNorm1P):
    def forward(self, input):
        return super().forward(input) + self.bias


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.no_grad()
def test_norms_with_one_added_to_weights_are_told_by_what_they_compute(dtype):
    for has_bias in (True, False):
        module = NemotronLayerNorm1P(32, bias=has_bias)
        for parameter in module.parameters():
            parameter.normal_()
        module.to(dtype)
        norm, x = written_norm(module), torch.randn(4, 32).to(dtype)
        assert norm.form == CENTERED_SHIFTED
        torch.testing.assert_close(norm(x), module(x))
        torch.testing.assert_close(norm.by_torch(x), module(x), rtol=0, atol=0)
    assert isinstance(written_norm(Other(32)), Called)


@torch.no_grad()
def test_nemotron_with_weights_of_all_sizes(programs):
    model = new_model("nemotron", hidden_size=64)
    generator = torch.Generator().manual_seed(0)
    for module in model.modules():
        if isinstance(module, NemotronLayerNorm1P):
            module.weight.uniform_(-0.8, 0.8, generator=generator)
            module.bias.uniform_(-0.5, 0.5, generator=generator)
    other = copy.deepcopy(model)
    expected, found = logits_of(PackedForward(model)), logits_of(packed_forward(model))
    assert are_near(found, expected) and is_written(model)
    assert torch.equal(logits_of(packed_forward(model)), logits_of(by_layers(other)))
    assert bool(programs) == has_kernels(torch.float32)
