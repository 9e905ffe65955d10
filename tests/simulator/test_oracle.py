"""Oracles: no policy without their knowledge does better."""

import copy

import numpy as np
import pytest

from benchmarks.load.requests import with_acceptance
from benchmarks.load.simulate.world import World
from hf_smartspec.goodput import CostModel, DraftCost
from hf_smartspec.goodput.papers.policies import Oracle
from hf_smartspec.goodput.policy import StepRows
from hf_smartspec.simulator import SimulatedEngine, TableCandidates, poisson
from hf_smartspec.simulator.oracle import DraftOracle

from ..covering import exhaustive


@pytest.mark.parametrize("alpha", [0.8, *exhaustive([0.2])])
def test_the_oracle_of_drafts_is_an_upper_bound(alpha):
    world = World(30, {})
    requests = world.chat_lengths(poisson(6.0, world.num_requests, world.rng(9)))
    alphas = world.rng(10).beta(10 * alpha, 10 * (1 - alpha), len(requests))
    requests = with_acceptance(requests, alphas, world.rng(11))
    best = world.run_draft(requests, world.policy("oracle"))
    assert best.statistics.drafted_tokens == best.statistics.accepted_tokens > 0
    for name in ("none", "k=1", "k=3", "step", "auction"):
        assert best.mean_latency < world.run_draft(requests, world.policy(name)).mean_latency, name


def test_an_oracle_that_seldom_drafts_is_asked_for_every_request():
    """Drafters that are hardly asked do not read new prompts; where it is known what comes true, that is no sign."""
    world = World(40, {})
    requests = with_acceptance(world.same_lengths(np.arange(40) / 4), 0.1, world.rng(1))
    started = []

    class Counted(TableCandidates):
        def start(self, request_id, prompt):
            started.append(request_id)
            super().start(request_id, prompt)

    result = world.run(requests, world.policy("oracle"), Counted((1,) * 5, is_autoregressive=True), world.draft)
    assert 0 < result.statistics.drafted_tokens < 0.2 * result.statistics.steps
    assert started == requests


def test_time_has_the_price_of_what_it_yielded_lately():
    oracle = Oracle(CostModel(0.0, 1.0, 0.0), lambda name: np.zeros(0, np.int64))
    seconds = np.array([1.0, 1.4, 2.0])
    assert oracle.num_paying(1, seconds) == 2, "plain decoding needs a second for a token"
    assert oracle.num_paying(0, seconds[:1]) == 0
    for _ in range(500):
        oracle.num_paying(1, np.array([1.0, 1.1]))  # 1.8 times plain decoding's goodput
    assert oracle.num_paying(1, np.array([1.0, 1.5])) == 1
    assert oracle.num_paying(1, np.array([1.0, 1.6])) == 0, "a token in 0.6 s is less than time brings elsewhere"


def test_the_oracle_of_drafts_asks_for_the_first_levels_of_what_comes_true():
    cost, draft = CostModel(0.0, 1e-3, 10e-3), DraftCost(per_call=4e-3, is_autoregressive=True)
    requests = with_acceptance(World(3, {}).same_lengths(np.zeros(3)), 0.5, np.random.default_rng(0))
    source = TableCandidates((1,) * 5, is_autoregressive=True)
    engine = SimulatedEngine(cost, source, draft)
    oracle = DraftOracle(copy.deepcopy(cost), engine, draft)
    for request in requests:
        source.start(request, request.prompt)
    right = np.array([2, 1, 0])
    for request, num in zip(requests, right):
        request.ranks[:] = 1
        request.ranks[:num] = 0
    rows = StepRows(requests, np.full(3, 128), np.full(3, 5))
    assert oracle.max_nodes(rows, rows.stages[0], []).tolist() == [1, 1, 0], (
        "the second level would bring one token for a call"
    )
    cheap = DraftOracle(copy.deepcopy(cost), engine, DraftCost(per_call=1e-3, is_autoregressive=True))
    assert cheap.max_nodes(rows, rows.stages[0], []).tolist() == right.tolist()
