"""The simulated verifier behind `smartspec replay`, and comparisons of what it counted."""

from collections import deque
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_smartspec import DraftTree, PromptLookupCandidates, SuffixTreeCandidates, TreeCandidateGenerator
from hf_smartspec.commands.common.recordings import Recording, count_accepted
from hf_smartspec.commands.replay import loop
from hf_smartspec.commands.replay.command import compare
from hf_smartspec.commands.replay.curves import (
    Point,
    accepted_at,
    geometric_mean,
    moving_average,
    ratios_at_equal_drafts,
)
from hf_smartspec.commands.replay.loop import Replayer, Tally, replay
from hf_smartspec.commands.replay.sources import SourceSpec

from ... import sources


class Scripted(TreeCandidateGenerator):
    """Proposes the trees that it was given, one after another."""

    default_num_nodes = 4

    def __init__(self, trees):
        self.trees, self.calls = deque(trees), []

    def start(self, request_id, prompt):
        self.calls.append(("start", request_id, prompt.tolist()))

    def propose(self, request_ids, max_nodes):
        self.calls.append(("propose", list(request_ids), list(max_nodes)))
        return [self.trees.popleft() for _ in request_ids]

    def observe(self, request_id, tokens):
        self.calls.append(("observe", request_id, tokens.tolist()))

    def stop(self, request_id):
        self.calls.append(("stop", request_id))


def recording(prompt, response):
    return Recording(np.array(prompt, np.int64), np.array(response, np.int64))


def run(source, recordings, **arguments):
    tally = Tally.of(len(recordings))
    for _ in Replayer(source, **arguments).run(recordings, tally):
        pass
    return tally


# --- The loop ---------------------------------------------------------------------------------------------------------


def test_a_scripted_source_is_counted_exactly():
    branching = DraftTree(np.array([9, 4, 5, 6]), np.array([-1, -1, 1, 2]), np.full(4, 0.5, np.float32))
    source = Scripted([DraftTree.chain([1, 2, 8]), DraftTree.empty(), branching])
    tally = run(source, [recording([0, 0], [1, 2, 3, 7, 4, 5])])
    assert source.calls == [
        ("start", 0, [0, 0]),
        ("propose", [0], [4]),
        ("observe", 0, [1, 2, 3]),  # two accepted and one more
        ("propose", [0], [4]),
        ("observe", 0, [7]),
        ("propose", [0], [4]),
        ("observe", 0, [4, 5]),  # two accepted, and the response is over
        ("stop", 0),
    ]
    assert tally.requests.tolist() == [[6, 3, 7, 4]]
    numbers = tally.summary()
    assert numbers["tokens_per_step"] == 2 and numbers["acceptance_rate"] == pytest.approx(4 / 7)
    assert numbers["drafted_per_step"] == pytest.approx(7 / 3)
    assert numbers["bytes_per_cached_token"] is None
    assert tally.prompt_lens.tolist() == [2] and len(tally.propose_seconds) == 3
    # The node behind the end of the response is unknown, as is nothing else.
    assert [(nodes.depths.tolist(), nodes.hits.tolist()) for nodes in tally.nodes] == [
        ([1, 2, 3], [True, True, False]),
        ([1, 1, 2], [False, True, True]),
    ]


def test_no_more_nodes_are_verified_than_allowed():
    source = Scripted([DraftTree.chain([1, 2, 3, 4, 5])] * 3)
    tally = run(source, [recording([], [1, 2, 3, 1, 2, 3])], num_nodes=2)
    assert source.calls[1] == ("propose", [0], [2])
    assert tally.requests.tolist() == [[6, 2, 4, 4]]


class Clocked(PromptLookupCandidates):
    """Every call takes a second that its name stands for."""

    def __init__(self, clock, **seconds):
        super().__init__()
        for name, duration in seconds.items():
            setattr(self, name, self._taking(clock, getattr(super(), name), duration))

    def _taking(self, clock, method, duration):
        def call(*args):
            clock.now += duration
            return method(*args)

        return call


