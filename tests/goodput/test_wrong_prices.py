"""The goodput auction with prices that are wrong: what a profile says, and what steps take."""

import numpy as np
import pytest

from hf_smartspec import DraftTree
from hf_smartspec.drafts.forest import Forest
from hf_smartspec.goodput import CostModel, DraftCost, FixedLength, GoodputAuction, NoSpeculation

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
def test_an_answer_that_begins_with_a_wrong_price_finds_the_right_one_inside_itself(
    request, wrong, accuracy, num_rows, silent
):
    right, found = (first_steps(cost, accuracy, num_rows, silent) for cost in (REAL, priced(**wrong)))
    if wrong == {"scale": 15.0, "drafts": 3.0} and (accuracy, num_rows, silent) == (0.6, 8, False):
        request.applymarker(pytest.mark.xfail(strict=True, reason="0.493 of the nodes; 0.987 of the goodput"))
    assert found[0] > 0.5 * right[0] and found[1] > 0.88 * right[1]


def test_what_a_provisional_profile_finds_too_dear_is_tried():
    """By a profile that says so, drafts never pay: two tokens cost twice as much as one. In truth, they are free."""
    costs = [priced(jump=0.02, is_provisional=provisional) for provisional in (False, True)]
    (none, kept), (num, tried) = (first_steps(cost, 0.3, num_rows=1) for cost in costs)
    assert none == 0 and num > 100 and tried > 1.2 * kept


@pytest.mark.parametrize("jump, num_kept", [(0.004, 1), (0.9, 0)])
def test_what_is_looked_at_again_in_doubt_bids_as_before(jump, num_kept, monkeypatch):
    """Only prices change between the first look and the one in doubt."""
    bids, along_paths = [], Forest.along_paths

    def noting(forest, *args):
        bids.append(along_paths(forest, *args))
        return bids[-1]

    monkeypatch.setattr(Forest, "along_paths", noting)
    chain = DraftTree.chain([1], [0.2])
    policy = GoodputAuction(priced(jump=jump, is_provisional=True), calibrates=False)
    assert len(policy.select(rows_of([chain]), [chain])[0]) == num_kept and len(bids) == 1
    assert not policy.cost._is_corrected
