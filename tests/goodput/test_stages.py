"""What a source adds to drafts that are there already, and whether it is asked."""

import numpy as np
import pytest

from hf_smartspec import DraftTree
from hf_smartspec.goodput import DraftCost, GoodputAuction, Stage, StepOutcome, StepRows, StepSeconds
from hf_smartspec.goodput.stage_record import Novelty

from .simulation import line, model_cost

LOOKUP = DraftCost(source="lookup")
STRONG, WEAK = DraftTree.chain(np.arange(8), np.full(8, 0.97)), DraftTree.chain([1], [0.1])


def test_the_share_that_is_new_is_learnt_by_what_was_promised():
    novelty, rng = Novelty(), np.random.default_rng(0)
    promises = np.array([0.2, 4.0])
    for _ in range(400):
        reached = rng.poisson(3.0, 2)
        novelty.update(promises, np.array([0, 9]), reached)
    share = novelty.share(promises)
    assert share[0] > 0.95 and share[1] < 0.05
    assert novelty.share(np.zeros(1)) == pytest.approx(1.0), "where there is nothing, all is new"


def test_before_anything_is_known_less_is_expected_where_more_is_promised():
    shares = Novelty().share(np.array([0.0, 0.04, 0.4, 1.2, 3.0, 9.0]))
    assert shares[0] == 1 and (np.diff(shares[1:]) < 0).all() and (shares <= 1).all() and (shares > 0).all()


def staged_rows(num, cost=None, serves=None):
    """A step whose rows are served by a source for nothing and, behind it, by one that costs."""
    caps = np.full(num, 8)
    later = caps if serves is None else np.where(serves, caps, 0)
    stages = [Stage(LOOKUP, caps), Stage(cost or model_cost(), later, position=1)]
    return StepRows(list(range(num)), np.full(num, 50), caps, stages=stages)


def draft_first(policy, rows, trees):
    """The trees of the first stage, as the policy reads them."""
    first = rows.stages[0]
    first.asked = np.asarray(policy.max_nodes(rows, first, [DraftTree.empty()] * len(rows)))
    first.proposed = [tree if num else DraftTree.empty() for tree, num in zip(trees, first.asked)]
    return policy.calibrated(rows, first, first.proposed)


def ask_second(policy, rows, trees):
    """Whom the second stage is asked for, when the first one has drafted these trees."""
    trees = draft_first(policy, rows, trees)
    rows.stages[1].asked = np.asarray(policy.max_nodes(rows, rows.stages[1], trees))
    return trees, rows.stages[1].asked


def test_a_later_stage_is_asked_where_the_trees_promise_less_than_it_costs():
    policy = GoodputAuction(line(), calibrates=False)
    _, asked = ask_second(policy, staged_rows(3), [STRONG, WEAK, DraftTree.empty()])
    assert asked[0] == 0 and asked[1] > 0 and asked[2] > 0
    _, asked = ask_second(policy, staged_rows(3, model_cost(10.0)), [STRONG, WEAK, DraftTree.empty()])
    assert not asked.any()
    full = staged_rows(3)
    full.stages[1].caps = np.zeros(3, np.int64)
    assert not ask_second(policy, full, [STRONG, WEAK, DraftTree.empty()])[1].any()


def test_a_later_stage_that_is_always_wrong_is_soon_asked_no_more_and_the_first_one_is_not_blamed():
    policy, asked = GoodputAuction(line()), []
    wrong = DraftTree.chain([90, 91], [0.9, 0.9])
    for _ in range(300):
        rows = staged_rows(2)
        trees, limits = ask_second(policy, rows, [WEAK, STRONG])
        assert not limits[1], "its draft is good"
        later = rows.stages[1]
        if limits[0]:
            later.proposed = [wrong.most_likely(int(limits[0])), DraftTree.empty()]
            later.seconds = 1e-3 * later.levels.max()
            trees[0] = policy.calibrated(rows, later, later.proposed)[0]
        kept = policy.select(rows, trees)
        accepted = [0, len(kept[1])]
        tokens = [np.array([99]), np.append(STRONG.tokens, 99)[: accepted[1] + 1]]
        forward = float(line().seconds(*rows.forward_size(sum(map(len, kept)))))
        policy.observe(StepOutcome(rows, trees, kept, accepted, StepSeconds(later.seconds, forward), tokens))
        asked.append(int(limits[0]))
    assert asked[0] > 0
    assert np.count_nonzero(asked[-100:]) < 25, "probes of 1 ms, in 1 % of 21 ms a step"
    for _ in range(2):  # the first step of a single row is without drafts, so that its cost gets known
        rows = staged_rows(1)
        kept = policy.select(rows, draft_first(policy, rows, [STRONG]))
    assert len(kept[0]) > 4


def test_rows_without_a_later_stage_are_not_asked_for_one():
    policy, nothing = GoodputAuction(line()), [DraftTree.empty()] * 3
    assert (ask_second(policy, staged_rows(3, serves=[True, False, True]), nothing)[1] > 0).tolist() == [
        True, False, True,
    ]  # fmt: skip
    assert not ask_second(policy, staged_rows(3, serves=[False] * 3), nothing)[1].any()


