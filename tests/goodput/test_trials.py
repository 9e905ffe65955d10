"""Trials of sources that do not pay: rarer the more of them fail, and as often as at first when conditions change."""

import numpy as np
import pytest

from hf_smartspec import DraftTree
from hf_smartspec.goodput import DraftCost, GoodputAuction
from hf_smartspec.goodput.draft_cost import DraftTimer
from hf_smartspec.goodput.stage_record import Newcomers
from hf_smartspec.goodput.trials import Trials

from .simulation import Drafter, line, rows_of, simulate

LEVELS = DraftCost(3e-3, 3e-4, is_autoregressive=True, source="levels")
CALL = DraftCost(per_call=6e-3, source="call")


def failed(num: int) -> Trials:
    trials = Trials()
    for _ in range(num):
        trials.begin(4, 0.5)
    return trials


def test_trials_become_rarer_up_to_a_bound_as_long_as_they_fail():
    factors = [failed(num).next_factor(4, 0.5) for num in range(8)]
    assert factors[:2] == [1.0, 1.5] and set(factors[2:]) == {2.0}
    trials = failed(8)
    assert trials.factor == 2 and trials.num == 8
    trials.reset()
    assert trials.next_factor(4, 0.5) == 1


@pytest.mark.parametrize(
    ("size", "price", "is_new"), [(4, 0.45, False), (5, 0.6, False), (3, 0.5, True), (4, 0.39, True)]
)
def test_trials_return_when_there_are_fewer_rows_or_drafts_cost_less(size, price, is_new):
    trials = failed(8)
    assert trials.next_factor(size, price) == (1 if is_new else 2)


def test_trials_that_failed_with_many_rows_stay_rare_when_few_pay():
    trials = failed(8)
    trials.begin(3, 0.5)
    assert trials.next_factor(3, 0.5) == 1.5 and trials.next_factor(4, 0.5) == 2
    trials.reset(3)
    assert trials.next_factor(3, 0.5) == 1 and trials.next_factor(4, 0.5) == 2
    trials.begin(3, 0.5)
    trials.reset(4)  # what pays with many rows pays with few
    assert trials.next_factor(3, 0.5) == trials.next_factor(4, 0.5) == 1


def test_any_number_of_trials_may_fail():
    assert failed(2000).factor == 2


@pytest.mark.parametrize("cost", [LEVELS, CALL])
def test_a_source_that_is_always_wrong_takes_half_a_percent(cost):
    policy, wrong = GoodputAuction(line()), [Drafter(0.0, claimed=0.95, cost=cost, length=5)] * 8
    simulate(policy, wrong, line(), steps=1500, noise=0)
    trials = policy.records[cost].trials
    before = trials.num
    simulate(policy, wrong, line(), steps=6000, noise=0)
    levels = np.ones(8, np.int64)
    share = (trials.num - before) * policy.records[cost].seconds(cost, levels) / (6000 * policy._plan.plain_seconds)
    assert 0.003 < share < 0.0055
    for num, is_asked in ((8, False), (1, True)):
        rows, record = rows_of(wrong[:num]), policy.records[cost]
        record.trial_time.seconds = 1.1 * record.seconds(cost, levels)
        asked = policy.max_nodes(rows, rows.stages[0], [DraftTree.empty()] * num)
        assert asked.any() == is_asked, "one row is another matter"


def test_what_was_decoded_without_drafts_is_read_before_the_next_one():
    """Its time is none of the draft's, and is paid for by later trials."""
    newcomers, timer = Newcomers(), DraftTimer()
    for length, seconds, has_read in ((50, 1.0, True), (52, 3e-3, False), (60, 3e-3, False), (200, 0.5, True)):
        rows = rows_of([Drafter(0.0, cost=LEVELS)], context=length)
        assert newcomers.time(timer, LEVELS, rows, np.ones(1, np.int64), seconds) == has_read
    assert sum(timer.seconds(LEVELS)) == pytest.approx(3e-3, rel=0.1)


def test_a_draft_that_was_taken_to_be_dear_is_found_cheap_though_it_reads():
    newcomers, timer = Newcomers(), DraftTimer()
    for step in range(60):
        rows = rows_of([Drafter(0.0, cost=LEVELS)], context=50 + (2 if step < 20 else 200) * step)
        newcomers.time(timer, LEVELS, rows, np.ones(1, np.int64), 1.0 if step < 20 else 3e-3)
    assert sum(timer.seconds(LEVELS)) < 0.1
