import functools

import pytest
import torch

from hf_smartspec.target.compat import CACHE, cache_name


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
