"""Recognition of decoders: norms and rotations by what they compute, transposed weights, what is left alone."""

import pytest
import torch

from hf_smartspec.cpu.kernels.norms import CENTERED, PLAIN, SHIFTED
from hf_smartspec.target_model.forward.packed import PackedForward
from hf_smartspec.target_model.written import packed_forward
from hf_smartspec.target_model.written.norms import written_norm
from hf_smartspec.target_model.written.rotations import OwnRotation, Rotation, _rotation_of, written_rotation

from ...models import new_model, shared_model
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
def test_transposed_weights_are_laid_out_anew_and_stay_the_models_own(tmp_path):
    """Lay out those of GPT-2 once, with the same shapes; the model runs, is saved and is loaded as before."""
    model, tokens = new_model("gpt2", n_embd=64), torch.arange(3, 20)[None]
    weight, expected = model.transformer.h[0].attn.c_attn.weight, model(tokens).logits
    assert is_written(model) and weight is model.transformer.h[0].attn.c_attn.weight
    assert weight.shape == (64, 192) and weight.t().is_contiguous()
    torch.testing.assert_close(model(tokens).logits, expected)
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path)
    assert torch.equal(loaded.transformer.h[0].attn.c_attn.weight, weight)


@torch.no_grad()
def test_transposed_weights_that_others_use_stay_where_they_are():
    model = new_model("gpt2", n_embd=64)
    model.share_memory()
    weight = model.transformer.h[0].attn.c_attn.weight
    expected = logits_of(PackedForward(model))
    assert is_written(model) and weight.is_contiguous()
    found = logits_of(packed_forward(model))
    assert (found - expected).abs().max() <= 1e-5 * max(expected.abs().max(), 1)


@pytest.mark.parametrize("change", [{"do_layer_norm_before": False}, {"layerdrop": 0.1}, {"word_embed_proj_dim": 16}])
def test_decoders_with_further_steps_are_left_to_their_own_forward(change):
    """Norms after sums, layers that are left out in training, and embeddings that are mapped."""
    assert is_written(new_model("opt")) and not is_written(new_model("opt", **change))
