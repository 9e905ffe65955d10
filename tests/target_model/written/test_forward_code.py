"""Forwards of somebody else's making are called: what they do, a few tokens need not show."""

import functools

import pytest
import torch
from torch import nn
from transformers import LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm

from hf_smartspec.target_model.forward.packed import PackedForward
from hf_smartspec.target_model.forward_code import foreign_code, mentions, unknown_mentions
from hf_smartspec.target_model.written import packed_forward

from ...models import new_model, shared_model
from .test_written import is_written, logits_of


class Limited(LlamaForCausalLM):
    def forward(self, *args, position_ids=None, **kwargs):
        """Behind a few tokens, no logit is positive."""
        output = super().forward(*args, position_ids=position_ids, **kwargs)
        if position_ids is not None and int(position_ids.max()) > 18:
            output.logits = output.logits.clamp(max=0.0)
        return output


class Clipped(LlamaMLP):
    def forward(self, x):
        return super().forward(x).clamp(-0.2, 0.2)


class Scaled(LlamaRMSNorm):
    def forward(self, x):
        return super().forward(x) * (1 if x.numel() < 700 else 2)


def limited():
    model = Limited(shared_model("llama").config).eval()
    model.load_state_dict(shared_model("llama").state_dict())
    return model


def with_part(name, kind):
    model = new_model("llama")
    for layer in model.model.layers:
        getattr(layer, name).__class__ = kind
    return model


CASES = {
    "model": limited,
    "MLP": lambda: with_part("mlp", Clipped),
    "norm": lambda: with_part("input_layernorm", Scaled),
}


@pytest.mark.parametrize("name", CASES)
@torch.no_grad()
def test_forwards_of_others_are_called(name):
    model = CASES[name]()
    assert not torch.allclose(logits_of(PackedForward(model)), logits_of(PackedForward(new_model("llama"))), atol=1e-3)
    assert torch.equal(logits_of(packed_forward(model)), logits_of(PackedForward(model)))
    assert not is_written(model)


def test_classes_that_only_add_to_a_model_are_written_out():
    class Chatty(LlamaForCausalLM):
        def say(self):
            return "something"

    assert is_written(Chatty(shared_model("llama").config).eval())


def test_functions_that_a_class_wraps_or_calls_count():
    class Patched(LlamaMLP):
        forward = functools.wraps(LlamaMLP.forward)(lambda self, x: x.clamp(-1, 1))

    class Adding(LlamaMLP):
        def helper(self, x):
            return x

    assert foreign_code([LlamaMLP, LlamaForCausalLM, LlamaRMSNorm, nn.Linear]) is None
    assert "Patched.forward" in foreign_code([LlamaMLP, Patched])
    assert foreign_code([Adding]) is None  # is never called
    norm = type(shared_model("gemma2").model.norm)

    class OwnMean(norm):
        def _norm(self, x):
            return x

    assert foreign_code([norm]) is None and "OwnMean._norm" in foreign_code([OwnMean])


def test_mentions_are_those_of_functions_that_are_called_too():
    norm = type(shared_model("gemma2").model.norm)
    assert {"_norm", "weight", "rsqrt"} <= mentions(norm)
    assert unknown_mentions([LlamaMLP]) is None
    assert "clamp" in unknown_mentions([LlamaMLP, Clipped])
