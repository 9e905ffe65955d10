"""Rows that are waited for together, as those of one call of `generate`: what counts is when the last one ends."""

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_smartspec import DraftTree
from hf_smartspec.goodput import CostModel, DraftCost, GoodputAuction, Stage, StepOutcome, StepRows, StepSeconds
from hf_smartspec.goodput.levels import Remaining, soonest_depths
from hf_smartspec.goodput.stage_record import StageRecord

from .simulation import VOCAB_SIZE

LEVELS = DraftCost(per_call=0.6e-3, is_autoregressive=True, source="model")
CALL = DraftCost(per_call=0.15e-3, source="texts")
TRUE = CostModel(0.0, 0.22e-3, 7.6e-3)  # about that of 135 M parameters in bfloat16 on two CPU cores
AROUND = 1.8e-3  # seconds of the host's work in a step with drafts

rates = st.floats(0.05, 0.95)
rows_to_go = st.lists(st.tuples(rates, st.integers(1, 200)), min_size=2, max_size=3)


@settings(max_examples=60, deadline=None)
@given(rows_to_go, st.floats(0, 0.2), st.floats(0, 1e-3))
def test_no_other_depths_end_much_sooner(rows, level, node):
    """Compared with all depths of all rows, one by one."""
    rate, left = np.array(rows).T
    gains, depth = rate[:, None] ** np.arange(1, 4), 3
    seconds = np.tile(10e-3 + node * np.arange(len(left) * depth + 1), (depth, 1))
    cost = DraftCost(level * 10e-3, 1e-4, True)
    remaining, record = Remaining(left, np.zeros(len(left)), 1e-4), StageRecord()
    found = soonest_depths(gains, seconds, cost, record, np.zeros(len(left)), remaining, 0.0)

    def time_of(depths):
        added = [gains[row, :num].sum() for row, num in enumerate(depths)]
        calls = cost.per_call * max(depths) + cost.per_row * sum(depths)
        return float(remaining.seconds(np.array([added]), np.array([seconds[0, sum(depths)] + calls]))[0])

    none, best = time_of([0] * len(left)), min(map(time_of, product(range(depth + 1), repeat=len(left))))
    assert time_of(found.tolist()) <= none * (1 + 1e-9)
    assert time_of(found.tolist()) <= max(1.03 * best, best + 0.05 * none)


def test_only_the_row_that_would_end_last_drafts():
    gains, left = np.full((3, 4), 0.9) ** np.arange(1, 5), np.array([10, 90, 12])
    seconds = np.tile(10e-3 + 1e-4 * np.arange(13), (4, 1))
    remaining = Remaining(left, np.zeros(3), 1e-4)
    depths = soonest_depths(gains, seconds, LEVELS, StageRecord(), np.zeros(3), remaining, 0.01)
    assert depths[1] > 0 and not depths[[0, 2]].any()


def call_seconds(policy: GoodputAuction, accuracies: list[float], num: int, cost: DraftCost, names: str, rng) -> float:
    """One call of `generate` for `num` tokens per row, whose drafts are as sure as they say."""
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
def test_calls_with_drafts_take_no_longer_than_without(cost, accuracies, least):
    rng, policy, num, seconds = np.random.default_rng(0), GoodputAuction(CostModel(0.0, 0.22e-3, 7.6e-3)), 64, 0.0
    for call in range(24):
        taken = call_seconds(policy, accuracies, num, cost, f"call {call}, row", rng)
        seconds += taken if call >= 8 else 0.0
    assert 16 * num * float(TRUE.seconds(0, len(accuracies))) / seconds >= least
