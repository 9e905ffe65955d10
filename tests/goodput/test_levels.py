"""How many levels a source is asked for that drafts by level, and what is learnt from them."""

from dataclasses import replace

import numpy as np
import pytest

from hf_smartspec import DraftTree
from hf_smartspec.drafts.forest import Forest
from hf_smartspec.goodput import DraftCost, GoodputAuction, Stage, StepOutcome, StepRows, StepSeconds
from hf_smartspec.goodput.draft_cost import DraftTimer
from hf_smartspec.goodput.levels import LevelAuction
from hf_smartspec.goodput.stage_record import Newcomers, StageRecord

from .simulation import line, model_cost


@pytest.fixture
def weighings(monkeypatch):
    """A list that grows by an item with every auction over levels."""
    calls, best = [], LevelAuction.best
    monkeypatch.setattr(LevelAuction, "best", lambda *args, **named: calls.append(1) or best(*args, **named))
    return calls


def alone(cost, names=(0, 1)):
    """A step of one source that is asked by level."""
    caps = np.full(len(names), 8)
    return StepRows(list(names), np.full(len(names), 50), caps, stages=[Stage(cost, caps)])


def step_of_nothing(policy, rows, seconds=0.02):
    """A step whose source has no idea; return for how many nodes it was asked."""
    stage, nothing = rows.stages[0], [DraftTree.empty()] * len(rows)
    stage.asked = np.asarray(policy.max_nodes(rows, stage, nothing))
    if stage.asked.any():
        stage.seconds = stage.cost.per_call
        policy.calibrated(rows, stage, nothing)
    kept = policy.select(rows, nothing)
    tokens = [np.array([1])] * len(rows)
    policy.observe(StepOutcome(rows, kept, kept, [0] * len(rows), StepSeconds(stage.seconds, seconds), tokens))
    return stage.asked


def settled(cost):
    """A policy that knows how often the source's levels are accepted."""
    policy = GoodputAuction(line())
    for _ in range(30):
        policy.records[cost].acceptance.update([0, 1], np.ones((2, 4), bool), np.ones((2, 4), bool))
    return policy


@pytest.mark.parametrize(("per_call", "known", "num"), [(1e-9, False, 21), (1e-9, True, 6), (1.0, False, 2)])
def test_levels_that_are_known_to_pay_are_weighed_in_every_fourth_step_and_others_in_every_16th(
    per_call, known, num, weighings
):
    cost = model_cost(per_call)
    policy = settled(cost) if known else GoodputAuction(line())
    for _ in range(20):
        rows = alone(cost)
        asked = policy.max_nodes(rows, rows.stages[0], [DraftTree.empty()] * 2)
        assert asked.any() == (per_call < 1)
    assert len(weighings) == num


def test_levels_that_pay_keep_their_price_until_they_are_weighed_again():
    cost, prices = replace(model_cost(1e-9), heeds_prices=True), []
    policy = settled(cost)
    for names in (*[(0, 1)] * 5, (0, 2)):
        rows = alone(cost, names)
        assert policy.max_nodes(rows, rows.stages[0], [DraftTree.empty()] * 2).all()
        prices.append(policy.price(rows, rows.stages[0]))
    assert [price is prices[0] for price in prices] == [True] * 4 + [False] * 2 and prices[5] is not prices[4]


ENDS = replace(model_cost(), heeds_prices=True)


def learn(record, cost, trees, tokens, limit):
    """Learn from two rows' drafts, which might have had `limit` nodes."""
    stage, forest = alone(cost).stages[0], Forest(trees)
    stage.asked = np.full(2, limit)
    record.learn_levels([0, 1], stage, forest, *forest.outcomes([np.arange(1, 1 + tokens)] * 2))


@pytest.mark.parametrize(("cost", "least", "most"), [(ENDS, 0.0, 0.15), (model_cost(), 0.8, 1.0)])
def test_levels_to_which_drafts_that_end_by_themselves_do_not_go_on_gain_little(cost, least, most):
    """Those that go on are the ones whose first level was likely."""
    record, short, long = StageRecord(), DraftTree.chain([1]), DraftTree.chain([1, 2])
    for trees in [[short, short]] * 30 + [[short, long]] + [[short, short]] * 30:
        learn(record, cost, trees, tokens=3, limit=8)
    gains = record.gains([0, 1], np.zeros(2), 3)
    assert (gains[:, 0] > 0.9).all() and (least <= gains[:, 1]).all() and (gains[:, 1] <= most).all()
    in_doubt, of_more = record.gains([0, 1], np.zeros(2), 3, in_doubt=True), record.gains(range(2, 6), np.zeros(4), 3)
    assert (in_doubt[:, 1] >= gains[:, 1]).all() and (of_more[:, 1] <= 1.5 * max(most, 0.2)).all(), (
        "of other batches, too"
    )
    record.renew(1)
    assert (record.gains([0, 1], np.zeros(2), 3)[:, 1] > 0.5).all(), "other weights have another confidence"


