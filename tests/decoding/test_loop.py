"""The decoding loop by itself: what it counts, keeps and forgets."""

import numpy as np
import pytest
import torch

from benchmarks.load.requests import with_acceptance
from benchmarks.step.overhead import host
from benchmarks.step.overhead.host import make_setting
from hf_smartspec import DraftTree, SmartSpecConfig, SuffixTreeCandidates
from hf_smartspec.candidates import StagedCandidates
from hf_smartspec.decoding import drafting, source_guard
from hf_smartspec.decoding.loop import DecodingLoop
from hf_smartspec.goodput import CostModel, DraftCost, FixedLength, PrefillGate
from hf_smartspec.simulator import LoadRequest, SimulatedEngine, TableCandidates

from ..cases import left_padded
from ..models import shared_model
from ..sources import Random
from ..watching import Watching
from .shown import LENGTH, PROMPTS, decoded, plain


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
        seconds = outcome.seconds
        self.seconds += [(stage.seconds, seconds.draft, seconds.other, stage.overhead) for stage in outcome.rows.stages]


@pytest.mark.parametrize(
    ("num_nodes", "by_level", "expected"),
    [
        (3, False, [(1.0, 1.0, 0.0, 0.0), (11.0, 1.0, 0.0, 0.0), (11.0, 1.0, 0.0, 0.0)]),
        (3, True, [(0.0, 1.0, 0.0, 1.0), (0.0, 1.0, 0.0, 11.0), (0.0, 1.0, 0.0, 11.0)]),
        (0, False, [(0.0, 1.0, 0.0, 0.0)] * 3),  # not the forward's: most steps without drafts are not decided about
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


class Noting(FixedLength):
    def observe(self, outcome):
        self.seconds += [stage.seconds for stage in outcome.rows.stages]


def test_all_that_is_decided_for_a_step_is_a_part_of_drafting(monkeypatch):
    """And none of the forward's: most steps without drafts rest, and are not decided about."""
    policy, policy_rows = Noting(3), drafting.policy_rows
    monkeypatch.setattr(host, "_policy", lambda *_: policy)
    setting = make_setting("suffix", 2, num_steps=2)
    clock, policy.seconds = setting.loop.clock, []
    monkeypatch.setattr(drafting, "policy_rows", lambda *given: (clock.advance(1.0), policy_rows(*given))[1])
    for _ in range(2):
        setting.loop.step()
    assert np.allclose(policy.seconds, [1.0, 1.0])


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


class Seldom(FixedLength):
    """Asks sources in every so many steps."""

    def __init__(self, interval):
        super().__init__(2)
        self.interval, self.num_steps = interval, 0

    def max_nodes(self, rows, stage, trees):
        self.num_steps += 1
        return super().max_nodes(rows, stage, trees) * (self.num_steps % self.interval == 0)


class Calls(Random):
    """Notes the calls that it gets for a request, and the text that it knows when it drafts."""

    def __init__(self):
        super().__init__(0, is_tree=False)
        self.calls: list[tuple] = []

    def observe(self, request_id, tokens):
        self.calls.append(("observe", len(tokens)))
        super().observe(request_id, tokens)

    def draft(self, text, limit):
        self.calls.append(("propose", len(text)))
        return DraftTree.chain([1])

    def stop(self, request_id):
        self.calls.append(("stop", len(self.texts.get(request_id, ()))))
        super().stop(request_id)


def test_steps_that_ask_no_source_are_observed_when_it_is_asked_next_or_at_the_end():
    source, every = Calls(), Calls()
    every.observes_every_step = True
    for item in (source, every):
        decoded(shared_model("llama"), SmartSpecConfig(item, policy=Seldom(4)), left_padded([[5, 9, 5]]), length=10)
    assert source.calls[:4] == [("observe", 1), ("observe", 2), ("propose", 6), ("observe", 1)], "the prompt's first"
    assert source.calls[4] == ("observe", 3) and source.calls[-1] == ("stop", 13) and len(source.calls) < 10
    texts = [[call for call in item.calls if call[0] != "observe"] for item in (source, every)]
    assert texts[0] == texts[1], "each draft, and the end, knows the whole text"
    assert sum(num == 1 for kind, num in every.calls if kind == "observe") >= 9


@pytest.fixture
def held(monkeypatch):
    """A list that grows by the states and the verified draft that each running request holds, after every step."""
    held, step = [], DecodingLoop.step

    def noting(loop):
        ended = step(loop)
        held.extend((request.fed, request.verified) for request in loop.running)
        return ended

    monkeypatch.setattr(DecodingLoop, "step", noting)
    return held


@pytest.mark.parametrize(("interval", "num_shown"), [(1, 0), (1, 5), (100, 0)])
def test_sources_whose_hidden_states_cannot_be_had_are_dropped(interval, num_shown, held, monkeypatch, caplog):
    """The states of the prompts are lacking, those after some steps, and all of them at the rows' ends."""
    model, left, show = shared_model("llama"), iter(range(num_shown)), source_guard.show_steps

    def failing(rows, *arguments):
        if rows and next(left, None) is None:
            raise RuntimeError("not enough memory")
        show(rows, *arguments)

    monkeypatch.setattr(source_guard, "show_steps", failing)
    source = Watching(Random(0, is_tree=False), scores=False)
    assert torch.equal(decoded(model, SmartSpecConfig(source, policy=Seldom(interval))), plain(model))
    assert "failed and was dropped" in caplog.text and "not enough memory" in caplog.text
    assert len(source.steps) == num_shown * len(PROMPTS), "nothing is shown after a gap"
    assert len(source.ended) == len(PROMPTS) and not source.texts, "requests end in their sources all the same"
    assert interval > 1 or set(held) == {(None, None)}


def test_no_logits_are_held_until_hidden_states_are_shown(held):
    source = Watching(Random(0, is_tree=False), scores=False)
    decoded(shared_model("llama"), SmartSpecConfig(source, policy=Seldom(100)))
    assert any(fed is not None for fed, _ in held) and {verified for _, verified in held} == {None}


def test_rows_that_end_together_are_shown_together(monkeypatch):
    shown, show = [], source_guard.show_steps

    def noting(rows, *arguments):
        shown.append(len([row for row in rows if row.fed is not None]))
        show(rows, *arguments)

    monkeypatch.setattr(source_guard, "show_steps", noting)
    source = Watching(Random(0, is_tree=False), scores=False)
    decoded(shared_model("llama"), SmartSpecConfig(source, policy=Seldom(100)))
    assert [num for num in shown if num] == [len(PROMPTS)], "at their ends"


def test_hidden_states_of_steps_that_ask_no_source_come_together():
    model = shared_model("llama")
    for layers, interval, most in (((-1, 0), 4, 33), ((1,), 100, len(PROMPTS))):
        source = Watching(Random(0, is_tree=False), layers, scores=False)
        decoded(model, SmartSpecConfig(source, policy=Seldom(interval)))
        source.check(model)
        assert len(PROMPTS) <= len(source.steps) <= most, f"of {len(PROMPTS) * LENGTH} steps"


def test_suffix_trees_remember_outputs_of_steps_that_ask_none():
    trees, model = SuffixTreeCandidates(max_bytes=2**20), shared_model("llama")
    output = decoded(model, SmartSpecConfig(trees, policy=Seldom(100)))
    kept = {tuple(text[-LENGTH:].tolist()) for _, _, text in trees.outputs()}
    assert kept == {tuple(row[-LENGTH:].tolist()) for row in output}


class FirstOnly(Seldom):
    """Asks the first source in every step, and others in every so many."""

    def max_nodes(self, rows, stage, trees):
        asks = super() if stage.position else super(Seldom, self)
        return asks.max_nodes(rows, stage, trees)


def test_sources_that_need_states_wait_while_others_draft():
    model, first = shared_model("llama"), Calls()
    watching = Watching(Random(1, is_tree=False), scores=False)
    decoded(model, SmartSpecConfig(StagedCandidates([first, watching]), policy=FirstOnly(4)))
    watching.check(model)
    num_first = sum(kind == "observe" for kind, _ in first.calls)
    assert num_first > 2 * len(watching.steps) >= 2 * len(PROMPTS)


def test_steps_after_the_prompts_have_one_array_of_caps():
    """It tells that no row waits, without a look at each."""
    are_own = []

    class Noting(Seldom):
        def max_nodes(self, rows, stage, trees):
            are_own.append(stage.caps is rows.caps)
            return super().max_nodes(rows, stage, trees)

    source = Watching(Random(0, is_tree=False), scores=False)
    source.follows_target = True
    decoded(shared_model("llama"), SmartSpecConfig(source, policy=Noting(100)))
    assert not are_own[0] and all(are_own[1:]) and len(are_own) >= LENGTH
