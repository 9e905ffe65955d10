"""`assistant="auto"`, `"suffix"` and `"datastore:PATH"`: the plain tokens, and what is remembered between calls."""

import gc
import weakref

import numpy as np
import pytest
import torch

import hf_smartspec
from hf_smartspec import SmartSpecConfig, SuffixTreeCandidates
from hf_smartspec.candidates import Datastore, DatastoreCandidates
from hf_smartspec.goodput import GoodputAuction
from hf_smartspec.prepare.presets import suffix_trees

from ..costs import UnmovedCost
from .helpers import EOS, VOCAB_SIZE, tiny_llama

PROMPTS = torch.tensor([[0, 0, 5, 6, 7], [8, 9, 8, 9, 8], [0, 11, 12, 13, 14]])
INPUTS = {"input_ids": PROMPTS, "attention_mask": (PROMPTS > 0).long()}


@pytest.fixture
def model():
    return hf_smartspec.enable(tiny_llama())


@pytest.mark.parametrize("name", ["auto", "suffix"])
@pytest.mark.parametrize("sampling", [{}, {"do_sample": True, "temperature": 0.7, "seed": 3}])
def test_second_call_drafts_from_the_first_and_nothing_changes(model, name, sampling):
    def generate():
        return model.generate(
            **INPUTS, **sampling, assistant=name, max_new_tokens=24, eos_token_id=None, return_dict_in_generate=True
        )

    first, second = generate(), generate()
    assert torch.equal(first.sequences, second.sequences)
    assert second.statistics.accepted_tokens > 20 + first.statistics.accepted_tokens
    assert second.statistics.forwards < first.statistics.forwards
    if not sampling:
        assert torch.equal(first.sequences, model.generate(**INPUTS, max_new_tokens=24, eos_token_id=None))


def test_models_have_trees_of_their_own_which_go_with_them(model):
    other = tiny_llama(seed=1)
    assert suffix_trees(model) is suffix_trees(model) is not suffix_trees(other)
    trees = weakref.ref(suffix_trees(other))
    del other
    gc.collect()
    assert trees() is None


def test_forgetting(model):
    arguments = INPUTS | {"assistant": "suffix", "max_new_tokens": 24, "eos_token_id": None}
    model.generate(**arguments)
    assert suffix_trees(model).num_cached_tokens() > 3 * 24
    suffix_trees(model).remove_namespace("")
    assert suffix_trees(model).num_cached_tokens() == 0


def test_nothing_is_kept_running_after_an_error(model):
    def broken(input_ids, scores, **kwargs):
        raise RuntimeError("broken criterion")

    with pytest.raises(RuntimeError, match="broken criterion"):
        model.generate(**INPUTS, assistant="suffix", max_new_tokens=8, stopping_criteria=[broken])
    assert not suffix_trees(model)._requests


def test_datastore_by_path(model, tmp_path):
    plain = model.generate(**INPUTS, max_new_tokens=24, eos_token_id=None)
    path = tmp_path / "answers"
    Datastore.from_documents([row.tolist() for row in plain], vocab_size=VOCAB_SIZE).save(path)
    output = model.generate(
        **INPUTS, assistant=f"datastore:{path}", max_new_tokens=24, eos_token_id=None, return_dict_in_generate=True
    )
    assert torch.equal(output.sequences, plain)
    assert output.statistics.accepted_tokens > 40


def test_unusable_datastores_are_refused_before_any_work(model, tmp_path):
    def generate(path):
        return model.generate(**INPUTS, assistant=f"datastore:{path}", max_new_tokens=4, eos_token_id=EOS)

    with pytest.raises(FileNotFoundError, match="nowhere"):
        generate(tmp_path / "nowhere")
    (tmp_path / "foreign").write_bytes(b"something else")
    with pytest.raises(ValueError, match="foreign"):
        generate(tmp_path / "foreign")
    large = Datastore.from_documents([np.arange(200)], vocab_size=200)
    large.save(tmp_path / "large")
    with pytest.raises(ValueError, match="a vocabulary of 200 tokens and the target one of 40"):
        generate(tmp_path / "large")
    with pytest.raises(ValueError, match="a vocabulary of 200 tokens"):
        model.generate(**INPUTS, assistant=DatastoreCandidates(large), max_new_tokens=4)


def test_references_help_their_call_only(model):
    arguments = INPUTS | {"max_new_tokens": 24, "eos_token_id": None, "return_dict_in_generate": True}
    plain = model.generate(**arguments)
    texts = [row.tolist() for row in plain.sequences[:, 5:]]
    accepted = []
    for references in ([], texts, []):
        source = SuffixTreeCandidates(keep_outputs=False)
        output = model.generate(**arguments, assistant=SmartSpecConfig(source, references=references))
        assert torch.equal(output.sequences, plain.sequences)
        accepted.append(output.statistics.accepted_tokens)
    assert accepted[0] == accepted[2] < accepted[1] - 20


def test_namespaces_are_kept_apart(model):
    arguments = INPUTS | {"max_new_tokens": 24, "eos_token_id": None, "return_dict_in_generate": True}

    def accepted(**options):
        output = model.generate(**arguments, assistant=SmartSpecConfig("suffix", **options))
        return output.statistics.accepted_tokens

    first = accepted(namespace="a")
    assert accepted(namespace="b") == first, "nothing is known of a"
    assert accepted(namespace="a") > first + 20
    assert accepted(namespace="c", reads=["a"]) > first + 20


def test_bad_assignments_are_refused(model):
    for options, error, match in (
        ({"references": ["text"]}, TypeError, "lists of token ids"),
        ({"reads": ["a", "b", "c"]}, ValueError, "at most two"),
        ({"reads": "ab"}, ValueError, "at most two"),
        ({"namespace": 3}, ValueError, "must be a string"),
    ):
        with pytest.raises(error, match=match):
            SmartSpecConfig("suffix", **options)


def test_suffix_trees_draft_more_where_nodes_cost_less(model):
    """The same texts, remembered by trees of their own: once with nodes that are dear, once with nearly free ones."""
    arguments = INPUTS | {"max_new_tokens": 40, "eos_token_id": None, "return_dict_in_generate": True}
    plain = model.generate(**arguments).sequences
    drafted = []
    for per_node, per_step in ((0.1, 0.0), (1e-9, 0.02)):
        source, policy = SuffixTreeCandidates(max_bytes=2**20), GoodputAuction(UnmovedCost(0.0, per_node, per_step))
        config = SmartSpecConfig(source, policy=policy)
        for _ in range(3):
            output = model.generate(**arguments, assistant=config)
            assert torch.equal(output.sequences, plain)
        drafted.append(output.statistics.drafted_tokens / output.statistics.steps)
    assert drafted[0] < 8 and drafted[1] > source.default_num_nodes
