"""Trees of a lattice: all paths, sorted."""

from itertools import pairwise, product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_smartspec.candidates.heads.blocks.source import with_confidence
from hf_smartspec.candidates.heads.trees import best_trees


def random_lattice(seed, batch, depth, width, is_independent):
    rng = np.random.default_rng(seed)
    tokens = np.stack([rng.permutation(50)[:width] for _ in range(batch * depth)]).reshape(batch, depth, width)
    first, given = rng.random((batch, width)), rng.random((batch, depth - 1, 1 if is_independent else width, width))
    if seed % 3 == 0:  # ties
        first, given = np.ceil(first * 3) / 4, np.ceil(given * 3) / 4
    return tokens, first.astype(np.float32), given.astype(np.float32)


def all_paths(first, given) -> dict[tuple[int, ...], float]:
    """The probability of every path of one row's lattice."""
    depth, width = len(given) + 1, len(first)
    worth = {}
    for length in range(1, depth + 1):
        for path in product(range(width), repeat=length):
            prob = float(first[path[0]])
            for level, (before, rank) in enumerate(pairwise(path)):
                prob *= float(given[level][before if given.shape[1] > 1 else 0][rank])
            worth[path] = prob
    return worth


def path_of(tree, node) -> tuple[int, ...]:
    own: tuple[int, ...] = ()
    while node >= 0:
        own, node = (int(tree.tokens[node]), *own), int(tree.parents[node])
    return own


SIZES = st.tuples(st.integers(1, 3), st.integers(1, 4), st.integers(1, 3))  # rows, depths, candidates


@given(st.integers(0, 10**6), SIZES, st.booleans(), st.booleans(), st.data())
def test_nodes_are_the_likeliest_of_all_paths_in_their_order(seed, sizes, is_independent, is_cut, data):
    batch, depth, width = sizes
    tokens, first, given = random_lattice(seed, batch, depth, width, is_independent)
    limits = data.draw(st.lists(st.integers(0, 20), min_size=batch, max_size=batch))
    least = 0.2 if is_cut else 0.0
    for row, (tree, limit) in enumerate(zip(best_trees(tokens, first, given, limits, least), limits)):
        tree.check_integrity(50)
        worth = all_paths(first[row], given[row])
        best = sorted(worth.values(), reverse=True)[:limit]
        best = best[:1] + [prob for prob in best[1:] if prob >= least]
        np.testing.assert_allclose(tree.path_probs, best, rtol=1e-5)  # in their order
        named = {tuple(int(tokens[row, level, rank]) for level, rank in enumerate(path)): path for path in worth}
        found = [named[path_of(tree, node)] for node in range(len(tree))]
        assert len(set(found)) == len(found)
        np.testing.assert_allclose(tree.path_probs, [worth[path] for path in found], rtol=1e-5)


@given(st.integers(0, 10**6), st.lists(st.integers(0, 3), min_size=1, max_size=5))
def test_shapes_have_so_many_children_at_each_depth(seed, widths):
    tokens, first, given = random_lattice(seed, 1, 3, 3, False)
    (tree,) = best_trees(tokens, first, given, [500], widths=widths)
    tree.check_integrity(50)
    expected, num = 0, 1
    for width in widths[:3]:
        num *= width
        expected += num
    assert len(tree) == expected
    for parent in range(-1, len(tree)):
        depth = 0 if parent < 0 else int(tree.depths[parent])
        children = np.flatnonzero(tree.parents == parent)
        assert len(children) == (widths[depth] if depth < min(len(widths), 3) else 0)
        line = first[0]
        if depth:
            line = given[0, depth - 1, tokens[0, depth - 1].tolist().index(tree.tokens[parent])] if depth < 3 else line
        np.testing.assert_allclose(np.sort(tree.probs[children]), np.sort(line)[3 - len(children) :])


def test_what_is_no_number_is_left_out():
    tokens, first, given = random_lattice(1, 1, 3, 3, False)
    first[0, 1], given[0, 0, 2] = np.nan, np.nan
    (tree,) = best_trees(tokens, first, given, [500])
    tree.check_integrity(50)
    assert len(tree) == 2 * (1 + 3 * (1 + 3)) - 3 * (1 + 3) and np.isfinite(tree.probs).all()


def test_confidence_is_that_of_the_likeliest():
    probs = np.array([[0.5, 0.3, 0.1], [0.1, 0.8, 0.05]], np.float32)
    found = with_confidence(probs, np.array([0.9, 0.4], np.float32))
    np.testing.assert_allclose(found, [[0.9, 0.06, 0.02], [0.3, 0.4, 0.15]], rtol=1e-5)
    np.testing.assert_allclose(with_confidence(np.array([1.0, 0.0]), np.array(0.7)), [0.7, 0.0])
    assert with_confidence(probs, np.ones(2)) == pytest.approx(np.array([[1, 0, 0], [0, 1, 0]]))
