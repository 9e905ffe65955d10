"""The goodput auction with prices that are wrong: what a profile says, and what steps take."""

from functools import cache

import numpy as np
import pytest

from hf_smartspec import DraftTree
from hf_smartspec.goodput import (
    CostModel,
    DraftCost,
    FixedLength,
    GoodputAuction,
    NoSpeculation,
    StepOutcome,
    StepSeconds,
)

from ..covering import part_of
from .simulation import Drafter, line, simulate
from .test_auction import rows_of


def test_a_profile_that_is_wrong_is_corrected():
    """It says that drafts ride free; in truth each node costs as much as half a step."""
    true, wrong = line(gamma=10e-3), line(gamma=0.0, delta=30e-3)
    drafters = [Drafter(0.6, 0.6)] * 2
    plain = simulate(NoSpeculation(), drafters, true, steps=300)
    policy = GoodputAuction(wrong)
    simulate(policy, drafters, true, steps=300)
    learnt = simulate(policy, drafters, true, steps=600, seed=1)
    best = simulate(FixedLength(1), drafters, true, steps=600, seed=1)
    assert learnt.goodput > 0.97 * best.goodput > plain.goodput


# A real model's on two cores: further tokens cost little.
REAL = CostModel(2e-7, 0, 0, 1e-8, (1, 2, 4, 8, 16, 32, 64), (0.017, 0.0172, 0.0177, 0.0184, 0.021, 0.03, 0.05))


def priced(scale=1.0, drafts=1.0, jump=0.0, is_provisional=False):
    """`REAL`, with everything `scale` times as dear, and what more tokens than one add `drafts` times."""
    one, *more = REAL.curve
    curve = scale * np.array([one, *(one + drafts * (other - one) + jump for other in more)])
    return CostModel(scale * REAL.alpha, 0, 0, scale * REAL.beta, REAL.knots, tuple(curve), 0.0, is_provisional)


def first_steps(cost, accuracy, num_rows, silent=False):
    """(verified nodes, goodput) of the first 24 steps with these prices; if `silent`, after 24 without drafts."""
    verified, tokens, seconds = 0, 0, 0.0
    for seed in range(6):
        policy = GoodputAuction(CostModel.from_dict(cost.as_dict()))
        drafters = [Drafter(accuracy, accuracy, DraftCost(3e-4))] * num_rows
        if silent:
            simulate(policy, [Drafter(accuracy, length=0)] * num_rows, REAL, steps=24)
        totals = simulate(policy, drafters, REAL, steps=24, seed=seed)
        verified, tokens, seconds = verified + totals.verified, tokens + totals.tokens, seconds + totals.seconds
    return verified, tokens / seconds


@pytest.mark.parametrize("silent", [False, True])
@pytest.mark.parametrize("num_rows", [1, 8])
@pytest.mark.parametrize("accuracy", [0.3, 0.6, 0.8])
@pytest.mark.parametrize(
    "wrong",
    [
        {"scale": 15.0},
        {"scale": 1 / 15},
        {"drafts": 3.0},
        {"drafts": 0.0},
        {"scale": 15.0, "drafts": 3.0},
        {"scale": 7.0, "jump": 0.02, "is_provisional": True},
    ],
)
def test_an_answer_that_begins_with_a_wrong_price_finds_the_right_one_inside_itself(wrong, accuracy, num_rows, silent):
    right, found = (first_steps(cost, accuracy, num_rows, silent) for cost in (REAL, priced(**wrong)))
    assert found[0] > 0.5 * right[0] and found[1] > 0.88 * right[1]


@pytest.mark.parametrize("jump, num_kept", [(0.004, 1), (0.9, 0)])
def test_what_a_profile_finds_a_little_too_dear_is_tried_once_time_is_saved(jump, num_kept):
    """Two tokens cost a quarter more than one, or 50 times as much; a draft brings a fifth of a token."""
    chain, nothing = DraftTree.chain([1], [0.2]), DraftTree.empty()
    policy = GoodputAuction(priced(jump=jump), calibrates=False)
    rows = rows_of([chain])
    assert not len(policy.select(rows, [chain])[0])
    policy.observe(StepOutcome(rows, [chain], [nothing], [0], StepSeconds(0.0, 0.017)))
    assert len(policy.select(rows_of([chain]), [chain])[0]) == num_kept


