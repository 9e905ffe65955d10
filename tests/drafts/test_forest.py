"""All trees of a step as flat arrays, against the trees one by one."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_smartspec.drafts.forest import Forest
from hf_smartspec.drafts.tree import DraftTree
from hf_smartspec.goodput import outcomes

from ..strategies import lengths_of, trees


@st.composite
def matched(draw):
    """Trees that know the match length of every node, one for all, or none."""
    tree = draw(trees())
    lengths = draw(st.integers(0, 9) | st.lists(st.integers(0, 9), min_size=len(tree), max_size=len(tree)))
    return replace(tree, match_lengths=lengths if isinstance(lengths, int) else np.array(lengths, np.int64))


@given(st.lists(matched(), max_size=4), st.integers(0, 8))
def test_what_is_kept_is_what_the_trees_would_keep(drafts, limit):
    forest = Forest(drafts)
    assert forest.match_lengths.tolist() == [length for tree in drafts for length in lengths_of(tree)]
    for tree, kept in zip(drafts, forest.keep(forest.ranks() < limit)):
        expected = tree.most_likely(limit)
        for name in ("tokens", "parents", "probs"):
            np.testing.assert_array_equal(getattr(kept, name), getattr(expected, name))
        assert lengths_of(kept) == lengths_of(expected)


@given(st.lists(trees(max_size=9), max_size=4), st.data())
def test_a_forest_is_its_trees(drafts, data):
    forest = Forest(drafts)
    assert forest.depths.tolist() == [depth for tree in drafts for depth in tree.depths]
    paths = [prob for tree in drafts for prob in tree.path_probs]
    assert forest.along_paths(forest.probs) == pytest.approx(paths, abs=1e-6)
    limits = [data.draw(st.integers(0, len(tree))) for tree in drafts]
    parts = [tree.most_likely(limit) for tree, limit in zip(drafts, limits)]
    mask = np.zeros(forest.num_nodes, bool)
    for tree, start, limit in zip(drafts, forest.starts, limits):
        order = np.lexsort((np.arange(len(tree)), tree.depths, -tree.path_probs))
        mask[start + order[:limit]] = True
    for part, kept in zip(parts, forest.keep(mask)):
        assert kept.tokens.tolist() == part.tokens.tolist() and kept.parents.tolist() == part.parents.tolist()
        assert kept.probs == pytest.approx(part.probs)
    truths = [np.array(data.draw(st.lists(st.integers(0, 3), max_size=5)), np.int64) for _ in drafts]
    nodes, hits = forest.outcomes(truths)
    expected = [outcomes(tree, truth) for tree, truth in zip(drafts, truths)]
    assert nodes.tolist() == [n + start for item, start in zip(expected, forest.starts) for n in item.nodes]
    assert hits.tolist() == [hit for item in expected for hit in item.hits]


@pytest.mark.parametrize("parents", [[0, 0], [-1, 1], [-1, 5]])
def test_trees_whose_parents_stand_behind_their_children_are_refused(parents):
    tree = DraftTree(np.array([1, 2]), np.array(parents), np.ones(2, np.float32))
    with pytest.raises(ValueError, match="must stand before its child"):
        Forest([DraftTree.chain([3]), tree])


def test_scores_are_numbers_between_0_and_1():
    tree = DraftTree.chain([1, 2, 3, 4], [1.0001, np.nan, -0.1, 0.3])
    assert Forest([tree]).probs.tolist() == pytest.approx([1.0, 0.5, 0.0, 0.3])
