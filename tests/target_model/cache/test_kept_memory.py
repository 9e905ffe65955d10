"""Memory that outlives calls: at the same addresses, without a trace of what was there, for one call at a time."""

import gc
import threading
import weakref
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from transformers import StoppingCriteria, StoppingCriteriaList

import hf_smartspec
from hf_smartspec import DraftModelCandidates, SmartSpecConfig
from hf_smartspec.target_model.cache import kept_memory
from hf_smartspec.target_model.compat import CACHE
from hf_smartspec.target_model.forward.packed import PackedForward
from hf_smartspec.target_model.model_state import state_of
from hf_smartspec.target_model.written import packed_forward

from ...generate.helpers import noisy_copy, prompts, tiny_llama

OPTIONS = {"max_new_tokens": 12, "eos_token_id": None, "do_sample": False}


@pytest.fixture
def model():
    return hf_smartspec.enable(tiny_llama())


@pytest.fixture
def used(monkeypatch):
    """The addresses of keys and values behind every forward, by model."""
    found: dict[int, list[tuple[int, ...]]] = {}
    run = PackedForward.run

    def noting(forward, planned):
        logits = run(forward, planned)
        memories = [memory for layer in forward.cache.layers for memory in layer.memories]
        found.setdefault(id(forward.model), []).append(tuple(memory.data_ptr() for memory in memories))
        return logits

    monkeypatch.setattr(PackedForward, "run", noting)
    return found


def generate(model, assistant="prompt_lookup", lengths=(9, 5, 12), seed=0, **options):
    return model.generate(**prompts(lengths, seed), assistant=assistant, **OPTIONS | options)


def plain(model, lengths=(9, 5, 12), seed=0, **options):
    return model.generate(**prompts(lengths, seed), **OPTIONS | options)


@pytest.mark.parametrize("width", [1, 3])
def test_addresses_stay_the_same_over_steps_and_calls(model, used, width):
    draft = noisy_copy(model)
    source = SmartSpecConfig(DraftModelCandidates(draft, width=width), num_nodes=6)
    for tried in (model, draft):
        packed_forward(tried)
    used.clear()
    for _ in range(2):
        output = generate(model, source, return_dict_in_generate=True)
        assert output.sequences.tolist() == plain(model).tolist() and output.statistics.accepted_tokens > 0
    generate(model, source, lengths=(4, 7))
    for model_id in map(id, (model, draft)):
        assert len(used[model_id]) > 6 and len(set(used[model_id])) == 1 and len(used[model_id][0]) == 4


def test_calls_of_all_sizes_one_after_the_other(model):
    """Each in memory that others have used, which is cut up differently each time."""
    rng, draft = np.random.default_rng(0), noisy_copy(model)
    for seed in range(12):
        lengths = rng.integers(1, 60, rng.integers(1, 6)).tolist()
        options = {"max_new_tokens": int(rng.integers(1, 40))}
        assistant = ("prompt_lookup", "none", draft)[seed % 3]
        actual = generate(model, assistant, lengths, seed, **options)
        assert actual.tolist() == plain(model, lengths, seed, **options).tolist()


def test_nothing_is_left_of_what_was_there(model):
    """Masked columns are multiplied by zero, and zero times NaN is NaN."""
    weight = model.get_input_embeddings().weight
    before = weight.detach().clone()
    weight.data.fill_(torch.nan)
    generate(model, lengths=(30, 30, 30), max_new_tokens=30)
    weight.data.copy_(before)
    memories = state_of(model).memory.memories
    assert len(memories) == 4 and all(torch.isfinite(memory).all() for memory in memories)
    assert generate(model, lengths=(3, 20, 9)).tolist() == plain(model, lengths=(3, 20, 9)).tolist()


class Calling(StoppingCriteria):
    """Does something once, in the middle of a call."""

    def __init__(self, function):
        self.function = function

    def __call__(self, input_ids, scores, **kwargs):
        function, self.function = self.function, None
        if function is not None:
            function()
        return torch.zeros(len(input_ids), dtype=torch.bool)


@contextmanager
def in_between(model, function):
    criteria = StoppingCriteriaList([Calling(function)])
    yield generate(model, stopping_criteria=criteria).tolist()


@pytest.mark.parametrize("in_thread", [False, True])
def test_two_calls_at_once_have_memory_of_their_own(model, used, in_thread):
    generate(model)
    used.clear()
    inner = []

    def call():
        inner.append(generate(model, lengths=(6, 6), seed=1).tolist())

    def in_a_thread():
        thread = threading.Thread(target=call)
        thread.start()
        thread.join()

    with in_between(model, in_a_thread if in_thread else call) as outer:
        assert outer == plain(model).tolist() and inner == [plain(model, lengths=(6, 6), seed=1).tolist()]
    assert len(set(used[id(model)])) == 2
    assert len(state_of(model).memory.memories) == 4


def test_it_goes_with_the_model():
    model = hf_smartspec.enable(tiny_llama())
    generate(model)
    gc.collect()
    kept = weakref.ref(state_of(model).memory)
    assert kept() is not None
    del model
    gc.collect()
    assert kept() is None


def test_disabling_frees_it(model):
    generate(model)
    hf_smartspec.disable(model)
    assert state_of(model).memory is None


def test_other_dtypes_have_other_memory(model):
    generate(model)
    model.to(torch.float64)
    assert generate(model).tolist() == plain(model).tolist()
    assert {memory.dtype for memory in state_of(model).memory.memories} == {torch.float64}


def test_much_is_given_back(model, monkeypatch):
    generate(model)
    size = sum(memory.nbytes for memory in state_of(model).memory.memories)
    monkeypatch.setattr(kept_memory, "_MOST_ELSEWHERE", size)
    generate(model, lengths=(100,) * 4)
    assert state_of(model).memory is None
    generate(model)
    assert state_of(model).memory is not None


def test_a_call_that_fails_leaves_nothing(model):
    def fail():
        raise RuntimeError("somebody else's fault")

    generate(model)
    with pytest.raises(RuntimeError, match="somebody else"), in_between(model, fail):
        pass
    assert state_of(model).memory is None
    assert generate(model).tolist() == plain(model).tolist()


def test_returned_caches_are_not_what_is_kept(model):
    first = generate(model, return_dict_in_generate=True)
    copies = [layer.keys.clone() for layer in first[CACHE].layers]
    generate(model, seed=1)
    assert all(torch.equal(layer.keys, copy) for layer, copy in zip(first[CACHE].layers, copies))


def test_calls_in_inference_mode_and_outside(model):
    expected = plain(model).tolist()
    for _ in range(2):
        with torch.inference_mode():
            assert generate(model).tolist() == expected
        assert generate(model).tolist() == expected
