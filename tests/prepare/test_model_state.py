"""What is remembered of a model, for calls from several threads."""

import threading

import pytest

from hf_smartspec.prepare import model_state
from hf_smartspec.prepare.model_state import ModelState

from ..models import new_model

TIMEOUT = 20.0


class Load:
    """One that has begun, and goes on when it is told to."""

    def __init__(self):
        self.has_begun, self.may_end = threading.Event(), threading.Event()

    def __call__(self, *args):
        self.has_begun.set()
        assert self.may_end.wait(TIMEOUT)
        return self


WAYS = {
    "draft model": lambda state, model, load: state.drafter("folder", model),
    "tokenizers": lambda state, model, load: state.vocabulary_of(model, (), load),
}


@pytest.mark.parametrize("way", WAYS)
def test_nobody_else_waits_for_files_that_are_loaded(way, monkeypatch):
    state, model, load, found = ModelState(), new_model("llama"), Load(), []
    monkeypatch.setattr(model_state, "_load", load)
    thread = threading.Thread(target=lambda: found.append(WAYS[way](state, model, load)))
    thread.start()
    assert load.has_begun.wait(TIMEOUT)
    assert state.is_new("a warning") and state.suffix_trees() is state.suffix_trees()
    load.may_end.set()
    thread.join(TIMEOUT)
    assert found == [load]


def test_who_asks_for_a_vocabulary_meanwhile_gets_what_is_found():
    state, model, load, found = ModelState(), new_model("llama"), Load(), []
    threads = [
        threading.Thread(target=lambda find=find: found.append(state.vocabulary_of(model, (), find)))
        for find in (load, lambda: "another")
    ]
    threads[0].start()
    assert load.has_begun.wait(TIMEOUT)
    threads[1].start()
    load.may_end.set()
    for thread in threads:
        thread.join(TIMEOUT)
    assert found == [load, load]
    assert state.vocabulary_of(model, ("other tokenizers",), lambda: "another") == "another"