@pytest.mark.parametrize("length, limit", [(3, 3), (5, 8), (20, 24)])
@pytest.mark.parametrize("num_verified", [0, 1, 30])
def test_drafts_that_are_cut_or_full_or_hardly_verified_have_not_ended_by_themselves(length, limit, num_verified):
    record, chain = StageRecord(), DraftTree.chain(range(1, length + 1))
    for _ in range(40):
        learn(record, ENDS, [chain, chain], 1 + min(num_verified, length), limit)
    shares = record._continuations.rates(2, min(length, limit) - 1)
    assert (shares[:7] == 1.0).all() and (shares > 0.85).all()


def test_steps_with_drafts_by_level_have_an_overhead_of_which_pauses_are_no_part():
    cost, record = model_cost(0.01), StageRecord()
    for seconds in (1e9, *[0.002] * 60):
        rows = alone(cost)
        rows.stages[0].asked, rows.stages[0].seconds, rows.stages[0].overhead = np.ones(2, int), 0.01, seconds
        record.learn_time(rows.stages[0], rows)
        assert record.overhead(2) <= 0.002
    assert record.overhead(2) == pytest.approx(0.002, rel=0.05)
    assert record.seconds(cost, np.array([1, 1])) == pytest.approx(0.012, rel=0.05)
    assert record.seconds(cost, np.array([0, 0])) == 0
    assert record.overhead(1) == record.overhead(2), "as long as nothing is known of other batches"
    rows = alone(cost, (0,))
    rows.stages[0].asked, rows.stages[0].seconds, rows.stages[0].overhead = np.ones(1, int), 0.01, 0.001
    record.learn_time(rows.stages[0], rows)
    assert record.overhead(1) < record.overhead(2) and record.overhead(64) == record.overhead(1)


def test_levels_that_do_not_make_up_for_the_overhead_are_not_drafted(monkeypatch):
    policy, rows = GoodputAuction(line()), alone(model_cost(1e-9))
    assert policy.max_nodes(rows, rows.stages[0], [DraftTree.empty()] * 2).all()
    monkeypatch.setattr(StageRecord, "overhead", lambda *_: 1.0)
    rows = alone(model_cost(1e-9))
    assert not policy.max_nodes(rows, rows.stages[0], [DraftTree.empty()] * 2).any()


def test_levels_that_did_not_pay_are_weighed_again_for_other_rows_and_after_a_draft(weighings):
    policy, cost = GoodputAuction(line()), model_cost(0.5)
    for names, num in (((0, 1), 1), ((0, 1), 1), ((0, 2), 2), ((0, 2), 2), ((0,), 3)):
        assert not step_of_nothing(policy, alone(cost, names)).any()
        assert len(weighings) == num
    policy.records[cost].trial_time.seconds = 1.0
    assert step_of_nothing(policy, alone(cost, (0,))).any() and len(weighings) == 3, "a trial"
    step_of_nothing(policy, alone(cost, (0,)))
    assert len(weighings) == 4, "it has shown something"


def test_a_trial_reads_at_most_one_prompt_and_later_trials_wait_until_that_is_paid_for():
    policy, cost, names = GoodputAuction(line()), model_cost(0.5), tuple(range(16))
    policy.records[cost].trial_time.seconds = 2.0
    assert np.flatnonzero(step_of_nothing(policy, alone(cost, names))).tolist() == [0]
    assert policy.records[cost].trial_time.seconds < 0.01, "it took as long as expected"
    policy.records[cost].trial_time.seconds = 2.0
    assert np.flatnonzero(step_of_nothing(policy, alone(cost, names))).tolist() == [0], "the row that was read"
    policy.records[cost].trial_time.seconds = 2.0
    assert np.flatnonzero(step_of_nothing(policy, alone(cost, names))).tolist() == [1], "every other time, a new one"
    policy.records[cost].trial_time.seconds = 2.0
    assert np.flatnonzero(step_of_nothing(policy, alone(cost, names))).tolist() == [0, 1]
    # A level takes half a second. Further trials that fail are paid for more than once.
    for seconds, debt in ((0.7, 2 * 0.2), (99.0, 50 * 0.02)):
        names = [name + 16 for name in names]  # of others, whose prompts have to be read
        policy.records[cost].trial_time.seconds, rows = 2.0, alone(cost, names)
        rows.stages[0].asked = np.asarray(policy.max_nodes(rows, rows.stages[0], [DraftTree.empty()] * 16))
        rows.stages[0].seconds = seconds
        kept = policy.select(rows, [DraftTree.empty()] * 16)
        policy.observe(StepOutcome(rows, kept, kept, [0] * 16, StepSeconds(seconds, 0.02), [np.array([1])] * 16))
        assert policy.records[cost].trial_time.seconds == pytest.approx(-debt, abs=0.1)
    assert not any(step_of_nothing(policy, alone(cost, names)).any() for _ in range(500)), "500 x 1 % of 25 ms"


