"""The goodput auction: what it learns over many steps."""

import numpy as np
import pytest

from hf_smartspec import DraftTree
from hf_smartspec.goodput import (
    CostModel,
    DraftCost,
    FixedLength,
    GoodputAuction,
    NoSpeculation,
    Stage,
    StepOutcome,
    StepRows,
    StepSeconds,
)

from ..covering import exhaustive
from ..sources import random_tree
from .simulation import Drafter, decide, line, simulate
from .simulation import rows_of as rows_of_drafters
from .test_auction import rows_of


def of_cost(cost, num, cap, context):
    """A step of equal rows with one stage."""
    caps = np.full(num, cap)
    return StepRows(range(num), np.full(num, context), caps, stages=[Stage(cost, caps)])


USELESS = [Drafter(0.0, claimed=0.95)] * 4
USELESS_MODEL = [Drafter(0.0, claimed=0.95, cost=DraftCost(3e-3, 3e-4, is_autoregressive=True), length=5)] * 4
USELESS_CALL = [Drafter(0.0, claimed=0.95, cost=DraftCost(per_call=6e-3))] * 4


@pytest.mark.parametrize(
    "drafters", [USELESS_MODEL, USELESS_CALL, USELESS[:1], *exhaustive([USELESS], [USELESS_MODEL[:1]])]
)
def test_never_slower_with_a_drafter_that_is_always_wrong(drafters):
    plain = simulate(NoSpeculation(), drafters, line(), steps=300)
    auction = simulate(GoodputAuction(line()), drafters, line(), steps=900)
    fixed = simulate(FixedLength(4), drafters, line(), steps=300)
    assert auction.drafted > 0, "it has tried"
    assert auction.goodput > 0.98 * plain.goodput
    assert fixed.goodput < 0.95 * plain.goodput or drafters == USELESS[:1], "there was something to lose"


def test_a_source_is_judged_by_accepted_tokens_and_not_by_promised_ones():
    policy = GoodputAuction(line(), calibrates=False)
    drafted = [simulate(policy, USELESS_CALL, line(), steps=100, seed=seed).drafted for seed in range(2)]
    assert drafted[1] < 0.1 * 8 * len(USELESS_CALL) * 100


def test_where_all_rows_are_waited_for_slow_ones_are_expected_to_end_last():
    chain, nothing, policy = DraftTree.chain(np.arange(8), np.full(8, 0.6)), DraftTree.empty(), GoodputAuction(line())
    for _ in range(20):
        rows = rows_of([nothing] * 4, num_remaining=np.full(4, 90))
        policy.select(rows, [nothing] * 4)
        policy.observe(StepOutcome(rows, [nothing] * 4, [nothing] * 4, [3, 3, 0, 3], StepSeconds(0.0, 0.023)))
    kept = [len(tree) for tree in policy.select(rows_of([chain] * 4, num_remaining=np.full(4, 90)), [chain] * 4)]
    assert kept[2] > max(kept[:2])


DEAR_MODEL = DraftCost(8e-3, 1e-3, is_autoregressive=True, source="model")
DEAR_CALL = DraftCost(per_call=6e-3, source="call")


@pytest.fixture(scope="module")
def of_the_good_alone():
    silent = [Drafter(0.9, 0.9)] * 2 + [Drafter(0.0, length=0)] * 2
    return simulate(GoodputAuction(line()), silent, line(), steps=900).goodput


@pytest.mark.parametrize("dear", [DEAR_MODEL, DEAR_CALL])
@pytest.mark.parametrize("is_first", [False, True])
def test_sources_of_one_step_are_judged_by_what_each_of_them_costs(dear, is_first, of_the_good_alone):
    good, useless = [Drafter(0.9, 0.9)] * 2, [Drafter(0.05, 0.9, dear, length=5)] * 2
    drafters = useless + good if is_first else good + useless
    mixed = simulate(policy := GoodputAuction(line()), drafters, line(), steps=900)
    assert mixed.goodput > 0.97 * of_the_good_alone, "the good ones pay no less for their company"
    asked = np.mean([asks(policy, rows_of_drafters(drafters)) for _ in range(20)], axis=0)
    assert (asked[2:] if is_first else asked[:2]).min() == 1 and (asked[:2] if is_first else asked[2:]).max() < 0.3


def asks(policy, rows):
    """Return which rows any stage is asked for."""
    return sum(policy.max_nodes(rows, stage, [DraftTree.empty()] * len(rows)) for stage in rows.stages) > 0


@pytest.mark.parametrize(("gamma", "batch_size"), [(0.7e-3, 1), (0.7e-3, 8), (4e-3, 8)])
@pytest.mark.parametrize("accuracy", [0.3, 0.6, 0.9])
def test_nearly_as_good_as_the_best_fixed_length(accuracy, gamma, batch_size):
    drafters = [Drafter(accuracy, claimed=0.9)] * batch_size

    def goodputs(make_policy):  # of several runs, which vary by when plain steps get their price
        return np.array([simulate(make_policy(), drafters, line(gamma), 600, seed).goodput for seed in range(4)])

    best = max(goodputs(lambda num=num: FixedLength(num)).mean() for num in (0, 1, 2, 3, 4, 6, 8))
    shares = goodputs(lambda: GoodputAuction(line(gamma))) / best
    assert shares.mean() > 0.97 and shares.min() > 0.94


