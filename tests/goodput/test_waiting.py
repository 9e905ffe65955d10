"""Rows that are waited for together, as those of one call of `generate`: what counts is when the last one ends."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_smartspec import DraftTree
from hf_smartspec.goodput import CostModel, DraftCost, GoodputAuction, Stage, StepOutcome, StepRows, StepSeconds
from hf_smartspec.goodput.levels import Remaining, Steps, best_depths, soonest_depths
from hf_smartspec.goodput.stage_record import StageRecord

from .simulation import VOCAB_SIZE

LEVELS = DraftCost(per_call=0.6e-3, is_autoregressive=True, source="model")
CALL = DraftCost(per_call=0.15e-3, source="texts")
TRUE = CostModel(0.0, 0.22e-3, 7.6e-3)  # about that of 135 M parameters in bfloat16 on two CPU cores
AROUND = 1.8e-3  # seconds of the host's work in a step with drafts

shares = st.floats(0, 1)
some_rows = st.lists(st.tuples(st.floats(0.05, 0.95), st.integers(1, 200), shares, shares), min_size=2, max_size=3)


@settings(max_examples=100, deadline=None)
@given(some_rows, st.booleans(), st.sampled_from((1, 2)), shares, shares, st.floats(0, 0.25))
def test_no_other_depths_end_much_sooner(rows, is_autoregressive, width, level, node, own):
    """Compare with all depths of all rows, one by one, where a quarter of a step, or less, is the rows' own part."""
    rate, left, promises, reading = np.array(rows).T
    depth, num, plain = 3, len(rows), 10e-3
    gains = rate[:, None] ** np.arange(1, depth + 1)
    seconds = np.tile(plain + 0.1 * node * plain * np.arange(num * depth * width + 1), (depth, 1))
    cost, record = DraftCost(0.2 * level * plain, 1e-4, is_autoregressive, width), StageRecord()
    steps = Steps(gains, seconds, cost, record, 0.1 * plain * reading)
    remaining = Remaining(left, promises, own * plain / num)
    found = soonest_depths(steps, remaining, best_depths(*steps, num / plain, 0.0), 0.0)

    def seconds_of(depths):
        """Return the time, row by row."""
        brings = [1 + promises[row] + gains[row, :deep].sum() for row, deep in enumerate(depths)]
        calls = (max(depths), sum(depths)) if is_autoregressive else (min(max(depths), 1), np.count_nonzero(depths))
        step = seconds[0, sum(depths) * width] + cost.per_call * calls[0] + cost.per_row * calls[1]
        step += sum(steps.reading[row] * brings[row] for row, deep in enumerate(depths) if deep)
        until = [max(tokens / brought, 1) for tokens, brought in zip(left, brings)]
        return max(until) * step - remaining.row_seconds * sum(max(until) - own for own in until)

    none, all_of_them = seconds_of([0] * num), list(product(range(depth + 1), repeat=num))
    assert seconds_of(found.tolist()) <= none * (1 + 1e-9)
    assert seconds_of(found.tolist()) <= min(map(seconds_of, all_of_them)) + 0.05 * none


def depths_of(rates, left, reading=0.0, own=1e-4, other=0, depth=4):
    """Return depths in steps of 10 ms."""
    gains = np.array(rates)[:, None] ** np.arange(1, depth + 1)
    seconds = np.tile(10e-3 + 0.2e-3 * np.arange(len(rates) * depth + 1), (depth, 1))
    none = np.zeros(len(rates))
    steps, remaining = (
        Steps(gains, seconds, LEVELS, StageRecord(), none + reading),
        Remaining(np.array(left), none, own),
    )
    return soonest_depths(steps, remaining, none.astype(int) + other, 0.01).tolist()


def test_only_the_row_that_would_end_last_drafts():
    depths = depths_of([0.9, 0.9, 0.9], [10, 90, 12])
    assert depths[1] > 0 and depths[0] == depths[2] == 0


def test_nobody_drafts_where_the_last_row_draws_nothing_from_it_and_others_wait():
    assert depths_of([0.02, 0.9, 0.9], [90, 90, 90]) == [0, 0, 0]


def test_rows_whose_own_part_of_a_step_is_large_end_sooner_though_another_is_last():
    other = np.array([0, 2, 2, 2])
    assert depths_of([0.05, 0.9, 0.9, 0.9], [130, 100, 100, 100], own=2.45e-3, other=other) == other.tolist()


@pytest.mark.parametrize("left", [1, 2, 3])
def test_no_row_drafts_deeper_than_it_goes(left):
    caps, policy = np.full(2, 8), GoodputAuction(CostModel(0.0, 0.2e-3, 10e-3))
    stage = Stage(DraftCost(0.1e-3, is_autoregressive=True, source="model"), caps)
    rows = StepRows(list("xy"), np.full(2, 50), caps, stages=[stage], num_remaining=np.full(2, left))
    assert policy.max_nodes(rows, stage, [DraftTree.empty()] * 2).tolist() == [left - 1] * 2


def test_rows_must_earn_the_reading_of_their_texts():
    assert any(depths_of([0.85, 0.85], [100, 100]))
    assert not any(depths_of([0.85, 0.85], [100, 100], reading=4e-3))


