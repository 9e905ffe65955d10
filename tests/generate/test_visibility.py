"""Seeing that it works: statistics on the model, a line per call, warnings for every new reason."""

import copy
import inspect
import pydoc

import pytest
import torch
from transformers import GenerationMixin
from transformers.utils import logging as transformers_logging

import hf_smartspec

from .helpers import Spy, draft_source, noisy_copy, prompts, tiny_llama

INPUTS = prompts([4, 6])
ARGUMENTS = {"max_new_tokens": 12, "eos_token_id": None}


@pytest.fixture
def verbosity():
    before = transformers_logging.get_verbosity()
    yield transformers_logging.set_verbosity
    transformers_logging.set_verbosity(before)


def test_statistics_of_the_last_call_and_of_all(model, draft):
    hf_smartspec.enable(model)
    assert model.smartspec_statistics.num_calls == 0
    outputs = [model.generate(**INPUTS, **ARGUMENTS, assistant=draft, return_dict_in_generate=True) for _ in range(2)]
    found = model.smartspec_statistics
    assert found.last == outputs[1].statistics and found.last.accepted_tokens > 0
    assert found.total.drafted_tokens == sum(item.statistics.drafted_tokens for item in outputs)
    assert found.num_calls == 2 and found.total.generated_tokens == 48
    model.generate(**INPUTS, **ARGUMENTS)
    assert found.num_calls == 2, "not ours"
    assert copy.deepcopy(model).smartspec_statistics is not found
    hf_smartspec.disable(model)
    assert not hasattr(model, "smartspec_statistics")


def test_statistics_while_enabled_for_all_and_of_plain_calls(model, draft):
    with hf_smartspec.enabled():
        model.generate(**INPUTS, **ARGUMENTS, assistant=draft)
        assert model.smartspec_statistics.last.accepted_tokens > 0
        model.generate(**INPUTS, **ARGUMENTS, assistant=draft, output_attentions=True, return_dict_in_generate=True)
        last = model.smartspec_statistics.last
        assert (last.drafted_tokens, last.generated_tokens, last.steps) == (0, 24, 24)


@pytest.mark.adaptive
def test_a_line_per_call(model, draft, caplog, verbosity):
    hf_smartspec.enable(model)
    verbosity(transformers_logging.INFO)
    model.generate(**INPUTS, **ARGUMENTS, assistant=draft)
    (line,) = [record for record in caplog.records if "drafted tokens accepted" in record.getMessage()]
    statistics = model.smartspec_statistics.last
    assert line.levelname == "INFO" and line.name.startswith("hf_smartspec")
    message = line.getMessage()
    assert f"{statistics.accepted_tokens} of {statistics.drafted_tokens} drafted tokens accepted" in message
    assert f"{statistics.mean_accepted_length:.2f} tokens per step" in message and "times as fast" in message
    caplog.clear()
    verbosity(transformers_logging.WARNING)
    model.generate(**INPUTS, **ARGUMENTS, assistant=draft)
    assert not [record for record in caplog.records if record.name.startswith("hf_smartspec")]


def test_every_reason_is_a_warning_once_per_model(model, caplog):
    def warned(model, **kwargs):
        caplog.clear()
        hf_smartspec.enable(model)
        model.generate(**INPUTS | ARGUMENTS | kwargs, assistant="prompt_lookup")
        return [record.getMessage() for record in caplog.records if "without speculation" in record.getMessage()]

    padded = {"attention_mask": INPUTS["attention_mask"].flip(1)}
    attentions = {"output_attentions": True}
    assert "attentions" in str(warned(model, **attentions)) and not warned(model, **attentions)
    assert "on the right" in str(warned(model, **padded)) and not warned(model, **padded)
    assert "attentions" in str(warned(tiny_llama(seed=1), **attentions)), "another model of the same class"


# --- What tools see


@pytest.mark.parametrize("everywhere", [False, True])
def test_help_shows_transformers_parameters_and_ours(model, everywhere):
    plain = list(inspect.signature(model.generate).parameters)
    with hf_smartspec.enabled(None if everywhere else model):
        shown = list(inspect.signature(model.generate).parameters)
        text = pydoc.plain(pydoc.render_doc(model.generate))
        assert shown == [*plain[:-1], "assistant", "seed", plain[-1]]
        if everywhere:
            of_class = list(inspect.signature(GenerationMixin.generate).parameters)
            assert of_class == ["self", *shown]
    assert "generate(" in text and "streamer" in text and "seed" in text
    assert "Generates sequences of token ids" in text and "hf_smartspec adds" in text
    assert text.count("hf_smartspec adds") == 1
    assert "assistant" not in inspect.signature(model.generate).parameters


def test_wrappers_are_seen_through(model):
    compiled = torch.compile(model)
    assert hf_smartspec.enable(compiled) is compiled
    spy = Spy(draft_source(model))
    expected = noisy_copy(model, 0.0).generate(**INPUTS, **ARGUMENTS)
    assert torch.equal(compiled.generate(**INPUTS, **ARGUMENTS, assistant=spy), expected) and spy.accepted > 0
    assert hf_smartspec.disable(compiled) is compiled and "generate" not in vars(model)
