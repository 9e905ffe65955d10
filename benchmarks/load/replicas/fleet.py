"""Several engines in virtual time, and the router in front of them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hf_smartspec.goodput import LengthPolicy
from hf_smartspec.replicas.routing import ReplicaLoad, Router
from hf_smartspec.simulator import LoadRequest, LoadResult, SimulatedEngine
from hf_smartspec.simulator.engine import Run


@dataclass
class FleetResult:
    """
    Result of a load on a fleet.

    Args:
        replicas (list of `LoadResult`): Results of each replica.
        reused (list of `int`): Prompt tokens of each replica that were found in its cache.
        prompt_tokens (`int`): Prompt tokens of all requests.
    """

    replicas: list[LoadResult]
    reused: list[int]
    prompt_tokens: int

    @property
    def together(self) -> LoadResult:
        """The results of all replicas as one, in the order of arrivals."""
        total = LoadResult()
        for result in self.replicas:
            total.served += result.served
            total.statistics += result.statistics
            total.batched_tokens += result.batched_tokens
            total.seconds_waited += result.seconds_waited
        total.served.sort(key=lambda item: item.arrival)
        return total

    def as_dict(self) -> dict[str, float]:
        counts = [len(result.served) for result in self.replicas]
        return self.together.as_dict() | {
            "reused_share": sum(self.reused) / max(self.prompt_tokens, 1),
            "imbalance": max(counts) * len(counts) / max(sum(counts), 1),
        }


class SimulatedFleet:
    """
    Replicas of a service, each a `SimulatedEngine` with its own source, and a router that reads their current load.

    Args:
        engines (sequence of `SimulatedEngine`): The replicas.
        router (`Router`): Chooses the replica of each request at its arrival.
        exchange (`Callable`, *optional*): Shares what the replicas' sources have learnt; takes no virtual time.
        interval (`float`): Seconds between two calls of `exchange`.
    """

    def __init__(
        self,
        engines: Sequence[SimulatedEngine],
        router: Router,
        exchange: Callable[[], object] | None = None,
        interval: float = 30.0,
    ):
        self.engines, self.router = list(engines), router
        self.exchange, self.interval = exchange, interval

    def run(
        self, requests: Sequence[LoadRequest], new_policy: Callable[[SimulatedEngine], LengthPolicy]
    ) -> FleetResult:
        """
        Serve requests at their arrival times, until the last one is answered.

        Raises:
            ValueError: before anything runs, for a request that can never fit into memory.
        """
        reused = [engine.memory.num_reused for engine in self.engines]
        runs = [engine.begin(requests, new_policy(engine)) for engine in self.engines]
        for run in runs:
            run.coming.clear()  # the router adds each request at its arrival
        due = self.interval
        for request in sorted(requests, key=lambda item: item.arrival):
            while self.exchange is not None and due <= request.arrival:
                _until(runs, due)
                self.exchange()
                due += self.interval
            _until(runs, request.arrival)
            loads = [
                ReplicaLoad(number, len(run.loop.running), run.memory.scheduler.num_waiting + len(run.coming))
                for number, run in enumerate(runs)
            ]
            runs[self.router.choose(loads, request.prompt, request.namespace)].coming.append(request)
        for run in runs:
            while run.step():
                pass
        return FleetResult(
            [run.result() for run in runs],
            [engine.memory.num_reused - before for engine, before in zip(self.engines, reused)],
            sum(len(request.prompt) for request in requests),
        )


def _until(runs: Sequence[Run], time: float) -> None:
    """
    Run all replicas until `time`. A step that has begun is not cut short, and none begins at `time` or later, since
    requests that arrive then belong to it.
    """
    for run in runs:
        while run.next_time < time:
            run.step()
