"""Fused sources: the merged tree against all paths of all trees, and calibration."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import hf_smartspec
from hf_smartspec import DraftTree, PromptLookupCandidates, SuffixTreeCandidates, TreeCandidateGenerator
from hf_smartspec.candidates import FusedCandidates, StagedCandidates
from hf_smartspec.candidates.combined.fused.calibration import Calibrations
from hf_smartspec.candidates.request import SourceRequest
from hf_smartspec.drafts.merge import Discount, Draft, merge
from hf_smartspec.goodput import Calibrator

from ....generate.helpers import noisy_copy, tiny_llama
from ....strategies import lengths_of


class Scripted(TreeCandidateGenerator):
    """Proposes one tree all the time and remembers what it was told."""

    def __init__(self, tree):
        self.tree, self.calls = tree, []

    def start(self, request_id, prompt):
        self.calls.append(("start", request_id))

    def propose(self, request_ids, max_nodes):
        self.calls.append(("propose", *request_ids))
        return [self.tree.most_likely(limit) for limit in max_nodes]

    def observe(self, request_id, tokens):
        self.calls.append(("observe", request_id, *tokens.tolist()))

    def stop(self, request_id):
        self.calls.append(("stop", request_id))


@st.composite
def trees(draw):
    size = draw(st.integers(0, 8))
    parents = [draw(st.integers(-1, node - 1)) for node in range(size)]
    tokens, seen = [], set()
    for parent in parents:
        token = draw(st.integers(0, 3).filter(lambda t, p=parent: (p, t) not in seen)) if size < 4 else len(tokens)
        seen.add((parent, token))
        tokens.append(token)
    probs = [draw(st.integers(1, 100)) / 100 for _ in range(size)]
    tree = DraftTree(np.array(tokens, np.int64), np.array(parents, np.int64), np.array(probs, np.float32))
    lengths = draw(st.integers(0, 20) | st.lists(st.integers(0, 20), min_size=size, max_size=size))
    return replace(tree, match_lengths=lengths if isinstance(lengths, int) else np.array(lengths, np.int64))


def by_path(tree, discount=(1.0, 1.0, 1.0)):
    """Path probability of every token path from the root."""
    found, nodes = {}, []
    for token, parent, prob, length in zip(
        tree.tokens.tolist(), tree.parents.tolist(), tree.probs.tolist(), lengths_of(tree)
    ):
        path, above = nodes[parent] if parent >= 0 else ((), 1.0)
        factor = discount[parent >= 0] * (discount[2] ** (1 / (length + len(path))) if length else 1)
        nodes.append(((*path, token), above * prob * factor))
        found[nodes[-1][0]] = max(found.get(nodes[-1][0], 0), nodes[-1][1])
    return found


@given(st.lists(trees(), min_size=1, max_size=3), st.integers(0, 12), st.data())
def test_merged_tree_holds_the_most_probable_paths_of_all(sources, limit, data):
    factors = st.sampled_from([1.0, 0.8, 0.5])
    discounts = [Discount(data.draw(factors), data.draw(factors), data.draw(factors)) for _ in sources]
    merged = merge([Draft.of(tree).discounted(discount) for tree, discount in zip(sources, discounts)], limit)
    merged.check_integrity(100)
    everything = {}
    for tree, discount in zip(sources, discounts):
        for path, prob in by_path(tree, discount).items():
            everything[path] = max(everything.get(path, 0), prob)
    actual = by_path(merged)
    assert len(actual) == len(merged) == min(limit, len(everything))
    for path, prob in actual.items():
        assert prob == pytest.approx(everything[path], rel=1e-4)
    if actual and len(actual) < len(everything):
        rest = [prob for path, prob in everything.items() if path not in actual]
        assert min(actual.values()) >= max(rest) - 1e-5


def test_improbable_paths_are_left_out():
    tree = DraftTree.chain([1, 2, 3], [0.5, 0.5, 0.5])
    assert merge([Draft.of(tree)], 8, least=0.2).tokens.tolist() == [1, 2]
    fused = FusedCandidates([Scripted(tree)], min_probability=0.3)
    fused.start("a", np.array([7]))
    assert fused.propose(["a"], [8])[0].tokens.tolist() == [1]


def test_merged_nodes_have_the_match_length_of_the_source_that_is_surest_of_them():
    short = DraftTree.chain([1, 2], [0.9, 0.1], match_lengths=2)
    long = replace(DraftTree.chain([1, 2, 3], [0.5, 0.9, 0.9]), match_lengths=np.array([7, 6, 5]))
    unmatched = DraftTree.chain([8], [0.4])
    merged = merge([Draft.of(tree) for tree in (short, long, unmatched)], 8)
    assert dict(zip(merged.tokens.tolist(), merged.match_lengths.tolist())) == {1: 2, 2: 6, 3: 5, 8: 0}
    assert merge([Draft.of(unmatched)], 8).match_lengths == 0


def test_short_matches_are_discounted():
    """Of two tokens that the text suggests alike, the one behind the longer match comes first."""
    tree = replace(DraftTree.chain([1], [0.8]), match_lengths=np.array([1]))
    longer = DraftTree.chain([2, 3], [0.8, 0.8], match_lengths=4)
    fused = FusedCandidates([Scripted(tree), Scripted(longer)], [(1.0, 1.0, 0.5), (1.0, 1.0, 0.5)])
    fused.start("a", np.array([7]))
    merged = fused.propose(["a"], [8])[0]
    assert merged.tokens.tolist() == [2, 3, 1]
    # The second token of a chain follows a match that is longer by one.
    assert merged.probs.tolist() == pytest.approx([0.8 * 0.5 ** (1 / 4), 0.8 * 0.5 ** (1 / 5), 0.8 * 0.5])


def test_everybody_is_told_everything():
    sources = [Scripted(DraftTree.chain([1, 2], [0.9, 0.9])), Scripted(DraftTree.chain([1, 3], [0.5, 0.9]))]
    fused = FusedCandidates(sources)
    fused.start("a", np.array([7]))
    tree = fused.propose(["a"], [4])[0]
    assert sorted(by_path(tree)) == [(1,), (1, 2), (1, 3)]
    fused.observe("a", np.array([1, 2, 9]))
    fused.stop("a")
    for source in sources:
        assert source.calls == [("start", "a"), ("propose", "a"), ("observe", "a", 1, 2, 9), ("stop", "a")]


def test_calibration_corrects_a_boastful_source():
    """The first source is always sure and mostly wrong, the second seldom sure and always right."""
    boastful, modest = Scripted(DraftTree.chain([1], [0.99])), Scripted(DraftTree.chain([2], [0.3]))
    fused = FusedCandidates([boastful, modest], calibrator=Calibrator())
    fused.start("a", np.array([7]))
    assert fused.propose(["a"], [1])[0].tokens.tolist() == [1]
    for _ in range(60):
        fused.propose(["a"], [1])
        fused.observe("a", np.array([2, 9]))
    tree = fused.propose(["a"], [1])[0]
    assert tree.tokens.tolist() == [2] and tree.probs[0] > 0.8


def test_calibration_tells_short_matches_from_long_ones():
    """Both come with the same score; the short ones are never right."""
    source = Scripted(DraftTree.empty())
    fused = FusedCandidates([source], calibrator=Calibrator(), min_probability=0)
    fused.start("a", np.array([7]))
    trees = {length: DraftTree.chain([1], [0.6], match_lengths=length) for length in (1, 4, 100)}
    for _ in range(100):
        for length, source.tree in trees.items():
            fused.propose(["a"], [1])
            fused.observe("a", np.array([2 if length == 1 else 1]))
    probs = {}
    for length, source.tree in trees.items():
        probs[length] = fused.propose(["a"], [1])[0].probs[0]
    assert probs[1] < 0.2 and probs[4] > 0.8 and probs[100] > 0.8


def observed(fused, request_id, tokens, steps=60):
    for _ in range(steps):
        fused.propose([request_id], [4])
        fused.observe(request_id, np.array(tokens))


@pytest.mark.parametrize("others", [1, 300])
def test_what_is_learnt_in_one_namespace_changes_no_drafts_of_another(others):
    """The first source never comes true for one tenant; others do not notice, even when there are many tenants."""
    fused = FusedCandidates([Scripted(DraftTree.chain([1], [0.9]))], calibrator=Calibrator(), min_probability=0)
    names = ["a", *(f"other {index}" for index in range(others))]
    for name in names:
        fused.begin(SourceRequest(name, np.array([7]), namespace=f"tenant {name}"))
    observed(fused, "a", [2])
    trees = fused.propose(names, [4] * len(names))
    assert trees[0].probs[0] < 0.3
    for tree in trees[1:]:
        assert tree.probs[0] == pytest.approx(0.9, abs=0.005)
    fused.stop("a")
    fused.begin(SourceRequest("a", np.array([7]), namespace="tenant a"))
    assert fused.propose(["a"], [4])[0].probs[0] < 0.3, "and what is learnt is kept from request to request"


def test_what_is_learnt_takes_bounded_memory():
    """Tenants come and go; those that were here last are known."""
    calibrator = Calibrator()
    fused = FusedCandidates(
        [Scripted(DraftTree.chain([1], [0.9])), Scripted(DraftTree.chain([3], [0.01]))],
        calibrator=calibrator,
    )
    for index in range(300):
        fused.begin(SourceRequest(index, np.array([7]), namespace=index))
        observed(fused, index, [5, 6, 7, 9], steps=4)
        fused.stop(index)
    assert len(calibrator._tables) == 512
    last, first = (calibrator.calibrate((index, fused._calibrations.names[0]), [0.9], [1])[0] for index in (299, 0))
    assert last < 0.85 and first == pytest.approx(0.9)


def test_a_request_s_end_hands_everything_learnt_to_the_calibrator():
    """Sources are fused anew for every call; what the last one has learnt must not wait in it."""
    calibrator = Calibrator()
    for _ in range(40):
        fused = FusedCandidates([Scripted(DraftTree.chain([1], [0.9]))], calibrator=calibrator, min_probability=0)
        fused.start("a", np.array([7]))
        observed(fused, "a", [2], steps=1)
        fused.stop("a")
    assert fused.propose(["a"], [4])[0].probs[0] < 0.3


@given(trees(), st.lists(st.integers(0, 3), min_size=1, max_size=6))
def test_calibrations_learn_and_say_what_the_calibrator_does(tree, truth):
    """Tables against the calibrator itself, up to the steps of 1/127 in which they keep raw scores."""
    tabulated, direct = Calibrator(), Calibrator()
    calibrations = Calibrations(tabulated, ["source"])
    truth = np.array(truth)
    for _ in range(3):
        calibrations.learn("x", [Draft.of(tree)], truth)
        direct.learn(("x", "source"), tree, truth)
    calibrations.flush("x")
    (draft,) = calibrations.calibrated("x", [Draft.of(tree)])
    expected = direct.calibrate(("x", "source"), np.rint(tree.probs * 127) / 127, tree.depths, tree.match_lengths)
    assert draft.probs == pytest.approx(expected.tolist(), abs=0.02)


def test_num_nodes_is_the_largest_of_the_sources_unless_told():
    sources = [PromptLookupCandidates(num_tokens=7), PromptLookupCandidates(num_tokens=3)]
    assert FusedCandidates(sources).default_num_nodes == 7
    assert FusedCandidates(sources, num_nodes=4).default_num_nodes == 4


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"sources": []}, ValueError, "at least one"),
        ({"sources": ["suffix"]}, TypeError, "Only TreeCandidateGenerators"),
        ({"sources": [PromptLookupCandidates()], "discounts": [2.0]}, ValueError, r"in \[0, 1\]"),
        ({"sources": [PromptLookupCandidates()], "discounts": [(0.5, 0.5, 0.5, 0.5)]}, ValueError, "a pair"),
        ({"sources": [PromptLookupCandidates()], "discounts": [(0.5,)]}, ValueError, "a pair"),
        ({"sources": [PromptLookupCandidates()], "discounts": [(0.5, 0.5, 1.5)]}, ValueError, r"in \[0, 1\]"),
        ({"sources": [PromptLookupCandidates()], "discounts": [0.5, 0.5]}, ValueError, "for 1 sources"),
        ({"sources": [PromptLookupCandidates()], "discounts": ["half"]}, ValueError, "'half'"),
        ({"sources": [PromptLookupCandidates()], "num_nodes": 0}, ValueError, "num_nodes"),
    ],
)
def test_bad_arguments_are_refused(arguments, error, message):
    with pytest.raises(error, match=message):
        FusedCandidates(**arguments)


class Broken(Scripted):
    def __init__(self, where):
        super().__init__(DraftTree.chain([999]) if where == "tokens" else DraftTree.chain([3], [0.9]))
        self.where = where

    def propose(self, request_ids, max_nodes):
        if self.where == "propose":
            raise RuntimeError("broken")
        return super().propose(request_ids, max_nodes)

    def observe(self, request_id, tokens):
        if self.where == "observe":
            raise RuntimeError("broken")


@pytest.mark.parametrize("where", ["propose", "observe", "tokens"])
@pytest.mark.parametrize("is_staged", [False, True])
def test_one_broken_source_leaves_the_others(where, is_staged):
    broken, sound = Broken(where), Scripted(DraftTree.chain([1, 2], [0.8, 0.8]))
    fused = FusedCandidates([broken, sound], vocab_size=100)
    if is_staged:
        fused = StagedCandidates([sound, broken], threshold=9.0, vocab_size=100)
    fused.start("a", np.array([7]))
    fused.propose(["a"], [4])
    fused.observe("a", np.array([1]))
    assert fused.propose(["a"], [4])[0].tokens.tolist() == [1, 2]
    assert ("observe", "a", 1) in sound.calls
    fused.stop("a")
    assert not fused._failed and broken.calls[-1] == ("stop", "a")


def test_one_source_cannot_be_fused_with_itself():
    source = PromptLookupCandidates()
    with pytest.raises(ValueError, match="once only"):
        FusedCandidates([source, source])


@pytest.mark.parametrize("sampling", [{}, {"do_sample": True, "seed": 5}])
def test_lists_generate_the_plain_tokens(sampling):
    model = hf_smartspec.enable(tiny_llama())
    prompts = torch.tensor([[0, 0, 5, 6, 7], [8, 9, 8, 9, 8], [0, 11, 12, 13, 14]])
    inputs = {"input_ids": prompts, "attention_mask": (prompts > 0).long(), "max_new_tokens": 24, **sampling}
    expected = model.generate(**inputs, assistant="none")
    for assistant in (
        ["suffix", "prompt_lookup"],
        [noisy_copy(model), "suffix"],
        ["suffix", noisy_copy(model), noisy_copy(model)],
        [SuffixTreeCandidates(max_bytes=2**20)],
    ):
        output = model.generate(**inputs, assistant=assistant, return_dict_in_generate=True)
        assert torch.equal(output.sequences, expected)
        assert output.statistics.drafted_tokens > 0


def test_lists_that_cannot_be_fused_are_refused():
    model = hf_smartspec.enable(tiny_llama())
    ids = torch.tensor([[5, 6, 7]])
    with pytest.raises(ValueError, match="at least one"):
        model.generate(ids, assistant=[])
    with pytest.raises(ValueError, match="Unknown `assistant` preset 'fast'"):
        model.generate(ids, assistant=["suffix", "fast"])