def test_rows_of_different_drafters_do_not_wait_for_one_another():
    """Give each stage rows for which the other one has no drafts."""
    first, second = (DraftCost(0.3e-3, is_autoregressive=True, source=name) for name in "ab")
    caps = np.full(4, 5)
    stages = [Stage(first, caps * [1, 1, 0, 0]), Stage(second, caps * [0, 0, 1, 1])]
    policy, names, left = GoodputAuction(CostModel(0.0, 0.2e-3, 10e-3)), list("wxyz"), np.full(4, 200)
    rows = StepRows(names, np.full(4, 50), caps, stages=stages, num_remaining=left, num_left=left)
    asked = [policy.max_nodes(rows, stage, [DraftTree.empty()] * 4) for stage in stages]
    assert [(levels > 0).tolist() for levels in asked] == [[True, True, False, False], [False, False, True, True]]


@pytest.mark.parametrize(("waits", "is_deep"), [(False, True), (True, False)])
def test_drafts_end_where_they_were_planned_to_if_rows_wait_for_one_another(waits, is_deep):
    """Let others go on where they are sure of themselves."""
    cost, caps, left = replace(LEVELS, heeds_prices=True), np.full(2, 16), np.full(2, 64)
    policy, stage = GoodputAuction(CostModel(0.0, 0.2e-3, 10e-3)), Stage(cost, caps)
    rows = StepRows(list("xy"), np.full(2, 50), caps, stages=[stage], num_remaining=left if waits else None)
    asked = policy.max_nodes(rows, stage, [DraftTree.empty()] * 2)
    assert asked.all() and (asked == caps).all() == is_deep


def call_seconds(policy: GoodputAuction, accuracies: list[float], num: int, cost: DraftCost, names: str, rng) -> float:
    """Return the time of a call of `generate` for `num` tokens per row, whose drafts are as sure as they say."""
    left, total = np.full(len(accuracies), num), 0.0
    while left.any():
        active = np.flatnonzero(left)
        ids, caps = [f"{names} {row}" for row in active], np.minimum(left[active] - 1, 8)
        noise = rng.lognormal(0, 0.03)
        if policy.rests(ids):
            total += (forward := float(TRUE.seconds(0, len(ids))) * noise)
            policy.rested(len(ids), StepSeconds(0.0, forward, 0.0))
            left[active] -= 1
            continue
        stage, lens = Stage(cost, caps), np.full(len(ids), 150)
        rows = StepRows(ids, lens, caps, stages=[stage], num_remaining=left[active], num_left=left[active])
        nothing = [DraftTree.empty()] * len(ids)
        stage.asked, trees, drafting = np.asarray(policy.max_nodes(rows, stage, nothing)), nothing, 0.0
        truths = [rng.integers(0, VOCAB_SIZE, 16) for _ in ids]
        if stage.asked.any():
            for index, (row, size) in enumerate(zip(active, stage.asked.tolist())):
                probs = rng.beta(2 * accuracies[row], 2 - 2 * accuracies[row], size).clip(0.02, 0.98)
                tokens = np.where(rng.random(size) < probs, truths[index][:size], VOCAB_SIZE)
                stage.proposed[index] = DraftTree.chain(tokens, probs.astype(np.float32)) if size else nothing[0]
            calls, in_calls = cost.calls(stage.levels)
            stage.seconds, stage.overhead = cost.per_call * calls + cost.per_row * in_calls, AROUND
            drafting, trees = stage.seconds + AROUND, policy.calibrated(rows, stage, stage.proposed)
        kept = policy.select(rows, trees)
        accepted = [int(np.cumprod(tree.tokens == truth[: len(tree)]).sum()) for tree, truth in zip(kept, truths)]
        forward = float(TRUE.seconds(0, len(ids) + sum(map(len, kept)))) * noise
        tokens = [truth[: count + 1] for truth, count in zip(truths, accepted)]
        policy.observe(StepOutcome(rows, trees, kept, accepted, StepSeconds(drafting, forward, 0.0), tokens))
        total += forward + drafting
        left[active] = np.maximum(left[active] - np.array(accepted) - 1, 0)
        for name in np.array(ids)[left[active] == 0].tolist():
            policy.forget(name)
    return total


@pytest.mark.parametrize(
    ("cost", "accuracies", "least"),
    [
        (LEVELS, [0.55] * 8, 0.985),  # drafts hardly pay
        (LEVELS, [0.75] * 8, 1.2),
        (LEVELS, [0.3, 0.4, 0.4, 0.5, 0.5, 0.6, 0.7, 0.8], 0.97),  # those that draft well wait for the others
        (CALL, [0.65] * 8, 1.22),
        (CALL, [0.3, 0.4, 0.4, 0.5, 0.5, 0.6, 0.7, 0.8], 1.0),
    ],
)
def test_calls_with_drafts_take_hardly_longer_than_without_and_mostly_less(cost, accuracies, least):
    rng, policy, num, seconds = np.random.default_rng(0), GoodputAuction(CostModel(0.0, 0.22e-3, 7.6e-3)), 64, 0.0
    for call in range(24):
        taken = call_seconds(policy, accuracies, num, cost, f"call {call}, row", rng)
        seconds += taken if call >= 8 else 0.0
    assert 16 * num * float(TRUE.seconds(0, len(accuracies))) / seconds >= least
