"""Compiled counts of levels, compared with those of numpy."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_smartspec.goodput.kernels.level_counts import count_continuations, count_levels

NUM_DEPTHS, HALF_LIFE, OWN_HALF_LIFE = 8, 300.0, 30.0


@given(st.integers(0, 2**32 - 1), st.integers(1, 9), st.integers(1, 12), st.sampled_from([1, 3]))
def test_levels_are_counted_after_earlier_ones_have_decayed(seed, num_rows, num_depths, most):
    rng = np.random.default_rng(seed)
    tried = rng.integers(0, most + 1, (num_rows, num_depths))
    succeeded = rng.integers(0, tried + 1)
    if most == 1:
        tried, succeeded = tried > 0, succeeded > 0
    lines = rng.permutation(num_rows + 3)[:num_rows]
    own_tried, own_succeeded = rng.random((num_rows + 3, NUM_DEPTHS)), rng.random(num_rows + 3)
    tries, hits = rng.random((2, num_depths + 1))

    numbers = tried.sum(axis=1)
    decay = np.ones(len(own_succeeded))
    decay[lines] = 0.5 ** (numbers / OWN_HALF_LIFE)
    expected_tried, expected_succeeded = own_tried * decay[:, None], own_succeeded * decay
    for row, line in enumerate(lines):
        expected_succeeded[line] += succeeded[row].sum()
        for depth in range(num_depths):
            expected_tried[line, min(depth, NUM_DEPTHS - 1)] += tried[row, depth]
    decay_of_all = 0.5 ** (numbers.sum() / HALF_LIFE)
    expected_tries = tries * decay_of_all + np.append(tried.sum(axis=0), 0)
    expected_hits = hits * decay_of_all + np.append(succeeded.sum(axis=0), 0)

    count_levels(tried, succeeded, lines, OWN_HALF_LIFE, own_tried, own_succeeded, HALF_LIFE, tries, hits)
    assert own_tried == pytest.approx(expected_tried) and own_succeeded == pytest.approx(expected_succeeded)
    assert tries == pytest.approx(expected_tries) and hits == pytest.approx(expected_hits)


@given(st.integers(0, 2**32 - 1), st.integers(1, 40))
def test_nodes_with_children_go_on(seed, num_nodes):
    """Count those without any, too, where the draft might have grown: there it is known that it did not go on."""
    rng = np.random.default_rng(seed)
    row = np.sort(rng.integers(0, 3, num_nodes))
    parents, depths = np.full(num_nodes, num_nodes), np.ones(num_nodes, np.int64)
    for node in range(1, num_nodes):
        parent = rng.integers(node)
        if row[parent] == row[node] and rng.random() < 0.9:
            parents[node], depths[node] = parent, depths[parent] + 1
    right, may_grow = np.flatnonzero(rng.random(num_nodes) < 0.5), rng.random(3) < 0.5

    goes_on = np.isin(right, parents)
    places = np.minimum(depths[right], NUM_DEPTHS) - 1
    known, continued = np.zeros((2, NUM_DEPTHS), np.int64)
    count_continuations(right, row, parents, depths, may_grow, known, continued)
    is_known = goes_on | may_grow[row[right]]
    assert known.tolist() == np.bincount(places[is_known], minlength=NUM_DEPTHS).tolist()
    assert continued.tolist() == np.bincount(places[goes_on], minlength=NUM_DEPTHS).tolist()
