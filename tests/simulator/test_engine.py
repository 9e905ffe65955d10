"""The simulated engine: closed forms, order, the tokens that were recorded, and what policies see of the real one."""

import copy
from typing import ClassVar

import numpy as np
import pytest

from benchmarks.load.arrivals import Trace
from benchmarks.load.requests import of_trace, with_acceptance
from hf_smartspec import Engine, PromptLookupCandidates, SmartSpecConfig, SuffixTreeCandidates
from hf_smartspec.candidates import StagedCandidates
from hf_smartspec.candidates.base import NoCandidates
from hf_smartspec.decoding.call import ModelLimits
from hf_smartspec.decoding.loop import DecodingLoop
from hf_smartspec.drafts.price import LevelPrice
from hf_smartspec.goodput import CostModel, DraftCost, FixedLength, GoodputAuction, NoSpeculation
from hf_smartspec.goodput.papers.length import expected_length, expected_tree_length
from hf_smartspec.goodput.papers.policies import Oracle
from hf_smartspec.goodput.papers.smartspec import StepGoodput
from hf_smartspec.simulator import (
    EventClock,
    LoadRequest,
    LoadResult,
    Served,
    SimulatedEngine,
    TableCandidates,
    poisson,
    tree_size,
)
from hf_smartspec.simulator.results import pooled
from hf_smartspec.simulator.sources import TimedCandidates
from tests.generate.helpers import BOS, VOCAB_SIZE, tiny_llama

from ..serving.helpers import TIMEOUT
from .helpers import rng

COST = CostModel(alpha=1e-6, gamma=1e-3, delta=20e-3)


def same_requests(times, prompt_len=16, output_len=50):
    return LoadRequest.of_lengths(np.asarray(times, float), [prompt_len] * len(times), [output_len] * len(times), rng())


def chain(length=5):
    return TableCandidates((1,) * length, is_autoregressive=True)


def test_a_lone_request_takes_its_prefill_and_one_step_per_token():
    request, step = same_requests([3.0])[0], []
    result = SimulatedEngine(COST, NoCandidates()).run([request], NoSpeculation())
    for position in range(50):  # the prompt's step yields the first token
        step.append(COST.seconds(0, 16) if position == 0 else COST.seconds(15 + position, 1))
    (served,) = result.served
    assert served.arrival == 3.0 and served.num_tokens == 50
    assert served.first_token == pytest.approx(3.0 + step[0])
    assert served.latency == pytest.approx(sum(step))
    assert result.statistics.seconds_forward == pytest.approx(served.latency), "the loop's own clock is the same"
    assert result.batched_tokens == 16 + 49 and result.statistics.forwards == 50
    late = SimulatedEngine(COST, NoCandidates(), request_seconds=0.5).run([request], NoSpeculation())
    assert late.mean_latency == pytest.approx(0.5 + sum(step))
    assert result.seconds_waited == late.seconds_waited == 0, "what it takes to prepare a request is no waiting"


def test_stages_keep_their_threshold():
    """A fixed number of nodes: the later source is asked where the first one's tree promises no more than that."""
    requests, num_drafted = with_acceptance(same_requests([0.0]), 0.9, rng(1)), []
    for threshold in (0.1, 9.0):
        source = StagedCandidates([chain(2), chain(6)], threshold)
        result = SimulatedEngine(COST, source, max_nodes=8).run(requests, FixedLength(6))
        num_drafted.append(result.statistics.drafted_tokens / result.statistics.steps)
    assert num_drafted[0] <= 2 < 4 < num_drafted[1]


def test_requests_wait_while_the_one_slot_is_taken():
    requests = same_requests([0.0, 0.0, 0.0])
    result = SimulatedEngine(COST, NoCandidates(), max_batch_size=1).run(requests, NoSpeculation())
    first, second, _ = result.served
    assert result.seconds_waited == pytest.approx(first.end + second.end)


def test_latency_at_low_load_is_the_service_time_and_rises_with_load():
    alone = SimulatedEngine(COST, NoCandidates()).run(same_requests([0.0]), NoSpeculation()).mean_latency
    latencies = []
    for rate in (0.02, 2.0, 8.0):
        requests = same_requests(poisson(rate, 100, rng(1)))
        latencies.append(SimulatedEngine(COST, NoCandidates()).run(requests, NoSpeculation()).mean_latency)
    assert latencies[0] == pytest.approx(alone, rel=0.02)
    assert latencies[0] < latencies[1] < latencies[2]


def test_one_slot_is_a_queue_with_deterministic_service():
    """M/D/1: the mean wait is load / (2 * (1 - load)) services; 500 requests bring it within 15 %."""
    service = SimulatedEngine(COST, NoCandidates()).run(same_requests([0.0], 4, 2), NoSpeculation()).mean_latency
    requests = same_requests(poisson(0.5 / service, 500, rng(2)), 4, 2)
    result = SimulatedEngine(COST, NoCandidates(), max_batch_size=1).run(requests, NoSpeculation())
    assert result.mean_latency == pytest.approx(service * (1 + 0.5), rel=0.15)