def test_all_calls_are_timed_and_stalls_do_not_show(monkeypatch):
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(loop, "time", SimpleNamespace(perf_counter=lambda: clock.now))
    source = Clocked(clock, start=3e-6, propose=5e-6, observe=7e-6, stop=11e-6)
    tally = run(source, [recording([1, 2, 3], [4, 5])] * 9)  # none of which repeats anything: a token a step
    clock.now, stalled = 0.0, Clocked(clock, start=1.0, propose=1.0, observe=1.0, stop=1.0)
    for _ in Replayer(stalled).run([recording([1, 2, 3], [4, 5])], stall := Tally.of(1)):
        pass
    tally.seconds[4] = stall.seconds[0]
    tally.propose_seconds[8:10], tally.observe_seconds[8:10] = stall.propose_seconds, stall.observe_seconds
    numbers = tally.summary()
    assert numbers["start_us_per_prompt_token"] == pytest.approx(1)
    assert numbers["propose_us_per_step_median"] == numbers["propose_us_per_call_median"] == pytest.approx(5)
    assert numbers["propose_us_per_step"] == pytest.approx((16 * 5 + 2e6) / 18)
    assert numbers["observe_us_per_step"] == pytest.approx(7)
    assert numbers["stop_us_per_token"] == pytest.approx(11 / 2)
    assert numbers["us_per_token"] == pytest.approx((3 + 2 * 5 + 2 * 7 + 11) / 2)


def test_of_a_batch_every_request_takes_its_share(monkeypatch):
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(loop, "time", SimpleNamespace(perf_counter=lambda: clock.now))
    tally = run(Clocked(clock, propose=8e-6), [recording([1], [4, 5])] * 4, batch_size=4)
    numbers = tally.summary()
    assert numbers["propose_us_per_call_median"] == pytest.approx(8)
    assert numbers["propose_us_per_step_median"] == numbers["us_per_token"] == pytest.approx(2)


def test_a_number_that_is_named_is_drafted_in_full():
    """By what is likely alone, drafts would end long before."""
    rng = np.random.default_rng(0)
    recordings = [recording(rng.integers(0, 6, 40), rng.integers(0, 6, 60)) for _ in range(4)]
    usual = run(SuffixTreeCandidates(max_bytes=2**20), recordings).summary()
    named = run(SuffixTreeCandidates(max_bytes=2**20), recordings, num_nodes=16).summary()
    own_limit = run(SuffixTreeCandidates(max_bytes=2**20, min_probability=0.1), recordings, num_nodes=16).summary()
    assert usual["drafted_per_step"] == own_limit["drafted_per_step"] < 10
    assert named["drafted_per_step"] > 15 and named["accepted_per_step"] > usual["accepted_per_step"]


@pytest.mark.parametrize("batch_size", [2, 3, 10])
def test_a_batch_counts_what_single_requests_do(batch_size):
    rng = np.random.default_rng(0)
    recordings = [recording(rng.integers(0, 3, size), rng.integers(0, 3, size + 1)) for size in range(9)]
    single = run(PromptLookupCandidates(), recordings)
    listening = sources.Recording(PromptLookupCandidates())
    batch = run(listening, recordings, batch_size=batch_size)
    assert batch.requests.tolist() == single.requests.tolist()
    assert batch.requests[:, 0].tolist() == [len(item.response) for item in recordings]
    assert len(batch.propose_seconds) < len(single.propose_seconds)
    assert not listening.errors and listening.is_idle
    by_request = [sorted(nodes.hits.sum() for nodes in tally.nodes if nodes.request == 8) for tally in (single, batch)]
    assert by_request[0] == by_request[1]


def test_one_that_knows_the_answer_is_accepted_always():
    recordings = [recording([5], range(20)), recording([6], range(30, 47))]
    oracle = sources.Oracle([[*item.prompt, *item.response] for item in recordings])
    numbers = run(oracle, recordings, num_nodes=4, batch_size=2).summary()
    assert numbers["acceptance_rate"] == 1 and numbers["tokens_per_step"] == 37 / 8
    assert numbers["ece_raw"] == 0


@given(st.data())
def test_accepted_tokens_by_brute_force(data):
    rng = np.random.default_rng(data.draw(st.integers(0, 10_000)))
    tree = sources.random_tree(rng, data.draw(st.integers(0, 12)))
    truth = rng.integers(0, 97, 6)
    for depth in range(data.draw(st.integers(0, 4))):  # plants a part of the tree
        children = np.flatnonzero(tree.depths == depth + 1)
        if len(children):
            truth[depth] = tree.tokens[children[-1]]

    def longest(node, position):
        children = [] if position == len(truth) else np.flatnonzero(tree.parents == node)
        return max((1 + longest(c, position + 1) for c in children if tree.tokens[c] == truth[position]), default=0)

    pairs = list(zip(tree.parents.tolist(), tree.tokens.tolist()))
    if len(set(pairs)) == len(pairs):  # of equal siblings, the engine follows the first one
        assert count_accepted(tree, truth) == longest(-1, 0)


