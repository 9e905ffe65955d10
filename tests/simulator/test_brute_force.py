"""The auction against every fixed length, on steps that cost exactly what its model of the cost says."""

import copy
from dataclasses import replace

import numpy as np
import pytest

from hf_smartspec.goodput import CostModel, DraftCost, FixedLength, GoodputAuction, LengthPolicy
from hf_smartspec.simulator import LoadRequest, SimulatedEngine, TableCandidates

from ..covering import exhaustive

LENGTHS = (0, 1, 2, 3, 4, 5, 6, 8, 10, 12, 16)

# Measured on two CPU cores at batch 1: from 1 token to 2, matrix-vector products become products of matrices.
JUMP = CostModel(0.0, 0.0, 0.0, knots=(1, 2, 4, 8, 16), curve=(7.9e-3, 10.2e-3, 10.2e-3, 11.8e-3, 15.4e-3))
LINE = CostModel(0.0, 0.7e-3, 20e-3)
BUCKETS = CostModel(0.0, 0.0, 0.0, knots=(1, 4, 5, 8, 9, 16), curve=(5e-3, 5e-3, 6e-3, 6e-3, 7.5e-3, 7.5e-3))


def load(alpha: float, is_telling: bool, num: int = 1, seed: int = 0) -> list[LoadRequest]:
    """
    Requests of some 600 steps whose drafts are right with this probability: at every token, or on average, more or less
    surely and as sure as they say.
    """
    rng, size = np.random.default_rng(seed), round(400 / (1 - alpha))
    probs = np.full((num, size), alpha)
    if is_telling:
        probs = rng.beta(0.6 * alpha, 0.6 * (1 - alpha), (num, size)).clip(0.01, 0.99)
    misses = (rng.random((num, size)) >= probs).astype(int)
    return [
        replace(item, ranks=misses[row], probs=probs[row, :, None].astype(np.float32))
        for row, item in enumerate(LoadRequest.of_lengths(np.zeros(num), [2] * num, [size] * num, rng))
    ]


def auction(cost: CostModel) -> GoodputAuction:
    """One that knows what steps cost, and has yet to learn what drafting does, and what it brings."""
    return GoodputAuction(copy.deepcopy(cost))


class World:
    """What serving a load takes, drafted for by a model whose levels cost a share of a plain step."""

    def __init__(self, cost: CostModel, requests: list[LoadRequest], level: float):
        self.cost, self.requests = cost, requests
        seconds = level * float(cost.seconds(0, len(requests)))
        self.draft = DraftCost(0.95 * seconds, 0.05 * seconds / len(requests), True)

    def serve(self, policy: LengthPolicy, length: int = 16) -> tuple[float, float]:
        """Tokens per second, and per step and row."""
        source = TableCandidates((1,) * length, True, heeds_prices=not isinstance(policy, FixedLength))
        engine = SimulatedEngine(self.cost, source, self.draft, max_nodes=length)
        steps = engine.run(self.requests, policy).statistics.steps
        tokens = sum(item.max_new_tokens for item in self.requests)
        return tokens / engine.clock.now, tokens / steps / len(self.requests)

    def fixed(self, length: int) -> float:
        """Tokens per second of a fixed length, where rows do not wait for one another. Contexts cost nothing here."""
        num = len(self.requests)
        calls, rows = self.draft.calls(np.full(num, length))
        drafting = self.draft.per_call * calls + self.draft.per_row * rows
        seconds = float(self.cost.seconds(0, num * (1 + length), 1 + length)) + drafting
        steps = np.mean([_num_steps(item.ranks == 0, length) for item in self.requests])
        return sum(item.max_new_tokens for item in self.requests) / (steps * seconds)

    def best(self) -> float:
        """Of all fixed lengths."""
        return max(self.fixed(length) for length in LENGTHS)


def _num_steps(hits: np.ndarray, length: int) -> int:
    place, steps = 0, 0
    while place < len(hits):
        ahead = hits[place : place + length]
        place += 1 + (len(ahead) if ahead.all() else int(ahead.argmin()))
        steps += 1
    return steps


@pytest.mark.parametrize("length", [0, 3])
def test_the_fixed_lengths_that_are_compared_with_are_those_of_the_engine(length):
    world = World(JUMP, load(0.7, is_telling=False), 0.1)
    found, per_step = world.serve(FixedLength(length), max(length, 1))
    assert found == pytest.approx(world.fixed(length), rel=0.01) and (per_step > 2.3) == (length > 0)


@pytest.mark.parametrize("level", [0.02, 0.1, 0.2, 0.3])
@pytest.mark.parametrize("alpha", [0.3, 0.5, 0.7, 0.9])
def test_reaches_the_best_fixed_length_of_any_draft_model_at_batch_1(alpha, level):
    worlds = [World(JUMP, load(alpha, is_telling=False, seed=seed), level) for seed in range(4)]
    found, per_step = zip(*[world.serve(auction(JUMP)) for world in worlds])
    best = [world.best() for world in worlds]
    shares = np.divide(found, best)
    assert shares.mean() >= 0.97 and shares.min() >= 0.95, "single loads vary: by when plain steps get their price"
    gain = np.mean(np.divide(best, [world.fixed(0) for world in worlds]))
    assert np.mean(per_step) > 1.5 or gain < 1.2, "where much is to be gained, it drafts at most steps"


@pytest.mark.parametrize("cost", [JUMP, LINE, BUCKETS])
@pytest.mark.parametrize(("alpha", "level"), [(0.6, 0.05), (0.7, 0.25)])
def test_draft_models_that_know_when_they_are_wrong_do_better_than_any_fixed_length(cost, alpha, level):
    world = World(cost, load(alpha, is_telling=True), level)
    assert world.serve(auction(cost))[0] >= 1.02 * world.best() > 1.02 * world.fixed(0)


@pytest.mark.parametrize("cost", [JUMP, *exhaustive([LINE], [BUCKETS])])
def test_reaches_the_best_fixed_length_of_batches(cost):
    world = World(cost, load(0.7, is_telling=False, num=4), 0.1)
    assert world.serve(auction(cost))[0] >= 0.97 * world.best() > 1.1 * world.fixed(0)