@pytest.mark.parametrize("alpha", [0.0, 0.4, 0.8, 1.0])
@pytest.mark.parametrize("length", [1, 4])
def test_chains_of_constant_alpha_yield_eq_8(alpha, length):
    """About 2,000 steps or more: 4 % is over 5 standard errors."""
    requests = with_acceptance(same_requests([0.0] * 8, output_len=1000), alpha, rng(3))
    result = SimulatedEngine(COST, chain(length)).run(requests, FixedLength(length))
    per_step = result.num_tokens / result.statistics.steps
    assert per_step == pytest.approx(float(expected_length(alpha, length)), rel=0.04)


def test_trees_of_independent_heads_yield_eq_10():
    widths, alpha = (3, 2, 2), 0.5
    requests = with_acceptance(same_requests([0.0] * 8, output_len=1000), alpha, rng(4), width=3)
    source = TableCandidates(widths, is_autoregressive=False)
    assert tree_size(widths) == source.default_num_nodes == 3 + 6 + 12
    result = SimulatedEngine(COST, source).run(requests, FixedLength(21))
    per_step = result.num_tokens / result.statistics.steps
    assert per_step == pytest.approx(expected_tree_length([alpha] * 3, widths), rel=0.04)


def test_made_up_drafts_are_calibrated_and_the_same_for_every_policy():
    (request,) = with_acceptance(same_requests([0.0], output_len=20_000), 0.6, rng(5), width=2)
    shares = [(request.ranks == rank).mean() for rank in (0, 1)]
    assert shares == pytest.approx([0.6, 0.24], abs=0.02)
    assert request.probs[0] == pytest.approx([0.6, 0.24])
    source = TableCandidates((1, 1, 1), is_autoregressive=True)
    source.start(request, request.prompt)
    longer = source.propose([request], [3])[0].tokens
    assert source.propose([request], [1])[0].tokens.tolist() == longer[:1].tolist()
    source.observe(request, request.response[:1])
    assert source.propose([request], [2])[0].tokens.tolist() == longer[1:].tolist()
    assert source.num_right(request) == 3 if (request.ranks[1:4] == 0).all() else source.num_right(request) < 3


def test_every_policy_says_what_was_recorded():
    """Real text through real sources: drafts cannot change it."""
    text = rng(6).integers(0, 20, 400)  # repeats itself
    requests = [
        LoadRequest(0.01 * index, text[: 30 + index], 40 + index, text[30 + index : 30 + index + size])
        for index, size in enumerate([70, 20, 0, 55, 41])
    ]
    for source in (PromptLookupCandidates(), SuffixTreeCandidates(max_bytes=2**20), NoCandidates()):
        for policy in (NoSpeculation(), FixedLength(3), GoodputAuction(copy.deepcopy(COST))):
            said = {}
            engine = SimulatedEngine(COST, source, max_batch_size=2, end_id=99)
            result = engine.run(requests, policy, on_served=said.__setitem__)
            for request in requests:  # up to its limit, or to the end and the token behind it
                full = [*request.response.tolist(), 99]
                assert said[request] == full[: request.max_new_tokens]
            assert [item.num_tokens for item in result.served] == [len(said[request]) for request in requests]


def test_requests_begin_in_the_order_of_their_arrival():
    requests = same_requests([0.3, 0.0, 0.2, 0.1], output_len=5)
    result = SimulatedEngine(COST, NoCandidates(), max_batch_size=1).run(requests, NoSpeculation())
    ends = {request.arrival: served.end for request, served in zip(requests, result.served)}
    assert [ends[time] for time in sorted(ends)] == sorted(ends.values())
    with pytest.raises(ValueError, match="may reach 21 tokens"):
        SimulatedEngine(COST, NoCandidates(), max_tokens=20).run(requests, NoSpeculation())


class Watched(StepGoodput):
    """Notes how many requests every step runs."""

    def shapes(self, rows):
        self.sizes = [*getattr(self, "sizes", []), len(rows)]
        return super().shapes(rows)


