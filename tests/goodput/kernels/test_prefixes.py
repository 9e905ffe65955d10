"""The compiled scan of the auction against all prefixes under all bounds, written plainly."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_smartspec.goodput import CostModel
from hf_smartspec.goodput.kernels.prefixes import best_prefix

_WIDTHS = np.array([1, 2, 3, 4, 6, 8, 16])
_NUM_ROWS, _CONTEXT, _PROMPTS = 3, 400, 0.002


@st.composite
def costs(draw):
    """A line or a curve, a host's least time, and sizes that have differed from the profile."""
    knots = {"knots": (1, 4, 5, 40), "curve": (0.01, 0.01, 0.014, 0.03)} if draw(st.booleans()) else {}
    line = {} if knots else {"gamma": draw(st.floats(0, 0.005)), "delta": 0.01}
    beta = draw(st.sampled_from([0.0, 1e-6, 1e-5]))
    cost = CostModel(
        1e-6, **({"gamma": 0.0, "delta": 0.0} | line), beta=beta, host=draw(st.sampled_from([0, 0.015])), **knots
    )
    for batched in draw(st.lists(st.integers(1, 60), max_size=4)):
        cost.observe(_CONTEXT, batched, draw(st.floats(0.005, 0.05)))
    return cost


def seconds_of(cost, num, width):
    return float(cost.seconds(_CONTEXT, _NUM_ROWS + num, 1 + min(num, width))) - _PROMPTS


def every_prefix(order, row, gains, cost):
    """Nodes, tokens and seconds of each prefix under each bound."""
    most = max(np.bincount(row[order], minlength=1), default=0)
    for width in [*[int(width) for width in _WIDTHS if width < most], int(most)]:
        chosen, tokens = [], float(_NUM_ROWS)
        for node in order.tolist():
            if sum(row[other] == row[node] for other in chosen) < width:
                chosen, tokens = [*chosen, node], tokens + gains[node]
                yield chosen, tokens, seconds_of(cost, len(chosen), width)


@given(costs(), st.lists(st.tuples(st.integers(0, 2), st.floats(0.01, 1)), max_size=24), st.floats(0, 300), st.data())
def test_no_prefix_under_any_bound_pays_better(cost, nodes, price, data):
    row, gains = np.array([row for row, _ in nodes], np.int64), np.array([gain for _, gain in nodes])
    order = np.argsort(-gains, kind="stable")
    least = data.draw(st.floats(-10, 10))
    seconds, factors = cost.by_tokens(_NUM_ROWS, len(order) + 1)
    numbers = [_NUM_ROWS, least, price, cost.alpha * _CONTEXT, cost.beta * _CONTEXT, cost.host, _PROMPTS]
    mask = np.zeros(len(nodes), bool)
    num, tokens, spent = best_prefix(
        order, row, gains, _WIDTHS, len(_WIDTHS), np.array(numbers), seconds, factors, np.empty(3, np.int64), mask
    )
    best = max((tokens - price * spent for _, tokens, spent in every_prefix(order, row, gains, cost)), default=-np.inf)
    assert num == mask.sum()
    if best > least + 1e-9:
        assert tokens - price * spent == pytest.approx(best, rel=1e-9, abs=1e-9)
        assert tokens == pytest.approx(_NUM_ROWS + gains[mask].sum())
        matches = [
            chosen
            for chosen, _, seconds in every_prefix(order, row, gains, cost)
            if set(chosen) == set(np.flatnonzero(mask))
        ]
        assert matches, "what is marked is a prefix"
    elif best < least - 1e-9:
        assert not num


@given(costs(), st.integers(1, 50), st.integers(1, 80))
def test_consecutive_sizes_cost_what_each_costs_by_itself(cost, first, num):
    seconds, factors = cost.by_tokens(first, num)
    expected = [float(cost.seconds(_CONTEXT, batched, 2)) for batched in range(first, first + num)]
    fixed = (cost.alpha + 2 * cost.beta) * _CONTEXT
    assert np.maximum(seconds + fixed, cost.host) * factors == pytest.approx(expected, rel=1e-12)