def test_a_later_stage_without_an_idea_is_soon_asked_no_more_and_what_is_asked_keeps_within_one_percent():
    policy, seconds, nothing = GoodputAuction(line()), [], [DraftTree.empty()]
    dear = model_cost(5e-3)
    for _ in range(600):
        rows = staged_rows(1, dear)
        trees, asked = ask_second(policy, rows, nothing)
        rows.stages[1].seconds = 5e-3 * bool(asked[0])
        policy.calibrated(rows, rows.stages[1], nothing)
        kept = policy.select(rows, trees)
        seconds.append(rows.stages[1].seconds)
        policy.observe(StepOutcome(rows, kept, kept, [0], StepSeconds(seconds[-1], 0.021), [np.array([1])]))
    assert seconds[0] > 0 and sum(seconds[-500:]) < 0.012 * 500 * 0.021


def test_the_first_stage_is_not_credited_with_what_later_ones_draft():
    policy = GoodputAuction(line())
    for _ in range(50):
        rows = staged_rows(1)
        trees, asked = ask_second(policy, rows, [DraftTree.empty()])
        first, later = rows.stages
        first.seconds, later.seconds = 5e-3 * bool(first.asked[0]), 1e-3
        later.proposed = [STRONG.most_likely(int(asked[0]))]
        trees = policy.calibrated(rows, later, later.proposed)
        kept = policy.select(rows, trees)
        forward = float(line().seconds(*rows.forward_size(len(kept[0]))))
        drafting = first.seconds + later.seconds
        step = StepSeconds(drafting, forward)
        policy.observe(StepOutcome(rows, trees, kept, [len(kept[0])], step, [STRONG.tokens]))
    asked = [bool(np.any(policy.max_nodes(rows, rows.stages[0], [DraftTree.empty()])))
             for rows in (staged_rows(1) for _ in range(20))]  # fmt: skip
    assert sum(asked) <= 2, "its silence costs 5 ms"


def test_any_number_of_stages_stand_in_one_line():
    """Three sources that cost ever more: the third is asked only where the first two leave something to gain."""
    policy, caps = GoodputAuction(line(), calibrates=False), np.full(2, 8)
    stages = [Stage(LOOKUP, caps), *(Stage(model_cost(cost), caps, place) for place, cost in ((1, 1e-4), (2, 1e-3)))]
    rows = StepRows([0, 1], np.full(2, 50), caps, stages=stages)
    trees = draft_first(policy, rows, [STRONG, WEAK])
    for stage, asked in ((stages[1], [False, True]), (stages[2], [False, False])):
        stage.asked = np.asarray(policy.max_nodes(rows, stage, trees))
        assert (stage.asked > 0).tolist() == asked
        stage.proposed = [DraftTree.empty(), STRONG]
        trees = [trees[0], policy.calibrated(rows, stage, stage.proposed)[1]]


def test_what_drafts_gain_with_one_row_says_nothing_about_a_large_batch():
    policy, source = GoodputAuction(line()), DraftCost(per_call=1e-3, source="call")

    def asked(num, is_right):
        rows = StepRows(list(range(num)), np.full(num, 50), np.full(num, 8), stages=[Stage(source, np.full(num, 8))])
        rows.stages[0].asked = levels = policy.max_nodes(rows, rows.stages[0], [DraftTree.empty()] * num)
        drafts = [STRONG if level else DraftTree.empty() for level in levels]
        rows.stages[0].proposed, rows.stages[0].seconds = drafts, 1e-3 * levels.any()
        kept = policy.select(rows, policy.calibrated(rows, rows.stages[0], drafts))
        accepted = [is_right * len(tree) for tree in kept]
        seconds = policy.cost.seconds(*rows.forward_size(sum(map(len, kept)), 1 + max(map(len, kept))))
        truth = [np.arange(9)[: 1 + length] if is_right else np.array([99]) for length in accepted]
        policy.observe(StepOutcome(rows, drafts, kept, accepted, StepSeconds(0.0, float(seconds)), truth))
        return levels.any()

    assert sum(asked(1, True) for _ in range(100)) > 90 and policy.speedup > 3
    assert sum(asked(16, False) for _ in range(40)) <= 20, "a few trials, and probes"
    assert policy.speedup < 1.1
    assert asked(1, True) and policy.speedup > 3, "and the other way round"


def test_probabilities_that_are_no_numbers_say_nothing_for_ever():
    """One bad draft of a source does not end what is known of it, or of those beside it."""
    policy = GoodputAuction(line(), calibrates=False)
    broken = DraftTree.chain([1, 2], [np.nan, 0.5])
    for tree in (broken, *[STRONG] * 3):
        rows = staged_rows(2)
        trees, _ = ask_second(policy, rows, [tree, WEAK])
        rows.stages[1].proposed = [DraftTree.empty()] * 2
        kept = policy.select(rows, trees)
        truth = [np.arange(9)] * 2
        policy.observe(StepOutcome(rows, trees, kept, [0, 0], StepSeconds(0.0, 0.02, 0.0), truth))
    profits = [profit for record in policy.records.values() for profit in record.profits.values()]
    assert profits and all(np.isfinite(profit.mean) for profit in profits)
    assert len(kept[0]) > 2