def test_algorithm_2_lets_as_many_requests_run_as_have_the_highest_goodput():
    """Candidate batches are prefixes of the queue: two run where a third token makes a step ten times as long."""
    steep = CostModel(0.0, 0.0, 0.0, knots=(1, 2, 3, 40), curve=(1.0, 1.0, 10.0, 10.0))
    requests = [LoadRequest(when / 1000, np.array([7]), 12, np.arange(10, 22)) for when in range(5)]
    for cost, largest in ((steep, 2), (COST, 5)):
        policy = Watched(copy.deepcopy(cost), max_length=0)
        result = SimulatedEngine(cost, NoCandidates(), max_batch_size=8).run(requests, policy)
        assert max(policy.sizes) == largest
        ends = [served.end for served in result.served]
        assert ends == sorted(ends) and len(ends) == 5, "first come, first served"
    policy = Watched(copy.deepcopy(COST), max_length=0)
    SimulatedEngine(COST, NoCandidates(), max_batch_size=8, max_tokens=200).run(requests, policy)
    assert 1 < max(policy.sizes) < 5, "HasSlot: lines 5 to 7"


def test_timed_sources_pass_on_what_the_loop_asks_of_the_source_itself():
    class Priced(NoCandidates):
        heeds_prices, default_num_nodes, most_nodes = True, 3, 9
        prices: ClassVar[list] = []

        def propose(self, request_ids, max_nodes, price=None):
            self.prices.append(price)
            return []

    timed = TimedCandidates(Priced(), EventClock(), DraftCost())
    assert timed.heeds_prices and (timed.default_num_nodes, timed.most_nodes) == (3, 9)
    timed.propose([], [], price := LevelPrice(1.0, 0.1, 0.01))
    assert Priced.prices == [price]


def test_chains_of_a_table_end_where_a_level_is_not_worth_its_price():
    """A level is drafted for all rows that want it, if together they gain more than a call."""
    good, bad = same_requests([0.0, 0.0])
    (good,), (bad,) = with_acceptance([good], 0.9, rng()), with_acceptance([bad], 0.5, rng())
    source = TableCandidates((1,) * 9, is_autoregressive=True, heeds_prices=True)
    for request in (good, bad):
        source.start(request, request.prompt)

    def depths(price, limits=(9, 9)):
        return [len(tree) for tree in source.propose([good, bad], limits, price)]

    assert depths(None) == [9, 9] and depths(LevelPrice(0.0, 0.0, 0.0)) == [9, 9]
    # Paths of 0.9 ** depth and 0.5 ** depth: 0.0625 is not worth 0.1, and 0.9 ** 5 is not worth 0.5 + 0.1.
    assert depths(LevelPrice(0.5, 0.1, 0.0)) == [5, 4]
    assert depths(LevelPrice(0.0, 0.0, 0.2)) == [9, 3], "nor is a node that costs more to verify than it promises"
    assert depths(LevelPrice(9.0, 0.0, 0.0)) == [1, 1] and depths(LevelPrice(0.0, 0.0, 0.0), (4, 0)) == [4, 0]
    steps = ((0.0, 0.0), (0.0, 0.0), (0.0, 0.6))  # two more levels for nothing, and all behind them at a price
    assert depths(LevelPrice(0.0, 0.0, 0.0, deeper=steps)) == [5, 3]


def test_drafting_and_the_rest_of_a_step_take_their_time():
    requests = with_acceptance(same_requests([0.0, 0.0]), 1.0, rng())
    draft = DraftCost(per_call=0.5, per_row=0.25, is_autoregressive=True)
    result = SimulatedEngine(COST, chain(3), draft, step_seconds=2.0).run(requests, FixedLength(3))
    counts = result.statistics
    drafted = [3] * 12 + [2]  # 4 tokens a step; the last two of 50 are drafted together, though one comes free
    assert counts.forwards == 13
    assert counts.seconds_draft == pytest.approx(sum(0.5 * size + 0.25 * 2 * size for size in drafted))
    assert result.seconds == pytest.approx(counts.seconds_forward + counts.seconds_draft + 2.0 * 13)


def test_prompts_that_begin_alike_share_their_prefix():
    blocks = [np.array([7, 8]), np.array([7, 9])]
    trace = Trace(np.array([0.0, 100.0]), np.array([1000, 1024]), np.array([3, 3]), blocks)
    requests = of_trace(trace, rng())
    engine = SimulatedEngine(COST, NoCandidates())
    result = engine.run(requests, NoSpeculation())
    assert engine.memory.num_reused == 512
    first, second = (item.first_token - item.arrival for item in result.served)
    assert second < 0.7 * first


class Watching(FixedLength):
    """Notes down what a policy is shown."""

    def __init__(self, num_nodes):
        super().__init__(num_nodes)
        self.seen, self.outcomes = [], []

    def max_nodes(self, rows, stage, trees):
        self.seen.append((rows.context_lens.tolist(), rows.caps.tolist(), rows.num_prefill_tokens, rows.num_waiting))
        return super().max_nodes(rows, stage, trees)

    def observe(self, outcome):
        chosen = [tree.tokens.tolist() for tree in outcome.verified]
        self.outcomes.append((chosen, list(outcome.accepted), [line.tolist() for line in outcome.tokens]))


