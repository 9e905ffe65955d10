"""The decoding loop by itself: what it counts, keeps and forgets."""

import numpy as np
import pytest

from benchmarks.step.overhead import host
from benchmarks.step.overhead.host import make_setting
from hf_smartspec import SmartSpecConfig, SuffixTreeCandidates
from hf_smartspec.goodput import CostModel, DraftCost, FixedLength, PrefillGate
from hf_smartspec.simulator import LoadRequest, SimulatedEngine, TableCandidates, with_acceptance

from ..cases import left_padded
from ..models import shared_model
from ..sources import Random
from .shown import decoded


def test_the_time_of_prompts_is_that_of_the_steps_that_run_them():
    setting = make_setting("none", 2, num_steps=3)
    statistics, ends = setting.loop.statistics, []
    for _ in range(3):
        setting.loop.step()
        ends.append(setting.forward.clock())
    assert statistics.seconds_total == pytest.approx(ends[-1]), "of this clock, whose time forwards alone take"
    assert statistics.seconds_prefill == ends[0] > 0


class Slow(FixedLength):
    """Takes a second to select, and ten to learn."""

    def select(self, rows, trees):
        self.clock.advance(1.0)
        return super().select(rows, trees)

    def observe(self, outcome):
        self.clock.advance(10.0)
        self.seconds += [(stage.seconds, outcome.seconds.draft, outcome.seconds.other) for stage in outcome.rows.stages]


@pytest.mark.parametrize(
    ("num_nodes", "by_level", "expected"),
    [
        (3, False, [(1.0, 1.0, 0.0), (11.0, 1.0, 0.0), (11.0, 1.0, 0.0)]),
        (3, True, [(0.0, 0.0, 1.0)] * 3),
        (0, False, [(0.0, 0.0, 1.0)] * 3),
    ],
)
def test_drafts_of_one_call_take_all_that_the_host_does_for_them_and_their_nodes_no_more(
    num_nodes, by_level, expected, monkeypatch
):
    policy = Slow(num_nodes)
    monkeypatch.setattr(host, "_policy", lambda *_: policy)
    monkeypatch.setattr(SuffixTreeCandidates, "is_autoregressive", by_level)
    setting = make_setting("suffix", 2, num_steps=3)
    policy.clock, policy.seconds = setting.loop.clock, []
    for _ in range(3):
        setting.loop.step()
    assert np.allclose(policy.seconds, expected)


class Forgetting(FixedLength):
    """Notes which requests it is to forget."""

    def forget(self, request_id):
        self.forgotten.append(request_id)


def test_requests_that_the_prefill_gate_has_kept_from_their_draft_model_are_forgotten(monkeypatch):
    gate, policy = PrefillGate(threshold=0.0), Forgetting(2)
    policy.forgotten = []
    monkeypatch.setattr(PrefillGate, "_LEAST_STEPS", 0)
    gate.observe(["earlier"], [0])
    cost, source = CostModel(0.0, 0.0, 1.0), TableCandidates((1, 1), is_autoregressive=True)
    engine = SimulatedEngine(cost, source, DraftCost(0.1, is_autoregressive=True))
    engine.new_gate = lambda: gate
    rng = np.random.default_rng(0)
    requests = LoadRequest.of_lengths(np.zeros(2), [4] * 2, [6] * 2, rng)
    result = engine.run(with_acceptance(requests, 0.5, rng), policy)
    assert result.statistics.drafted_tokens == 0, "the gate has refused them"
    assert len(set(policy.forgotten)) == 2 and not gate._refused


class EveryOther(FixedLength):
    """Asks sources in every other step."""

    num_steps = 0

    def max_nodes(self, rows, stage, trees):
        self.num_steps += 1
        return super().max_nodes(rows, stage, trees) * (self.num_steps % 2)


class Likely(Random):
    """Notes in which steps it gets the target's likeliest tokens."""

    num_likeliest = 2

    def observe(self, request_id, step):
        self.got.append(step.likeliest is not None)
        super().observe(request_id, step.tokens)


def test_likely_tokens_are_kept_in_steps_that_ask_a_source():
    source = Likely(0, is_tree=False)
    source.got = []
    decoded(shared_model("llama"), SmartSpecConfig(source, policy=EveryOther(2)), left_padded([[5, 9, 5]]))
    assert source.got == [number % 2 == 0 for number in range(len(source.got))] and len(source.got) > 3
