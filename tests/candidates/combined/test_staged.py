"""Sources in line by themselves: SuffixDecoding's hybrid, where nobody weighs gains against costs."""

import numpy as np
import pytest

from hf_smartspec import DraftTree
from hf_smartspec.candidates import StagedCandidates

from .fused.test_source import Scripted

WEAK, STRONG = DraftTree.chain([1], [0.4]), DraftTree.chain([1, 2, 3], [0.9, 0.9, 0.9])


@pytest.mark.parametrize(
    ("tree", "threshold", "expected"),
    [(WEAK, 1.0, [5, 6, 1]), (STRONG, 1.0, [1, 2, 3]), (STRONG, 9.0, [5, 6, 1, 2]), (WEAK, 0.0, [1])],
)
def test_a_later_source_speaks_where_little_is_promised(tree, threshold, expected):
    staged = StagedCandidates([Scripted(tree), Scripted(DraftTree.chain([5, 6]))], threshold)
    staged.start("a", np.array([7]))
    assert staged.propose(["a"], [4])[0].tokens.tolist() == expected


@pytest.mark.parametrize(
    ("tree", "threshold", "expected"),
    [(WEAK, 0.41, [5, 6]), (WEAK, 0.39, [1]), (STRONG, 2.44, [5, 6]), (STRONG, 2.43, [1, 2, 3])],
)
def test_the_published_hybrid_replaces_drafts_whose_score_is_at_most_tau(tree, threshold, expected):
    """SuffixDecoding, appendix B.1: suffix decoding if SCORE > τ, else the fallback."""
    staged = StagedCandidates([Scripted(tree), Scripted(DraftTree.chain([5, 6]))], threshold, replaces=True)
    staged.start("a", np.array([7]))
    assert staged.propose(["a"], [4])[0].tokens.tolist() == expected


def test_the_threshold_becomes_what_is_accepted_of_the_later_sources_drafts():
    """Three tokens of each: where the first source promises more than that, the later one is asked no more."""
    for promised, is_asked in ((2.5, True), (3.5, False)):
        first, later = Scripted(DraftTree.empty()), Scripted(DraftTree.chain([5, 6, 7, 8]))
        staged = StagedCandidates([first, later])
        staged.start("a", np.array([7]))
        for _ in range(200):
            staged.propose(["a"], [4])
            staged.observe("a", np.array([5, 6, 7, 9]))
        first.tree = DraftTree.chain([1, 2, 3, 4], [promised / 4] + [1.0] * 3)
        later.calls.clear()
        staged.propose(["a"], [8])
        assert (("propose", "a") in later.calls) == is_asked


def test_only_a_later_source_is_kept_to_its_usual_size():
    """It may cost by the node; 5 are usual."""
    first, later = Scripted(DraftTree.chain(range(10, 20), [0.1] * 10)), Scripted(DraftTree.chain(range(30, 40)))
    staged = StagedCandidates([first, later], threshold=9.0)
    staged.start("a", np.array([7]))
    tokens = staged.propose(["a"], [30])[0].tokens.tolist()
    assert [token for token in tokens if token >= 30] == list(range(30, 35)) and set(range(10, 20)) <= set(tokens)


def test_stages_are_the_sources_in_order_and_are_told_apart_by_name():
    sources = [Scripted(WEAK), Scripted(STRONG)]
    staged = StagedCandidates(sources)
    assert list(staged.stages) == sources and staged.name == "StagedCandidates(Scripted, Scripted)"
    assert list(sources[0].stages) == [sources[0]]


@pytest.mark.parametrize("threshold", [-1.0, float("nan")])
def test_bad_thresholds_are_refused(threshold):
    with pytest.raises(ValueError, match="threshold"):
        StagedCandidates([Scripted(WEAK)], threshold)
