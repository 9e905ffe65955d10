"""State of a model: one for all threads, freed with the model, and not shared by copies."""

import copy
import gc
import pickle
import weakref
from concurrent.futures import ThreadPoolExecutor

import torch

import hf_smartspec
from hf_smartspec.target_model.model_state import forget, state_of

from ..models import new_model


def test_every_model_has_one():
    first, second = new_model("llama"), new_model("llama")
    with ThreadPoolExecutor(8) as pool:
        states = set(pool.map(lambda _: state_of(first), range(64)))
    assert states == {state_of(first)} and state_of(second) not in states


def test_copies_begin_without():
    model = new_model("llama")
    state = state_of(model)
    for make in (copy.copy, copy.deepcopy, lambda item: pickle.loads(pickle.dumps(item))):
        other = make(model)
        assert state_of(other) is not state and state_of(other) is state_of(other)
        assert state_of(model) is state


def test_it_goes_with_the_model_although_it_refers_to_it():
    model = hf_smartspec.enable(new_model("llama"))
    model.generate(torch.tensor([[3, 4, 5]]), assistant="auto", max_new_tokens=4)
    state_of(model).written, found = model, [weakref.ref(model), weakref.ref(state_of(model))]
    del model
    gc.collect()
    assert [item() for item in found] == [None, None]


def test_disable_forgets_all():
    model = hf_smartspec.enable(new_model("llama"), assistant="auto")
    model.generate(torch.tensor([[3, 4, 5]]), max_new_tokens=4)
    state = state_of(model)
    assert state.memory is not None and state.sources
    hf_smartspec.disable(model)
    assert state_of(model) is not state and not state_of(model).sources
    forget(model)
    forget(model)  # to no effect
