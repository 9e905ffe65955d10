"""Switching `assistant=` on and off: what is patched, for how long, and what stays as it was."""

import copy
import inspect
import io
import pickle
import types

import pytest
import torch
from transformers import GenerationMixin

import hf_smartspec

from .helpers import Spy, draft_source, noisy_copy, prompts, tiny_llama

INPUTS = prompts([4, 6])


class Wrapper(torch.nn.Module):
    """As PEFT's: no `GenerationMixin`, `generate` goes to the model inside."""

    def __init__(self, base_model):
        super().__init__()
        self.base_model = base_model

    def get_base_model(self):
        return self.base_model

    def generate(self, *args, **kwargs):
        return self.base_model.generate(*args, **kwargs)


def speculates(model) -> bool:
    """Return whether `assistant=` drafts; without being enabled, transformers refuses the argument."""
    spy = Spy(draft_source(getattr(model, "base_model", model) if isinstance(model, Wrapper) else model))
    try:
        model.generate(**INPUTS, max_new_tokens=6, assistant=spy)
    except ValueError as error:
        assert "assistant" in str(error)
        return False
    return spy.drafted > 0


def test_not_enabled_is_refused_by_transformers(model):
    assert not speculates(model)


def test_enable_returns_the_model_and_serves_assistant(model):
    assert hf_smartspec.enable(model) is model
    assert speculates(model)


def test_enable_and_disable_are_idempotent_and_leave_nothing_behind(model):
    attributes = dict(vars(model))
    original = model.generate
    for _ in range(2):
        hf_smartspec.enable(hf_smartspec.enable(model))
        assert speculates(model)
        assert hf_smartspec.disable(hf_smartspec.disable(model)) is model
        assert vars(model).keys() == attributes.keys()
        assert model.generate == original
        assert not speculates(model)


def test_disable_without_enable_changes_nothing(model):
    assert hf_smartspec.disable(model) is model
    assert "generate" not in vars(model)
    assert hf_smartspec.disable() is None
    assert GenerationMixin.generate.__module__.startswith("transformers")


def test_one_enabled_model_leaves_others_alone(model):
    hf_smartspec.enable(model)
    assert not speculates(tiny_llama())


def test_global_enable_reaches_every_model_and_is_reversible(model):
    original = GenerationMixin.generate
    hf_smartspec.enable()
    try:
        hf_smartspec.enable()
        assert speculates(model)
        assert "generate" not in vars(model)
    finally:
        hf_smartspec.disable()
    assert GenerationMixin.generate is original
    assert not speculates(model)


def test_global_enable_is_a_context_manager(model):
    original = GenerationMixin.generate
    with hf_smartspec.enable():
        assert speculates(model)
    assert GenerationMixin.generate is original
    with pytest.raises(RuntimeError, match="inside"), hf_smartspec.enable():
        raise RuntimeError("inside")
    assert GenerationMixin.generate is original


def test_enabled_restores_what_was_before(model):
    with hf_smartspec.enabled(model) as same:
        assert same is model
        assert speculates(model)
    assert not speculates(model)
    hf_smartspec.enable(model)
    with hf_smartspec.enabled(model):
        pass
    assert speculates(model)
    hf_smartspec.disable(model)
    with hf_smartspec.enabled():
        with hf_smartspec.enabled():
            pass
        assert speculates(model)
    assert not speculates(model)
    with pytest.raises(RuntimeError, match="inside"), hf_smartspec.enabled(model):
        raise RuntimeError("inside")
    assert not speculates(model)


def test_model_and_global_enable_together(model):
    with hf_smartspec.enable():
        hf_smartspec.enable(model)
        assert speculates(model)
        hf_smartspec.disable(model)
        assert speculates(model)
        hf_smartspec.enable(model)
    assert speculates(model)
    hf_smartspec.disable(model)
    assert not speculates(model)


def test_global_enable_keeps_patches_of_others(monkeypatch, model):
    plain = GenerationMixin.generate
    calls = []

    def counted(self, *args, **kwargs):
        calls.append(self)
        return plain(self, *args, **kwargs)

    monkeypatch.setattr(GenerationMixin, "generate", counted)
    with hf_smartspec.enable():
        assert speculates(model)
        assert calls
    assert GenerationMixin.generate is counted


def test_global_patch_of_others_on_top_survives(monkeypatch, model):
    plain = GenerationMixin.generate
    monkeypatch.setattr(GenerationMixin, "generate", plain)  # restores whatever this test leaves
    hf_smartspec.enable()
    ours = GenerationMixin.generate

    def on_top(self, *args, **kwargs):
        return ours(self, *args, **kwargs)

    GenerationMixin.generate = on_top
    hf_smartspec.enable()  # what lies on top is wrapped, not called by itself again
    assert speculates(model)
    hf_smartspec.disable()
    assert GenerationMixin.generate is on_top
    assert "generate_batch" not in vars(GenerationMixin), "what nobody has patched is taken back wholly"


