"""The time in which a drafter reads a row's text before its first draft: it is earned by the tokens that follow."""

import numpy as np
import pytest

from hf_smartspec.goodput import DraftCost, GoodputAuction, StepRows
from hf_smartspec.goodput.draft_cost import DraftTimer
from hf_smartspec.goodput.levels import best_depths
from hf_smartspec.goodput.stage_record import Newcomers, StageRecord

from .simulation import Drafter, line, rows_of

LEVELS = DraftCost(3e-3, 0.0, is_autoregressive=True, source="levels")


def rows(length, left=None):
    step = rows_of([Drafter(0.0, cost=LEVELS)], context=length)
    step.num_left = None if left is None else np.array([left])
    return step


@pytest.mark.parametrize("first", [2e-3, 9.0])
def test_the_time_of_reading_is_learnt_by_token_whatever_the_first_one_took(first):
    """Less than a draft was taken to cost, or with compiling; a token takes as long as a level at most."""
    newcomers, timer, levels = Newcomers(), DraftTimer(), np.ones(1, np.int64)
    newcomers.time(timer, LEVELS, rows(100), levels, first)
    assert newcomers.per_token.mean <= 3e-3
    for _ in range(6):
        newcomers.forget(0)
        newcomers.time(timer, LEVELS, rows(100), levels, 0.103)
    assert newcomers.per_token.mean == pytest.approx(1e-3, rel=0.3)


def test_reading_is_spread_over_the_tokens_that_are_left():
    record = StageRecord()
    record._newcomers.per_token.add(1e-3)
    assert record.reading(rows(100, left=100)) == pytest.approx([2e-3]), "half of them: answers end earlier"
    assert record.reading(rows(512)) == pytest.approx([2e-3]), "256, where no bound is known"
    record._newcomers.known[0] = 90
    assert record.reading(rows(100, left=50)) == [0.0], "what was drafted for lately is read in a draft's own time"


@pytest.mark.parametrize(("reading", "expected"), [(0.0, [3, 3]), (4e-3, [0, 3])])
def test_rows_that_do_not_earn_their_reading_are_left_out_and_hold_no_others_back(reading, expected):
    gains, record = np.array([[0.5, 0.4, 0.3]] * 2), StageRecord()
    seconds = np.full((3, 7), 0.02)
    depths = best_depths(gains, seconds, DraftCost(1e-4, 1e-3, True), record, np.array([reading] * 2), 100.0, 0.01)
    other = best_depths(gains, seconds, DraftCost(1e-4, 1e-3, True), record, np.array([40 * reading, 0.0]), 100.0, 0.01)
    assert depths.tolist() == [3, 3] and other.tolist() == expected


def test_the_policy_weighs_it():
    policy = GoodputAuction(line())
    step = StepRows([0], np.array([2000]), np.array([8]), stages=rows(2000).stages, num_left=np.array([4]))
    record = policy.records[LEVELS]
    for _ in range(20):
        record.acceptance.update([0], np.ones((1, 4), bool), np.ones((1, 4), bool))
    assert policy.max_nodes(step, step.stages[0], [])[0] > 0
    record._newcomers.per_token.add(1e-2)
    record.let_go()  # levels that pay are drafted for some steps without being weighed
    again = StepRows([0], np.array([2000]), np.array([8]), stages=rows(2000).stages, num_left=np.array([4]))
    assert policy.max_nodes(again, again.stages[0], [])[0] == 0
