"""All trees of a step as flat arrays, against the trees one by one."""

from dataclasses import replace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from hf_smartspec.drafts.forest import Forest

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