def test_a_trial_has_twice_the_tokens_at_most():
    chain = DraftTree.chain(range(32), [0.99] * 32)
    policy, sizes = GoodputAuction(priced(jump=0.02), calibrates=False), []
    for _ in range(12):
        rows = rows_of([chain])
        (kept,) = policy.select(rows, [chain])
        sizes.append(len(kept) + 1)
        seconds = StepSeconds(0.0, float(REAL.seconds(*rows.forward_size(len(kept), len(kept) + 1))))
        policy.observe(StepOutcome(rows, [chain], [kept], [len(kept)], seconds))
    assert max(sizes) > 16 and all(after <= 2 * max(sizes[: place + 1]) for place, after in enumerate(sizes[1:]))


SIZES = np.array([1, 2, 4, 8, 16, 32, 64])
TRUE = {"real": REAL, "steep": line(gamma=4e-3, delta=8e-3)}


def dear(*sizes):
    """Return a profile's curve that takes these sizes to be three times as dear, and larger ones to be no cheaper."""
    return lambda curve: np.maximum.accumulate(np.where(np.isin(SIZES, sizes), 3, 1) * curve)


def cheap(*sizes):
    """Return a curve that takes these sizes to be three times as cheap, and smaller ones to be no dearer."""
    return lambda curve: np.minimum.accumulate((curve / np.where(np.isin(SIZES, sizes), 3, 1))[::-1])[::-1]


WRONG = {
    "all x 15": lambda curve: 15 * curve,
    "all / 15": lambda curve: curve / 15,
    "drafts x 3": lambda curve: 3 * curve - 2 * curve[0],
    "drafts free": lambda curve: np.full(len(curve), curve[0]),
    "2 and more x 3": lambda curve: np.where(SIZES > 1, 3, 1) * curve,
    "2 / 3": cheap(2),
} | {f"{sizes} x 3": dear(*sizes) for sizes in ((1,), (2,), (4,), (8,), (2, 8), (1, 4))}
FURTHER = (
    {"all x 3": lambda curve: 3 * curve, "all / 3": lambda curve: curve / 3}
    | {f"{sizes} x 3": dear(*sizes) for sizes in ((16,), (4, 16))}
    | {f"{sizes} / 3": cheap(*sizes) for sizes in ((4,), (8,), (16,), (2, 8), (1, 4), (4, 16))}
)


# 8 nodes are best, 7 are verified: a profile has no knot between 8 and 16 tokens, so that it takes 9 to cost a quarter
# more than 8. Both lie in one bin of the correction, whose factors hardly differ: 9 tokens are in too little doubt to
# be tried. That costs 5.3 %.
BETWEEN_KNOTS = {(name, "real", 0.9, 1) for name in ("(16,) x 3", "(8,) / 3", "(2, 8) / 3")}


@cache
def after_first_tokens(true, wrong, accuracy, num_rows):
    """Return seconds per mean token, after the first 100 tokens per row of answers that began with the profile."""
    true = TRUE[true]
    curve = np.asarray(true.seconds(0, SIZES))
    profile = CostModel(true.alpha, 0, 0, true.beta, SIZES, (WRONG | FURTHER)[wrong](curve) if wrong else curve)
    tokens = seconds = 0.0
    for seed in range(max(8 // num_rows, 2)):
        policy = GoodputAuction(CostModel.from_dict(profile.as_dict()))
        drafters, num, step = [Drafter(accuracy, accuracy, DraftCost(3e-4))] * num_rows, 0, 0
        while num < 250 * num_rows:
            totals = simulate(policy, drafters, true, steps=1, seed=1000 * seed + step)
            num, step = num + totals.tokens, step + 1
            if num > 100 * num_rows:
                tokens, seconds = tokens + totals.mean_tokens, seconds + totals.seconds
    return seconds / tokens


@pytest.mark.parametrize("num_rows", [1, 2, 4, 8])
@pytest.mark.parametrize("accuracy", [0.3, 0.6, 0.9])
@pytest.mark.parametrize("true", TRUE)
@pytest.mark.parametrize("wrong", part_of([*WRONG, *FURTHER], *WRONG))
def test_a_wrong_profile_costs_little_after_100_tokens(request, wrong, true, accuracy, num_rows):
    if (wrong, true, accuracy, num_rows) in BETWEEN_KNOTS:
        request.applymarker(pytest.mark.xfail(strict=True, reason="5.3 %: sizes between two knots are not in doubt"))
    right = after_first_tokens(true, None, accuracy, num_rows)
    assert after_first_tokens(true, wrong, accuracy, num_rows) < 1.05 * right
