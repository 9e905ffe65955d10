"""The model that benches measure by default, and sources by name."""

from types import SimpleNamespace

import pytest

from benchmarks.kit import models
from benchmarks.kit.models import choose_model, described
from benchmarks.kit.sources import sources_by_name
from hf_smartspec.candidates import DraftModelCandidates, SuffixTreeCandidates
from hf_smartspec.commands.common.setup import Setup
from hf_smartspec.goodput import NoSpeculation
from tests.models import new_model


@pytest.fixture
def cached(monkeypatch):
    monkeypatch.setattr(models, "real_model", lambda: "/cache/SmolLM2")


def args(**given):
    return SimpleNamespace(**{"model": None, "draft": None, "parameters": None} | given)


def chosen(*sources, **given):
    found = args(**given)
    choose_model(found, sources)
    return found.model


def test_the_real_model_is_the_default_where_nothing_belongs_to_another(cached, monkeypatch):
    assert chosen() == chosen("auto", "suffix", "none") == "/cache/SmolLM2"
    assert chosen(model="own") == "own"
    for given in ({"draft": "folder"}, {"parameters": 0}, {"parameters": 2e8}):
        assert chosen("auto", **given) is None
    assert chosen("suffix", "draft") is chosen("hybrid") is chosen("folder/medusa") is None
    assert chosen("auto", "suffix+demos/models/medusa") is None, "heads of the embedded target"
    assert chosen("suffix_decoding+demos/models/smollm2-eagle3") == "/cache/SmolLM2"
    monkeypatch.setattr(models, "real_model", lambda: None)
    assert chosen() is None


def test_the_output_says_what_is_measured():
    model = new_model("llama")
    assert described(args(), model).startswith("the embedded target, cost-matched, ")
    assert described(args(parameters=0), model).startswith("the embedded target, 0 M")
    assert described(args(model="/cache/SmolLM2"), model).startswith("SmolLM2, ")


def test_sources_by_name_have_as_many_nodes_as_their_name_says():
    setup = Setup(new_model("llama"), new_model("llama"), [], max_new_tokens=0, max_batch_size=1, seed=0)
    found = {name: new() for name, new in sources_by_name(("none", "suffix", "suffix:8", "draft:9:3"), setup).items()}
    assert isinstance(found["none"].policy, NoSpeculation)
    assert found["suffix"].num_nodes is None and found["suffix:8"].num_nodes == 8
    assert isinstance(found["suffix"].assistant, SuffixTreeCandidates)
    assert found["suffix"].assistant is not found["suffix:8"].assistant
    assert isinstance(found["draft:9:3"].assistant, DraftModelCandidates) and found["draft:9:3"].assistant.width == 3
