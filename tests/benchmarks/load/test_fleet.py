"""Several simulated engines: who serves what, when, and with whose text."""

from dataclasses import replace

import numpy as np

from benchmarks.load.replicas.fleet import SimulatedFleet
from hf_smartspec import PromptLookupCandidates, SuffixTreeCandidates
from hf_smartspec.candidates.base import NoCandidates
from hf_smartspec.goodput import CostModel, FixedLength, NoSpeculation
from hf_smartspec.replicas.routing import Affinity, LeastLoaded, RoundRobin
from hf_smartspec.simulator import LoadRequest, SimulatedEngine
from tests.simulator.helpers import rng

COST = CostModel(alpha=1e-6, gamma=1e-3, delta=20e-3)


def engines(num, new_source=NoCandidates, **options):
    return [SimulatedEngine(COST, new_source(), **options) for _ in range(num)]


def requests(times, prompt_len=32, output_len=10):
    return LoadRequest.of_lengths(np.asarray(times, float), [prompt_len] * len(times), [output_len] * len(times), rng())


def same_answers(answer, *times):
    """To prompts that have nothing in common."""
    return [
        LoadRequest(time, rng().integers(2000, 9000, 16) + number, len(answer), answer)
        for number, time in enumerate(times)
    ]


def none(engine):
    return NoSpeculation()


def test_one_replica_is_an_engine():
    items = requests([0.0, 0.01, 0.02, 3.0, 3.001])
    alone = engines(1, PromptLookupCandidates)[0].run(items, FixedLength(3))
    result = SimulatedFleet(engines(1, PromptLookupCandidates), RoundRobin()).run(items, lambda _: FixedLength(3))
    together = result.together
    assert [item.arrival for item in together.served] == [item.arrival for item in items]
    assert sorted(together.served) == sorted(alone.served)
    assert together.statistics.forwards == alone.statistics.forwards


def test_requests_that_come_at_once_are_served_at_once():
    items = requests([1.0, 1.0, 1.0, 1.01, 3.0, 3.0])
    (alone,) = engines(1, request_seconds=0.05)
    fleet = SimulatedFleet(engines(1, request_seconds=0.05), RoundRobin())
    together = fleet.run(items, none).together
    assert sorted(together.served) == sorted(alone.run(items, NoSpeculation()).served)


def test_two_replicas_work_at_the_same_time():
    items = requests([0.0, 0.0])
    one = SimulatedFleet(engines(1, max_batch_size=1), RoundRobin()).run(items, none)
    two = SimulatedFleet(engines(2, max_batch_size=1), RoundRobin()).run(items, none)
    assert [len(result.served) for result in two.replicas] == [1, 1]
    assert one.together.served[1].latency > 1.9 * two.together.served[1].latency
    assert two.together.served[0].latency == two.together.served[1].latency


def test_routers_see_what_runs_and_waits_when_a_request_comes():
    seen = []

    class Watching(LeastLoaded):
        def choose(self, loads, prompt, namespace=""):
            seen.append([(item.running, item.waiting) for item in loads])
            return super().choose(loads, prompt, namespace)

    # The third comes while two run; the last when all is over.
    items = requests([0.0, 0.0, 0.0, 0.1, 60.0], output_len=20)
    SimulatedFleet(engines(2, max_batch_size=1), Watching()).run(items, none)
    assert seen[0] == [(0, 0), (0, 0)] and seen[1] == [(0, 1), (0, 0)]
    assert sum(running for running, _ in seen[3]) == 2 and sum(waiting for _, waiting in seen[3]) == 1
    assert seen[4] == [(0, 0), (0, 0)]


def test_beginnings_are_reused_where_they_were_served():
    systems = rng().integers(0, 10**6, (4, 64))
    items = [
        replace(item, prompt=np.concatenate([systems[number % 4], item.prompt]))
        for number, item in enumerate(requests(np.arange(24) * 0.4 + 0.05 * (np.arange(24) % 3)))
    ]
    shares = {}
    for router in (Affinity(), RoundRobin()):
        items = [replace(item) for item in items]
        order = rng().permutation(len(items))
        shuffled = [replace(items[place], arrival=items[at].arrival) for at, place in enumerate(order)]
        result = SimulatedFleet(engines(4), router).run(shuffled, none)
        shares[type(router)] = result.as_dict()["reused_share"]
    assert shares[Affinity] > 1.2 * shares[RoundRobin] > 0


def test_what_is_exchanged_is_drafted_everywhere():
    answer = rng().integers(10, 1000, 30)
    items = same_answers(answer, 0.0, 7.0, 20.0)
    sources: list[SuffixTreeCandidates] = []

    def exchange():
        times.append(max(engine.clock.now for engine in fleet.engines))
        for _, namespace, tokens in sources[0].outputs():
            sources[1].add_outputs([tokens], namespace, progress=False)

    accepted = []
    for shares in (None, exchange):
        times = []
        sources = [SuffixTreeCandidates(max_bytes=2**20) for _ in range(2)]
        fleet = SimulatedFleet([SimulatedEngine(COST, source) for source in sources], RoundRobin(), shares, 5.0)
        result = fleet.run([replace(item) for item in items], lambda _: FixedLength(4))
        accepted.append(result.replicas[1].statistics.accepted_tokens)
    assert times[0] < 5 and 7 < times[1] == times[2] == times[3] < 10 and len(times) == 4  # until then, and no further
    assert accepted[1] > accepted[0] + 10


def test_tenants_draft_from_their_own_text_only():
    answer = rng().integers(10, 1000, 30)
    first, second = same_answers(answer, 0.0, 20.0)
    accepted = {}
    for namespace in ("one", "two"):
        items = [replace(first, namespace="one"), replace(second, namespace=namespace)]
        engine = SimulatedEngine(COST, SuffixTreeCandidates(max_bytes=2**20))
        accepted[namespace] = engine.run(items, FixedLength(4)).statistics.accepted_tokens
    assert accepted["one"] > accepted["two"] + 10
