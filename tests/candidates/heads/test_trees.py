"""The trees of independent heads: the best of all, by brute force, and fixed ones."""

from itertools import combinations, product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_smartspec.candidates.heads.trees import FixedTree, best_trees, full_tree


def random_candidates(seed, batch, depth, width):
    rng = np.random.default_rng(seed)
    tokens = np.stack([rng.permutation(50)[:width] for _ in range(batch * depth)]).reshape(batch, depth, width)
    probs = -np.sort(-rng.random((batch, depth, width)), axis=-1)
    return tokens, probs / np.maximum(probs.sum(-1, keepdims=True), 1.0)


def expected_tokens(tree):
    return float(tree.path_probs.sum())


@given(st.integers(0, 10**6), st.integers(1, 3), st.integers(1, 3), st.integers(1, 3), st.data())
def test_no_other_tree_of_as_many_nodes_promises_more(seed, batch, depth, width, data):
    tokens, probs = random_candidates(seed, batch, depth, width)
    limits = data.draw(st.lists(st.integers(0, 5), min_size=batch, max_size=batch))
    for row, (tree, limit) in enumerate(zip(best_trees(tokens, probs[:, 0], probs[:, 1:, None], limits), limits)):
        tree.check_integrity(50)
        paths = [path for length in range(1, depth + 1) for path in product(range(width), repeat=length)]
        assert len(tree) == min(limit, len(paths))
        worth = {path: np.prod([probs[row, level, rank] for level, rank in enumerate(path)]) for path in paths}
        best = sum(sorted(worth.values(), reverse=True)[:limit])
        assert expected_tokens(tree) == pytest.approx(best, rel=1e-4)
        found = sorted(tuple(tree.tokens[node] for node in path) for path in every_path(tree))
        known = {tuple(tokens[row, level, rank] for level, rank in enumerate(path)) for path in paths}
        assert set(found) <= known and len(set(found)) == len(found)


def every_path(tree):
    for node in range(len(tree)):
        path = [node]
        while tree.parents[path[0]] >= 0:
            path.insert(0, int(tree.parents[path[0]]))
        yield path


def test_a_few_nodes_against_all_closed_subsets():
    tokens, probs = random_candidates(1, 1, 2, 3)
    (tree,) = best_trees(tokens, probs[:, 0], probs[:, 1:, None], [4])
    paths = [(rank,) for rank in range(3)] + list(product(range(3), repeat=2))
    closed = [
        subset for subset in combinations(paths, 4) if all(len(path) == 1 or path[:1] in subset for path in subset)
    ]
    totals = [
        sum(np.prod([probs[0, level, rank] for level, rank in enumerate(path)]) for path in own) for own in closed
    ]
    assert expected_tokens(tree) == pytest.approx(max(totals))


def test_fixed_trees_have_the_ranks_that_they_name():
    tokens, probs = random_candidates(2, 2, 3, 4)
    fixed = FixedTree([(3,), (0,), (0, 0), (0, 0, 1)])
    for own, shares in zip(tokens, probs):
        tree = fixed.of(own, shares, 9)
        tree.check_integrity(50)
        assert tree.tokens.tolist() == [own[0, 3], own[0, 0], own[1, 0], own[2, 1]]
        assert tree.parents.tolist() == [-1, -1, 1, 2]
        np.testing.assert_allclose(tree.probs, [shares[0, 3], shares[0, 0], shares[1, 0], shares[2, 1]])
        part = fixed.of(own, shares, 2)
        assert part.tokens.tolist() == tree.tokens[:2].tolist() and len(fixed.of(own, shares, 0)) == 0


def test_smartspecs_figure_8_has_27_nodes():
    """Heads of 3, 2 and 3 tokens: 18 continuations, and the last token besides."""
    tokens, probs = random_candidates(2, 1, 3, 4)
    tree = full_tree((3, 2, 3)).of(tokens[0], probs[0], 99)
    assert len(tree) == 3 + 6 + 18
    paths = [path for length in (1, 2, 3) for path in product(*[range(width) for width in (3, 2, 3)[:length]])]
    expected = [tuple(tokens[0, level, rank] for level, rank in enumerate(path)) for path in paths]
    assert sorted(tuple(tree.tokens[node] for node in path) for path in every_path(tree)) == sorted(expected)