def test_better_than_any_fixed_length_where_requests_differ():
    drafters = [Drafter(0.95, claimed=0.95)] * 4 + [Drafter(0.1, claimed=0.1)] * 4
    fixed = [simulate(FixedLength(num), drafters, line(2e-3), steps=300).goodput for num in (0, 1, 2, 3, 4, 6, 8)]
    assert simulate(GoodputAuction(line(2e-3)), drafters, line(2e-3), steps=300).goodput > 1.1 * max(fixed)


def test_a_draft_model_is_asked_for_as_many_levels_as_pay():
    cost = DraftCost(2e-3, 2e-4, is_autoregressive=True)
    drafted = []
    for accuracy in (0.1, 0.5, 0.9):
        drafters = [Drafter(accuracy, claimed=accuracy, cost=cost, length=8)] * 4
        policy = GoodputAuction(line())
        simulate(policy, drafters, line(), steps=300)
        drafted.append(simulate(policy, drafters, line(), steps=200, seed=1).drafted / 800)
        fixed = [simulate(FixedLength(num), drafters, line(), steps=150).goodput for num in (0, 1, 2, 4, 8)]
        assert simulate(policy, drafters, line(), steps=200, seed=2).goodput > 0.97 * max(fixed)
    assert drafted[0] < 0.3 and drafted[0] < drafted[1] < drafted[2]


def test_the_price_of_a_node_is_what_it_costs_at_the_number_where_that_is_least():
    """Also after a step that several nodes share, and where one size has proved slow, as if more cost less."""
    draft, steps = DraftCost(heeds_prices=True), CostModel(0.0, 0.0, 0.0, knots=(1, 5, 65), curve=(0.01, 0.014, 0.02))
    slow = line(1e-3)
    for _ in range(200):
        slow.observe(100, 1, 2 * line(1e-3).seconds(100, 1))
        slow.observe(100, 9, line(1e-3).seconds(100, 9))
    assert slow.seconds(100, 9) < slow.seconds(100, 1)
    price = 1e-3 / line(1e-3).seconds(100, 1)
    for cost, expected in ((line(1e-3), price), (slow, price), (steps, (0.02 - 0.01) / 64 / 0.01)):
        policy = GoodputAuction(cost)
        rows = of_cost(draft, 1, 63, 100)
        assert policy.price(rows, rows.stages[0]).node == pytest.approx(float(expected), rel=1e-6)
        assert policy.price(rows, Stage(DraftCost(), rows.caps)) is None, "nothing that would go by it"


def test_a_further_level_must_be_worth_verifying_as_well_as_drafting():
    """Also one that is drafted for nothing."""
    policy, per_row = GoodputAuction(line(4e-3)), 1e-3
    free, dear = (DraftCost(0.0, cost, is_autoregressive=True, heeds_prices=True) for cost in (0.0, per_row))
    rows = of_cost(free, 1, 8, 100)
    price, rate = policy.price(rows, rows.stages[0]), policy.records[free].acceptance.rate
    assert price.call == 0 and price.row == pytest.approx(price.node / rate) and price.node > 0.1
    seconds = line(4e-3).seconds(100, 1)
    assert policy.price(rows, Stage(dear, rows.caps)).row == pytest.approx(price.row + per_row / float(seconds) / rate)


def test_levels_are_priced_where_they_stand_on_the_steps_of_a_forwards_cost():
    """From 1 token to 2 forwards become dearer; up to 4 there is nothing more to pay; then a wall of 1 up to 5."""
    cost = CostModel(0.0, 0.0, 0.0, knots=(1, 2, 4, 5, 40), curve=(0.01, 0.014, 0.014, 0.024, 0.025))
    draft = DraftCost(1e-3, 0.0, is_autoregressive=True, heeds_prices=True)
    policy, rows = GoodputAuction(cost), of_cost(draft, 1, 16, 0)
    price, rate = policy.price(rows, rows.stages[0]), policy.records[draft].acceptance.rate
    totals = [sum(price.deeper[depth]) for depth in range(4)]
    assert totals[0] == totals[1] == pytest.approx(0.1 / rate), "the call alone"
    assert totals[2] > 0.5 > totals[3], "the wall, and what comes after it"
    assert totals[2] < (1.0 + 0.1) / rate, "several levels share the wall"
    assert price.beyond(1) == price and sum(price.beyond(3)[:2]) == totals[2]
    assert price.beyond(99)[:2] == price.deeper[-1]
    assert price.beyond(0) == price, "a level after none is the first, never the deepest"


