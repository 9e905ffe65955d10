"""A call meets `resolve` and every check once, on each of its two ways in."""

from collections import Counter

import pytest

import hf_smartspec
from hf_smartspec.prepare import arguments, decode, entry

from ..generate.helpers import prompts, tiny_llama

NAMES = "resolve", "check_settings", "check_token_ids", "check_seed", "prepare_call"


@pytest.mark.parametrize("way", ["enabled", "custom_generate"])
def test_each_is_met_once(way, monkeypatch):
    met = Counter()
    for module in (arguments, decode, entry):
        for name in NAMES:
            if function := vars(module).get(name):

                def counted(*args, name=name, function=function, **kwargs):
                    met[name] += 1
                    return function(*args, **kwargs)

                monkeypatch.setattr(module, name, counted)
    model, inputs = tiny_llama(), prompts([4, 6]) | {"max_new_tokens": 4, "assistant": "prompt_lookup", "seed": 1}
    if way == "enabled":
        hf_smartspec.enable(model).generate(**inputs)
    else:
        model.generate(**inputs, custom_generate=hf_smartspec.decode)
    assert met == dict.fromkeys(NAMES, 1)
