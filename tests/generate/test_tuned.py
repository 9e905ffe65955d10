"""`assistant="tuned:PATH"`: the options of the file, the plain tokens, and files that cannot be used."""

import json

import pytest
import torch

import hf_smartspec
from hf_smartspec import SmartSpecConfig, SuffixTreeCandidates
from hf_smartspec.candidates import (
    Datastore,
    DatastoreCandidates,
    DraftModelCandidates,
    FusedCandidates,
    StagedCandidates,
)
from hf_smartspec.candidates.combined.tuned import TunedSource, TunedSources
from hf_smartspec.prepare import sources
from hf_smartspec.prepare.presets import suffix_trees
from hf_smartspec.prepare.sources import resolve

from .helpers import VOCAB_SIZE, noisy_copy, tiny_llama

PROMPTS = torch.tensor([[0, 0, 5, 6, 7], [8, 9, 8, 9, 8], [0, 11, 12, 13, 14]])
INPUTS = {"input_ids": PROMPTS, "attention_mask": (PROMPTS > 0).long(), "max_new_tokens": 24, "eos_token_id": None}
SUFFIX = TunedSource("suffix", {"max_match": 5, "num_nodes": 7, "max_bytes": 2**22})
LOOKUP = TunedSource("prompt_lookup", {"max_ngram": 4})
FUSED = {"discounts": [[0.9, 0.8], [0.7, 1.0]], "num_nodes": 9, "min_probability": 0.02, "calibrated": False}


@pytest.fixture
def model():
    return hf_smartspec.enable(tiny_llama())


def saved(path, *sources, **fused):
    TunedSources(sources, fused).save(path)
    return f"tuned:{path}"


def source_of(model, assistant):
    return resolve(assistant, model).source


def test_a_file_says_what_was_saved(tmp_path):
    tuned = TunedSources((SUFFIX, LOOKUP), FUSED, {"files": ["a"]})
    tuned.save(tmp_path / "tuned.json")
    assert TunedSources.load(tmp_path / "tuned.json") == tuned


def test_suffix_trees_are_remembered_per_model_and_file(model, tmp_path):
    name = saved(tmp_path / "a.json", SUFFIX)
    source = source_of(model, name)
    assert isinstance(source, SuffixTreeCandidates) and source.default_num_nodes == 7
    assert source is source_of(model, name) is source_of(model, [name])
    others = source_of(model, saved(tmp_path / "b.json", SUFFIX)), source_of(tiny_llama(), name), suffix_trees(model)
    assert all(other is not source for other in others)
    saved(tmp_path / "a.json", TunedSource("suffix", {"num_nodes": 3}))
    assert source_of(model, name).default_num_nodes == 3, "tuned anew"


def test_second_call_drafts_from_the_first_and_nothing_changes(model, tmp_path):
    name = saved(tmp_path / "a.json", SUFFIX, LOOKUP, **FUSED)
    plain = model.generate(**INPUTS)
    outputs = [model.generate(**INPUTS, assistant=name, return_dict_in_generate=True) for _ in range(2)]
    assert all(torch.equal(output.sequences, plain) for output in outputs)
    assert outputs[1].statistics.accepted_tokens > 20 + outputs[0].statistics.accepted_tokens


def test_fusion_takes_the_file_s_options(model, tmp_path):
    fused = source_of(model, saved(tmp_path / "a.json", SUFFIX, LOOKUP, **FUSED))
    assert isinstance(fused, FusedCandidates)
    assert fused.discounts == [(0.9, 0.8, 1.0), (0.7, 1.0, 1.0)]
    assert (fused.default_num_nodes, fused.min_probability) == (9, 0.02)
    assert fused.sources[1].max_ngram == 4


@pytest.mark.parametrize("sources", [[SUFFIX], [SUFFIX, LOOKUP]])
def test_draft_models_join_under_the_file_s_threshold(model, tmp_path, sources):
    name = saved(tmp_path / "a.json", *sources, threshold=2.5)
    for assistant in ([name, noisy_copy(model)], [noisy_copy(model), name]):
        staged = source_of(model, assistant)
        cheap, costly = staged.stages
        assert staged.threshold == 2.5 and isinstance(costly, DraftModelCandidates)
        assert len(getattr(cheap, "sources", [cheap])) == len(sources)
    output = model.generate(**INPUTS, assistant=[name, noisy_copy(model)])
    assert torch.equal(output, model.generate(**INPUTS))


def test_datastores_are_opened(model, tmp_path):
    Datastore.from_documents([[5, 6, 7, 8]], vocab_size=VOCAB_SIZE).save(tmp_path / "store")
    store = TunedSource("datastore", {"datastore": str(tmp_path / "store"), "max_prefix": 3})
    source = source_of(model, saved(tmp_path / "a.json", store))
    assert isinstance(source, DatastoreCandidates) and source.max_prefix == 3
    Datastore.from_documents([[5, 6, 7, 8]], vocab_size=900).save(tmp_path / "store")
    with pytest.raises(ValueError, match="a vocabulary of 900 tokens"):
        source_of(model, f"tuned:{tmp_path / 'a.json'}")


GOOD = {"format": "hf-smartspec tuned sources", "version": 1, "sources": [{"name": "suffix", "options": {}}]}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "or damaged"),
        ("[]", "no file of `smartspec tune`"),
        ('{"sources": []}', "no file of `smartspec tune`"),
        (GOOD | {"version": 2}, "has version 2, this release reads 1"),
        (GOOD, "damaged"),
        (GOOD | {"sources": [], "fused": {}}, "must be some of"),
        (GOOD | {"sources": [{"name": "fast", "options": {}}], "fused": {}}, "got .'fast'"),
        (GOOD | {"sources": [{"name": "suffix", "options": {"speed": 3}}], "fused": {}}, "speed"),
        (GOOD | {"sources": [{"name": "suffix", "options": {"max_match": 99}}], "fused": {}}, "max_match"),
        (GOOD | {"fused": {"discounts": [1, 1]}}, "one per source"),
        (GOOD | {"fused": {"speed": 1}}, "got .'speed'"),
    ],
)
def test_unusable_files_are_refused_before_any_work(model, tmp_path, content, message):
    path = tmp_path / "tuned.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    with pytest.raises(ValueError, match=message):
        model.generate(**INPUTS, assistant=f"tuned:{path}")


def test_missing_files_are_named(model, tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere"):
        model.generate(**INPUTS, assistant=f"tuned:{tmp_path / 'nowhere.json'}")


def test_sources_are_resolved_once_per_call(model, monkeypatch):
    built = []
    monkeypatch.setattr(
        sources, "StagedCandidates", lambda *args, **kwargs: built.append(1) or StagedCandidates(*args, **kwargs)
    )
    draft = noisy_copy(model)
    output = model.generate(**INPUTS, assistant=SmartSpecConfig(["prompt_lookup", draft], width=2))
    assert torch.equal(output, model.generate(**INPUTS)) and built == [1]
    with pytest.raises(ValueError, match="only draft models have"):
        model.generate(**INPUTS, assistant=SmartSpecConfig(["prompt_lookup", draft], verification="rejection"))
    model.generate(**INPUTS, do_sample=True, seed=3, assistant=SmartSpecConfig(draft, verification="rejection"))