def test_policies_see_the_same_as_in_the_real_engine():
    model = tiny_llama()
    prompts = [rng(index).integers(BOS + 1, VOCAB_SIZE, size) for index, size in enumerate([40, 3, 25, 9, 60, 17])]
    settings = {"max_batch_size": 3, "max_prefill_tokens": 32}
    real = Watching(4)
    engine = Engine(model, SmartSpecConfig(PromptLookupCandidates(), policy=real), **settings)
    for index, prompt in enumerate(prompts):
        engine.add_request(prompt, str(index), max_new_tokens=12 + index, eos_token_id=None)
    with engine:
        outputs = [engine.get_result(str(index), timeout=TIMEOUT) for index in range(len(prompts))]

    simulated, said = Watching(4), {}
    requests = [
        LoadRequest(0.0, prompt, 12 + index, np.array(output.generated_tokens))
        for index, (prompt, output) in enumerate(zip(prompts, outputs))
    ]
    twin = SimulatedEngine(COST, PromptLookupCandidates(), max_nodes=4, end_id=-1, **settings)
    twin.run(requests, simulated, on_served=said.__setitem__)
    assert simulated.seen == real.seen
    assert simulated.outcomes == real.outcomes
    assert [said[request] for request in requests] == [output.generated_tokens for output in outputs]


def test_rows_that_run_move_to_the_first_slots_when_others_leave():
    engine = SimulatedEngine(COST, NoCandidates(), max_batch_size=4)
    loop = DecodingLoop(NoSpeculation(), ModelLimits(10, None), release=engine.memory.release, clock=engine.clock)
    calls = [engine.new_call(request) for request in same_requests([0.0] * 4)]
    for call in calls:
        engine.memory.place(call.requests[0], loop.running)
        engine.forward.set_text(call.requests[0].cache_row, np.ones(100, np.int64))
        loop.add(call)
    loop.step()
    loop.remove(calls[0])  # cancelled: its row is kept, for prompts that begin alike
    loop.remove(calls[2])
    loop.step()
    assert {call.requests[0].cache_row.slot for call in calls[1::2]} == {0, 1}
    assert loop.running == [calls[1].requests[0], calls[3].requests[0]]


def test_the_oracle_drafts_nothing_in_vain():
    requests = with_acceptance(same_requests([0.0] * 4), 0.5, rng(8))
    engine = SimulatedEngine(COST, TableCandidates((1,) * 5, is_autoregressive=False))
    result = engine.run(requests, Oracle(copy.deepcopy(COST), engine.continuation))
    assert result.statistics.drafted_tokens == result.statistics.accepted_tokens > 0
    plain = SimulatedEngine(COST, NoCandidates()).run(requests, NoSpeculation())
    assert result.mean_latency < plain.mean_latency


def test_what_policies_learn_does_not_change_the_truth():
    """A policy that is told half the true cost corrects its own copy."""
    cost = CostModel(alpha=0.0, gamma=0.5e-3, delta=10e-3)
    requests = with_acceptance(same_requests([0.0] * 4, output_len=200), 0.7, rng(9))
    engine = SimulatedEngine(COST, chain())
    engine.run(requests, GoodputAuction(cost))
    assert engine.forward.cost.correction(4) == 1.0
    assert cost.correction(24) == pytest.approx(2, rel=0.1), "4 rows of 6 tokens, as in most steps"


def test_results_tell_latencies_and_goodput():
    result = LoadResult([Served(1.0, 2.0, 5.0, 10), Served(2.0, 4.0, 4.0, 20)])
    assert result.latencies.tolist() == [4.0, 2.0] and result.mean_latency == 3.0 and result.latency(100) == 4.0
    assert result.first_token == 1.5 and result.num_tokens == 30 and result.goodput == 30 / 4.0
    both = pooled([result, LoadResult(), result])
    assert both.goodput == result.goodput and both.mean_latency == 3.0 and len(both.served) == 4
    assert np.isnan(LoadResult().mean_latency) and np.isnan(LoadResult().goodput)


def test_acceptance_may_differ_between_requests():
    good, bad = with_acceptance(same_requests([0.0, 0.0], output_len=500), [0.9, 0.1], rng(10))
    assert (good.ranks == 0).mean() > 0.8 > 0.2 > (bad.ranks == 0).mean()
    with pytest.raises(ValueError, match="`alphas`"):
        with_acceptance([good], 1.5, rng())
    with pytest.raises(ValueError, match="`widths`"):
        TableCandidates((2, 0), is_autoregressive=False)


def test_sources_that_need_a_target_are_refused():
    class Looking(TableCandidates):
        needs = frozenset({"hidden_states", "scores"})

    with pytest.raises(ValueError, match=r"Looking needs the target's hidden_states and scores, which a simulation"):
        SimulatedEngine(COST, Looking((1, 1), is_autoregressive=True))