def test_an_interrupted_replay_stops_its_requests():
    source = sources.Recording(PromptLookupCandidates())
    steps = Replayer(source, batch_size=3).run([recording([1], [1, 2, 3] * size) for size in (1, 9, 9)], Tally.of(3))
    next(steps)
    assert not source.is_idle
    steps.close()
    assert source.is_idle


class Counting(PromptLookupCandidates):
    """Counts itself, and says how much it keeps."""

    warmed = 0

    def warm_up(self):
        type(self).warmed += 1

    def num_bytes(self):
        return 120

    def num_cached_tokens(self):
        return 30


def test_sources_are_warmed_up_and_say_what_they_keep():
    results = {}
    spec = SourceSpec("counting", "counting", Counting, None)
    data = {name: [recording([1], [1, 2, 1, 2])] * 3 for name in ("a", "b")}
    replay(data, [spec], results, limit=2)
    assert Counting.warmed == 2
    assert results["b"][spec].summary()["bytes_per_cached_token"] == 4
    assert results["b"][spec].summary()["requests"] == 2


@pytest.mark.parametrize(("carries_over", "num_built"), [(False, 4), (True, 2)])
def test_sources_keep_what_they_learnt_where_asked(carries_over, num_built):
    built = []
    spec = SourceSpec("s", "s", lambda: built.append(PromptLookupCandidates()) or built[-1], None)
    data = {name: [recording([1], [1, 2, 1, 2])] for name in ("a", "b")}
    replay(data, [spec], {}, carries_over=carries_over)
    assert len(built) == num_built  # one of each two is for warming up


# --- Comparison at equal drafts ---------------------------------------------------------------------------------------


def test_accepted_tokens_between_settings():
    curve = [Point(8, 2.0), Point(4, 1.5), Point(2, 1.0)]  # in any order
    assert [accepted_at(curve, drafted) for drafted in (0, 1, 2, 3, 6, 8, 99)] == [0, 0.5, 1, 1.25, 1.75, 2, 2]
    assert accepted_at([Point(2, 1.0), Point(4, 0.5)], 4) == 1.0, "it could have left the last nodes out"
    assert accepted_at([], 3) == 0


def test_ratios_and_their_mean():
    ratios = ratios_at_equal_drafts([Point(4, 2.0)], [Point(2, 0.5), Point(4, 4.0), Point(0, 0.0)])
    assert ratios[:2] == [2.0, 0.5] and np.isnan(ratios[2])
    assert geometric_mean(ratios) == pytest.approx(1.0)
    assert np.isnan(geometric_mean([]))


def test_comparison_of_results():
    tallies = {}
    for name, drafted, accepted in (("ours", 20, 15), ("ours", 40, 20), ("theirs", 30, 10)):
        spec = SourceSpec(f"{name}@{drafted}", name, PromptLookupCandidates, drafted)
        tallies[spec] = Tally.of(1)
        tallies[spec].requests[:] = [10 + accepted, 10, drafted, accepted]
    (row,) = compare({"data": tallies}, "theirs")
    assert row == {
        "data_set": "data",
        "baseline": "theirs@30",
        "drafted": 3.0,
        "accepted": 1.0,
        "ratios": {"ours": pytest.approx(1.75)},
    }


def test_moving_average_weighs_by_steps():
    requests = np.array([[10, 2, 0, 0], [0, 0, 0, 0], [4, 4, 0, 0], [6, 1, 0, 0]])
    assert moving_average(requests, window=1).tolist() == [5, 1, 6]
    assert moving_average(requests, window=2) == pytest.approx([5, 14 / 6, 2])


def test_sources_that_need_a_target_are_refused():
    source = Scripted([])
    source.needs = frozenset({"scores"})
    with pytest.raises(ValueError, match=r"Scripted needs the target's scores, which a replay .* `model.generate`"):
        Replayer(source)
