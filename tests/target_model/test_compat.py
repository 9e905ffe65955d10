import functools

import pytest
import torch
from packaging.version import Version

import hf_smartspec
from hf_smartspec.target_model.compat import CACHE, TRANSFORMERS, cache_name, modules_of, new_cache

from ..cases import left_padded
from ..models import UNPADDED, new_model
from ..sources import Oracle, Recording


def announced(function):
    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        return function(*args, **kwargs)

    return wrapper


def takes_cache(input_ids, cache=None): ...


def takes_keys_and_values(input_ids, past_key_values=None, **kwargs): ...


def takes_anything(*args, **kwargs): ...


@pytest.mark.parametrize(
    "function, name",
    [
        (takes_cache, "cache"),
        (announced(takes_cache), "cache"),
        (takes_keys_and_values, "past_key_values"),
        (announced(announced(takes_keys_and_values)), "past_key_values"),
        (takes_anything, CACHE),
    ],
)
def test_the_cache_is_named_by_the_signature(function, name):
    assert cache_name(function) == name
    layer = torch.nn.Identity()
    layer.forward = function
    assert cache_name(layer.forward) == name


@pytest.mark.skipif("minimax" not in UNPADDED, reason="this release's layers with states are not known")
def test_a_callers_own_class_of_a_model_has_the_models_cache():
    model = new_model("minimax")
    expected = type(new_cache(model))
    model.__class__ = type("OwnMiniMax", (type(model),), {"__module__": __name__})
    assert type(new_cache(model)) is expected


def test_all_modules_of_a_model_are_found_once():
    model = new_model("llama")
    model.model.layers[1].mlp = model.model.layers[0].mlp
    model.model.left_out, model.model.itself = None, model.model
    model.model.register_module("nothing", None)
    modules = modules_of(model)
    assert modules[0] is model and len(modules) == len(set(modules)) and set(modules) == set(model.modules())


@pytest.mark.skipif(Version("5.21") <= TRANSFORMERS, reason="transformers' default attention knows soft caps")
def test_soft_caps_that_are_left_out_are_left_out_in_speculation_too():
    model = new_model("gemma2", attn_logit_softcapping=0.5)
    model.set_attn_implementation("sdpa")
    for name, parameter in model.named_parameters():
        if "q_proj" in name or "k_proj" in name:
            parameter.mul_(8)
    kwargs = left_padded([[5, 9, 5, 9, 5], [11], [3, 4, 5, 6, 7, 8]]) | {"max_new_tokens": 12, "eos_token_id": None}
    kwargs |= {"return_dict_in_generate": True, "output_logits": True}
    expected = model.generate(**kwargs)
    recording = Recording(Oracle([[token for token in ids if token] for ids in expected.sequences.tolist()]))
    with hf_smartspec.enabled(model):
        output = model.generate(**kwargs, assistant=recording)
    assert torch.equal(output.sequences, expected.sequences) and recording.accepted > 0
    torch.testing.assert_close(output.logits, expected.logits, rtol=1e-4, atol=1e-4)