def test_levels_are_weighed_anew_when_a_row_has_ended_its_prefill():
    policy, cost = GoodputAuction(line()), model_cost(0.5)
    policy.records[cost].trial_time.seconds = -1.0  # no trials
    weighed = []
    auction = policy._level_auction
    auction.best = lambda plan, stage, caps, *rest, **options: weighed.append(caps) or np.zeros(2, np.int64)
    for caps in ([8, 0], [8, 8], [8, 8]):
        rows = StepRows([0, 1], np.full(2, 50), np.full(2, 8), stages=[Stage(cost, np.array(caps))])
        policy.max_nodes(rows, rows.stages[0], [DraftTree.empty()] * 2)
    assert [caps.tolist() for caps in weighed] == [[8, 0], [8, 8]], "and not a second time"


def test_a_step_without_drafts_costs_two_estimates_and_no_forest(monkeypatch):
    """One of its own time, and one to learn from: nothing that only drafts need is computed."""
    policy, calls, source = GoodputAuction(line()), [], DraftCost(per_call=10.0, source="call")
    policy.records[source].profits[4].num = 100  # has been judged
    step_of_nothing(policy, alone(source, range(8)))  # builds what is kept
    estimate = type(policy.cost).seconds
    monkeypatch.setattr(type(policy.cost), "seconds", lambda *arguments: calls.append(1) or estimate(*arguments))
    monkeypatch.setattr("hf_smartspec.goodput.auction.Forest", None)
    monkeypatch.setattr("hf_smartspec.goodput.plan.Forest", None)
    for _ in range(10):
        assert not step_of_nothing(policy, alone(source, range(8))).any()
    assert len(calls) == 20


@pytest.mark.parametrize("paid_before", [False, True])
def test_levels_pay_or_are_in_doubt_whichever_is_looked_at_first(paid_before):
    policy, caps, found = GoodputAuction(line()), np.full(2, 8), set()
    for per_call in np.geomspace(1e-5, 1e-1, 60):
        cost = model_cost(float(per_call))
        rows = StepRows([0, 1], np.full(2, 50), caps, stages=[Stage(cost, caps)])
        policy._begin(rows)
        before = policy._before(rows, [DraftTree.empty()] * 2)
        auction, given = policy._level_auction, (policy._plan, rows.stages[0], caps, before)
        certain, hoped = (auction.best(*given, in_doubt) for in_doubt in (False, True))
        policy.records[cost].pays = paid_before
        weighed = auction.weigh(*given)
        assert weighed.tolist() == (certain if certain.any() else hoped).tolist()
        found.add((bool(certain.any()), bool(hoped.any())))
    assert found == {(True, True), (False, True), (False, False)}


def test_reading_prompts_is_no_drafts_cost_and_is_all_there_is_where_every_draft_is_a_first_one():
    draft, newcomers, timer = DraftCost(is_autoregressive=True), Newcomers(), DraftTimer()
    for step in range(40):
        rows, levels = alone(draft, [step // 8, "not asked"]), np.array([3, 0])
        newcomers.time(timer, draft, rows, levels, 0.5 if step % 8 == 0 else 3e-3)
        if step % 8 == 7:
            newcomers.forget(step // 8)
    assert sum(timer.seconds(draft)) == pytest.approx(1e-3, rel=0.1)
    assert not newcomers.known, "who was not asked is not remembered"
    timer = DraftTimer()
    for step in range(20):
        newcomers.time(timer, draft, alone(draft, [step]), np.array([3]), 0.3)
    assert sum(timer.seconds(draft)) == pytest.approx(0.1, rel=0.1)


# --- The auction with several stages ----------------------------------------------------------------------------------