def test_instance_patch_of_others_stays_underneath(model):
    """Unsloth sets `model.generate` on the instance and keeps the old one."""
    calls = []

    def fast_generate(self, *args, **kwargs):
        calls.append(kwargs)
        return self._old_generate(*args, **kwargs)

    model._old_generate = model.generate
    model.generate = types.MethodType(fast_generate, model)
    patched = model.generate
    expected = model.generate(**INPUTS, max_new_tokens=5)
    hf_smartspec.enable(model)
    calls.clear()
    assert speculates(model)
    assert len(calls) == 1
    assert torch.equal(model.generate(**INPUTS, max_new_tokens=5), expected)
    hf_smartspec.disable(model)
    assert model.generate == patched
    assert not speculates(model)


def test_instance_patch_of_others_on_top_survives(model):
    hf_smartspec.enable(model)
    model._old_generate = model.generate
    model.generate = on_top = types.MethodType(lambda self, *args, **kwargs: self._old_generate(*args, **kwargs), model)
    hf_smartspec.enable(model)  # what lies on top is wrapped, not called by itself again
    assert speculates(model)
    hf_smartspec.disable(model)
    assert model.generate is on_top


def test_wrappers_pass_on_to_the_model_inside(model):
    wrapper = Wrapper(model)
    assert hf_smartspec.enable(wrapper) is wrapper
    assert speculates(wrapper)
    assert speculates(model)
    with hf_smartspec.enabled(wrapper):
        pass
    assert speculates(wrapper)
    assert hf_smartspec.disable(wrapper) is wrapper
    assert not speculates(wrapper)
    assert "generate" not in vars(model)


@pytest.mark.parametrize("thing", [3, "gpt2", torch.nn.Linear(2, 2), None.__class__])
def test_what_cannot_generate_is_refused(thing):
    for function in (hf_smartspec.enable, hf_smartspec.disable):
        with pytest.raises(TypeError, match="`model` must be a transformers model"):
            function(thing)


def _pickled(model):
    return pickle.loads(pickle.dumps(model))


def _saved(model):
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, _pickled, _saved])
def test_copies_of_an_enabled_model_are_enabled_and_independent(model, duplicate):
    hf_smartspec.enable(model)
    other = duplicate(model)
    expected = model.generate(**INPUTS, max_new_tokens=8)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    actual = other.generate(**INPUTS, max_new_tokens=8, assistant="prompt_lookup")
    assert torch.equal(actual, expected)  # the copy runs its own weights
    hf_smartspec.disable(model)
    assert speculates(other)
    hf_smartspec.disable(other)
    assert not speculates(other)


@pytest.mark.parametrize("assistant", [{}, {"assistant": None}])
def test_calls_without_assistant_go_to_the_original_untouched(model, monkeypatch, assistant):
    seen = []

    def recording(self, *args, **kwargs):
        seen.append((args, kwargs))
        return "result"

    monkeypatch.setattr(GenerationMixin, "generate", recording)
    hf_smartspec.enable(model)
    assert model.generate(INPUTS["input_ids"], None, max_new_tokens=3, **assistant) == "result"
    ((args, kwargs),) = seen
    assert args[0] is INPUTS["input_ids"] and args[1:] == (None,)
    assert kwargs == {"max_new_tokens": 3}


def test_seed_without_assistant_is_the_noise_of_a_call_with_one(model):
    hf_smartspec.enable(model)
    sampling = {"max_new_tokens": 12, "do_sample": True, "temperature": 0.8, "eos_token_id": None}
    plain = model.generate(**INPUTS, **sampling, seed=3)
    assert torch.equal(model.generate(**INPUTS, **sampling, seed=3, assistant="prompt_lookup"), plain)
    assert not torch.equal(model.generate(**INPUTS, **sampling, seed=4), plain)
    with pytest.raises(ValueError, match="`seed` serves greedy search and sampling"):
        model.generate(**INPUTS, max_new_tokens=3, seed=1, num_beams=2)


def test_transformers_own_drafts_pass_through(model, draft, hush):
    """`assistant_model.generate` is entered by transformers' assisted decoding, recursively."""
    inputs = prompts([6])
    expected = model.generate(**inputs, max_new_tokens=12)
    with hf_smartspec.enable():
        actual = model.generate(**inputs, max_new_tokens=12, assistant_model=draft)
        lookup = model.generate(**inputs, max_new_tokens=12, prompt_lookup_num_tokens=2)
    assert torch.equal(actual, expected) and torch.equal(lookup, expected)
    for one in (model, draft):
        hf_smartspec.enable(one)
    assert torch.equal(model.generate(**inputs, max_new_tokens=12, assistant_model=draft), expected)


def test_an_enabled_draft_drafts(model):
    draft = hf_smartspec.enable(noisy_copy(model))
    hf_smartspec.enable(model)
    output = model.generate(**INPUTS, max_new_tokens=12, assistant=draft, return_dict_in_generate=True)
    assert output.statistics.accepted_tokens > 0
    assert torch.equal(output.sequences, model.generate(**INPUTS, max_new_tokens=12))


def test_generate_keeps_its_documented_parameters(model):
    """Callers look at the signature to decide what they may pass."""
    hf_smartspec.enable(model)
    parameters = inspect.signature(model.generate).parameters
    assert {"assistant", "seed"} <= parameters.keys()
    assert any(item.kind is item.VAR_KEYWORD for item in parameters.values())