def test_a_draft_model_is_not_given_up_before_its_bad_luck_is_proven():
    draft = DraftCost(2e-3, 0.0, is_autoregressive=True)
    policy, tried = GoodputAuction(line()), []
    for _ in range(31):
        rows = of_cost(draft, 1, 8, 100)
        tried.append(int(policy.max_nodes(rows, rows.stages[0], [DraftTree.empty()])[0]))
        policy.records[draft].timer.observe(1, 1, 2e-3)
        policy.records[draft].acceptance.update([0], np.ones((1, 1), bool), np.zeros((1, 1), bool))
    assert tried[0] > 1 and min(tried[:8]) >= 1 and tried[-1] == 0


def test_rows_of_one_batch_get_different_depths():
    cost = DraftCost(1e-3, 3e-4, is_autoregressive=True)
    drafters = [Drafter(accuracy, claimed=0.8, cost=cost) for accuracy in (0.95, 0.95, 0.05, 0.05)]
    policy = GoodputAuction(line(2e-3))
    simulate(policy, drafters, line(2e-3), steps=400)
    rows = of_cost(cost, 4, 8, 200)
    limits = policy.max_nodes(rows, rows.stages[0], [DraftTree.empty()] * 4)
    assert min(limits[:2]) >= 3 and max(limits[2:]) <= 1


@pytest.mark.parametrize(
    "cost", [DraftCost(1e-4), DraftCost(2e-3, 2e-4, is_autoregressive=True), *exhaustive([DraftCost(4e-3)])]
)
def test_adapts_when_acceptance_changes(cost):
    bad, good = [Drafter(0.02, 0.6, cost)] * 2, [Drafter(0.9, 0.6, cost)] * 2
    policy = GoodputAuction(line())
    simulate(policy, bad, line(), steps=400)
    before = simulate(policy, bad, line(), steps=200, seed=1)
    simulate(policy, good, line(), steps=600, seed=2)
    after = simulate(policy, good, line(), steps=200, seed=3)
    assert before.tokens < 1.05 * 2 * before.steps and after.tokens > 1.8 * 2 * after.steps
    simulate(policy, bad, line(), steps=400, seed=4)
    assert simulate(policy, bad, line(), steps=200, seed=5).goodput > 0.98 * before.goodput


def test_predicts_the_tokens_of_a_step():
    for accuracy, claimed in ((0.5, 0.95), (0.8, 0.4), (0.2, 1.0)):
        policy, drafters = GoodputAuction(line()), [Drafter(accuracy, claimed)] * 8
        simulate(policy, drafters, line(), steps=300)
        totals = simulate(policy, drafters, line(), steps=300, seed=1)
        assert totals.expected == pytest.approx(totals.tokens, rel=0.05)


def test_without_the_tokens_only_verified_chains_teach():
    chain = DraftTree.chain([5, 6, 7], [0.9, 0.9, 0.9])
    policy, rows = GoodputAuction(line()), rows_of([chain])
    for _ in range(60):
        kept = policy.select(rows, [chain])
        policy.observe(StepOutcome(rows, [chain], kept, [1 if len(kept[0]) else 0], StepSeconds(0.0, 0.02)))
    first, second = policy.trust.calibrator.calibrate("", [0.9, 0.9], [1, 2])
    assert first > 0.9 and second < 0.5


def test_short_matches_are_told_from_long_ones():
    """Drafts of one score: those found by one token never come true, those found by eight always do."""
    policy = GoodputAuction(line(gamma=4e-3))
    short, long = (DraftTree.chain([5], [0.6], match_lengths=length) for length in (1, 8))
    for _ in range(300):
        rows = rows_of([short, long])
        kept = decide(policy, rows, [short, long])
        seconds = StepSeconds(0.0, 20e-3 + 4e-3 * (2 + sum(map(len, kept))))
        tokens = [np.array([9]), np.array([5, 9])]
        policy.observe(StepOutcome(rows, [short, long], kept, [0, len(kept[1])], seconds, tokens))
    short_prob, long_prob = policy.trust.calibrator.calibrate("", [0.6, 0.6], [1, 1], [1, 8])
    assert short_prob < 0.1 and long_prob > 0.9
    assert [len(tree) for tree in decide(policy, rows, [short, long])] == [0, 1]


def test_forgets_requests():
    policy = GoodputAuction(line())
    simulate(policy, [Drafter(0.9, cost=DraftCost(1e-4, is_autoregressive=True))] * 3, line(), steps=5)
    for name in range(3):
        policy.forget(name)
    policy.forget("unknown")
    assert policy.records and not any(record.acceptance._requests for record in policy.records.values())


def test_drafts_with_distributions_keep_them():
    chain = DraftTree.chain([1, 2, 3], [0.9, 0.8, 0.01], distributions=np.eye(3))
    kept = GoodputAuction(line(gamma=4e-3), calibrates=False).select(rows_of([chain]), [chain])[0]
    assert 0 < len(kept) < 3 and kept.distributions.tolist() == np.eye(3)[: len(kept)].tolist()


def test_many_rows_with_trees():
    rng = np.random.default_rng(0)
    drafts = [random_tree(rng, 31) for _ in range(32)]
    kept = GoodputAuction(line(gamma=1e-4)).select(rows_of(drafts), drafts)
    assert 0 < sum(map(len, kept)) < 32 * 31
