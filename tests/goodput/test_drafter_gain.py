"""What a second source adds to drafts that are there already, and whether it is asked."""

import numpy as np
import pytest

from hf_smartspec import DraftTree
from hf_smartspec.goodput import DraftCost, GoodputAuction, StepRows, StepSeconds
from hf_smartspec.goodput.cost import DraftTimer
from hf_smartspec.goodput.drafter_gain import DrafterGain, Newcomers

from .simulation import line


def test_gains_are_learnt_by_what_is_promised_and_by_request():
    gain, rng = DrafterGain(), np.random.default_rng(0)
    names = ["suits", "suits not"] * 2
    promises = np.array([0.0, 0.0, 4.0, 4.0])
    for _ in range(400):
        gains = rng.poisson([3.0, 1.0, 0.3, 0.1]).astype(float)
        gain.update(names, promises, gains, np.array([4, 4, 2, 2]))
    gains, levels = gain.expected(["new", "new"], np.array([0.0, 4.0]))
    assert gains == pytest.approx([2.0, 0.2], rel=0.25) and levels == pytest.approx([4, 2], rel=0.1)
    suits, suits_not = gain.expected(["suits", "suits not"], np.zeros(2))[0]
    assert suits > 1.2 * gains[0] > 1.5 * suits_not
    gain.forget("suits")
    assert gain.expected(["suits"], np.zeros(1))[0][0] == gains[0]


def test_before_anything_is_known_less_is_expected_where_more_is_promised():
    gains, levels = DrafterGain().expected(range(5), np.array([0.0, 0.4, 1.2, 3.0, 9.0]))
    assert (np.diff(gains) < 0).all() and gains[0] > 0.5 and (levels > 0).all()


def test_reading_prompts_is_no_drafts_cost_and_is_all_there_is_where_every_draft_is_a_first_one():
    draft, newcomers, timer = DraftCost(is_autoregressive=True), Newcomers(), DraftTimer()
    for step in range(40):
        ids, levels = [step // 8, "not asked"], np.array([3, 0])
        newcomers.time(timer, draft, ids, levels, 0.5 if step % 8 == 0 else 3e-3)
        if step % 8 == 7:
            newcomers.forget(step // 8)
    assert sum(timer.seconds(draft)) == pytest.approx(1e-3, rel=0.1)
    assert not newcomers._known, "who was not asked is not remembered"
    timer = DraftTimer()
    for step in range(20):
        newcomers.time(timer, draft, [step], np.array([3]), 0.3)
    assert sum(timer.seconds(draft)) == pytest.approx(0.1, rel=0.1)


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
        rows.again = [trees[0] if limits[0] else DraftTree.empty(), DraftTree.empty()]
        rows.sources = ["model" if limits[0] else "lookup", "lookup"]
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


def test_rows_without_a_second_source_are_not_asked_for_one():
    policy, rows = GoodputAuction(line()), hybrid_rows(3)
    rows.has_drafter = np.array([True, False, True])
    policy.max_nodes(rows)
    assert (policy.drafter_nodes(rows, [DraftTree.empty()] * 3) > 0).tolist() == [True, False, True]
    rows.has_drafter[:] = False
    policy.max_nodes(rows)
    assert not policy.drafter_nodes(rows, [DraftTree.empty()] * 3).any()


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
        rows.again = [DraftTree.empty()]
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
        tree = STRONG.most_likely(int(asked[0]))
        rows.again = [tree]
        kept = policy.select(rows, [tree])
        forward = float(line().seconds(*rows.forward_size(len(kept[0]))))
        policy.observe(rows, [tree], kept, [len(kept[0])], StepSeconds(5e-3, forward, 0.0, 1e-3), [STRONG.tokens])
    limits = [policy.max_nodes(hybrid_rows(1)).any() for _ in range(20)]
    assert sum(limits) <= 2, "its silence costs 5 ms"
