"""Draft depths against drafts that are there already."""

from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_smartspec import DraftTree
from hf_smartspec.goodput import DraftCost, GoodputAuction, StepRows, StepSeconds
from hf_smartspec.goodput.levels import levels_against_rivals

from .simulation import line

RATES = st.lists(st.lists(st.floats(0, 1), min_size=3, max_size=3), min_size=1, max_size=3)


def left(gains, rivals, level_cost, call_cost, levels):
    values = [0.0 if not num else gain[:num].sum() - num * level_cost - rival
              for gain, rival, num in zip(gains, rivals, levels)]  # fmt: skip
    return sum(values) - call_cost * max(levels)


@given(RATES, st.floats(0, 0.5), st.floats(0, 0.5), st.data())
def test_no_other_depths_leave_more(rates, level_cost, call_cost, data):
    gains = np.cumprod(rates, axis=1)
    rivals = np.array(data.draw(st.lists(st.floats(0, 2), min_size=len(rates), max_size=len(rates))))
    levels = levels_against_rivals(gains, rivals, level_cost, call_cost)
    best = max(left(gains, rivals, level_cost, call_cost, other) for other in product(range(4), repeat=len(rates)))
    assert left(gains, rivals, level_cost, call_cost, levels) == pytest.approx(best, abs=1e-9)


def test_less_than_the_margin_is_nothing_and_no_depths_are_none():
    gains = np.array([[0.5]])
    assert levels_against_rivals(gains, np.zeros(1), 0.0, 0.3).tolist() == [1]
    assert levels_against_rivals(gains, np.zeros(1), 0.0, 0.3, least=0.2).tolist() == [0]
    assert levels_against_rivals(np.zeros((2, 0)), np.zeros(2), 0.0, 0.0).tolist() == [0, 0]


# --- The auction with a second source ---------------------------------------------------------------------------------


def hybrid_rows(num, per_call=1e-3):
    drafter = DraftCost(per_call=per_call, is_autoregressive=True, source="model")
    lens, caps = np.full(num, 50), np.full(num, 8)
    return StepRows(list(range(num)), lens, caps, draft=DraftCost(source="lookup"), drafter=drafter)


STRONG, WEAK = DraftTree.chain(np.arange(8), np.full(8, 0.97)), DraftTree.chain([1], [0.1])


def test_the_drafter_is_asked_where_the_first_drafts_promise_less_than_it_costs():
    policy, rows = GoodputAuction(line(), calibrates=False), hybrid_rows(3)
    policy.max_nodes(rows)
    limits = policy.drafter_nodes(rows, [STRONG, WEAK, DraftTree.empty()])
    assert limits[0] == 0 and limits[1] > 0 and limits[2] > 0
    dear, full = hybrid_rows(3, per_call=10.0), hybrid_rows(3)
    full.caps[:] = 0
    for unpayable in (dear, full):
        policy.max_nodes(unpayable)
        assert not policy.drafter_nodes(unpayable, [STRONG, WEAK, DraftTree.empty()]).any()


def test_a_drafter_that_is_always_wrong_is_soon_asked_no_more_and_the_first_source_is_not_blamed():
    policy, asked = GoodputAuction(line()), []
    wrong = DraftTree.chain([90, 91], [0.9, 0.9])
    for _ in range(300):
        rows = hybrid_rows(2)
        policy.max_nodes(rows)
        limits = policy.drafter_nodes(rows, [WEAK, STRONG])
        trees = [wrong.most_likely(int(limits[0])) if limits[0] else WEAK, STRONG]
        rows.is_redrafted, rows.sources = limits > 0, ["model" if limits[0] else "lookup", "lookup"]
        assert not limits[1], "its draft is good"
        kept = policy.select(rows, trees)
        accepted = [0, len(kept[1])]
        drafter = 1e-3 * int(limits[0])
        tokens = [np.array([99]), np.append(STRONG.tokens, 99)[: accepted[1] + 1]]
        forward = float(line().seconds(*rows.forward_size(sum(map(len, kept)))))
        policy.observe(rows, trees, kept, accepted, StepSeconds(1e-5, forward, 0.0, drafter), tokens)
        asked.append(int(limits[0]))
    assert asked[0] > 0
    assert np.count_nonzero(asked[-100:]) < 25, "probes of 1 ms, in 1 % of 21 ms a step"
    rows = hybrid_rows(1)
    policy.max_nodes(rows)
    assert len(policy.select(rows, [STRONG])[0]) > 4


def test_by_source_splits_nodes_by_the_source_of_their_row():
    rows = hybrid_rows(3)
    rows.sources = ["lookup", "model", "lookup"]
    parts = dict(rows.by_source(np.array([0, 0, 1, 2])))
    assert {name: part.tolist() for name, part in parts.items()} == {
        "lookup": [True, True, False, True], "model": [False, False, True, False],
    }  # fmt: skip


def test_the_drafter_is_asked_for_no_more_than_it_drafts():
    rows = hybrid_rows(1)
    rows.drafter = DraftCost(per_call=1e-4, is_autoregressive=True, source="model", num_nodes=3)
    policy = GoodputAuction(line())
    policy.max_nodes(rows)
    assert policy.drafter_nodes(rows, [DraftTree.empty()]).tolist() == [3]


def test_a_drafter_without_an_idea_is_soon_asked_no_more_and_what_is_asked_keeps_within_one_percent():
    policy, seconds = GoodputAuction(line()), []
    for _ in range(600):
        rows = hybrid_rows(1)
        policy.max_nodes(rows)
        is_asked = bool(policy.drafter_nodes(rows, [DraftTree.empty()])[0])
        rows.is_redrafted = np.zeros(1, bool)
        kept = policy.select(rows, [DraftTree.empty()])
        seconds.append(5e-3 * is_asked)
        policy.observe(rows, kept, kept, [0], StepSeconds(0.0, 0.021, 0.0, seconds[-1]), [np.array([1])])
    assert seconds[0] > 0 and sum(seconds[-500:]) < 0.012 * 500 * 0.021


def test_the_first_source_is_not_credited_with_the_drafters_tokens():
    policy = GoodputAuction(line())
    for _ in range(50):
        rows = hybrid_rows(1)
        rows.draft = DraftCost(source="lookup")
        policy.max_nodes(rows)
        asked = policy.drafter_nodes(rows, [DraftTree.empty()])
        rows.is_redrafted = asked > 0
        tree = STRONG.most_likely(int(asked[0]))
        kept = policy.select(rows, [tree])
        forward = float(line().seconds(*rows.forward_size(len(kept[0]))))
        policy.observe(rows, [tree], kept, [len(kept[0])], StepSeconds(5e-3, forward, 0.0, 1e-3), [STRONG.tokens])
    limits = [policy.max_nodes(hybrid_rows(1)).any() for _ in range(20)]
    assert sum(limits) <= 2, "its silence costs 5 ms"
