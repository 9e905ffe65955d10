"""A drafter for the requests that are routed to it, and the log of their time and tokens."""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import numpy as np

from ....drafts.price import LevelPrice
from ....drafts.tree import DraftTree
from ...base import TreeCandidateGenerator, label_of
from ...committed import Committed
from ...forwarding import ForwardingSource
from .bandit import Outcome


@dataclass
class _Running:
    """A running request, with its time and tokens so far."""

    drafter: str
    kind: str
    sketch: np.ndarray | None = None
    counting: "Lane | None" = None  # the stage that counts tokens: the first that observes some
    tokens: int = 0
    steps: int = 0
    drafting: float = 0.0
    rest: float = 0.0
    last: float = 0.0  # when tokens were last committed,
    drafted: float = 0.0  # and how much all had drafted by then, in seconds


class RequestLog:
    """
    Args:
        clock (`Callable`): Seconds.
        on_end (`Callable`): Gets the outcome of every request that ends.
    """

    def __init__(self, clock: Callable[[], float], on_end: Callable[[Outcome], None]):
        self.clock, self.on_end = clock, on_end
        self._running: dict[Hashable, _Running] = {}
        self._drafted = 0.0  # seconds, of all drafters

    def __len__(self) -> int:
        """Return the number of running requests."""
        return len(self._running)

    def __contains__(self, request_id: Hashable) -> bool:
        return request_id in self._running

    def begin(self, request_id: Hashable, drafter: str, kind: str, sketch: np.ndarray | None) -> None:
        self._running[request_id] = _Running(drafter, kind, sketch)

    def drafted(self, request_ids: Sequence[Hashable], seconds: float) -> None:
        """Charge one call of a drafter to each of its requests: the step took so much longer for all of them."""
        self._drafted += seconds
        for name in request_ids:
            if name in self._running:
                self._running[name].drafting += seconds

    def committed(self, lane: "Lane", request_id: Hashable, num_tokens: int) -> None:
        """Count committed tokens of a request, but not the first ones: their step ran the prompt."""
        running = self._running.get(request_id)
        if running is None or not num_tokens or running.counting not in (None, lane):
            return
        now = self.clock()
        if running.counting is not None:
            running.tokens, running.steps = running.tokens + num_tokens, running.steps + 1
            running.rest += max(now - running.last - (self._drafted - running.drafted), 0.0)
        running.counting, running.last, running.drafted = lane, now, self._drafted

    def end(self, request_id: Hashable) -> None:
        """End a request and report its outcome; unknown ids are ignored."""
        item = self._running.pop(request_id, None)
        if item is not None:
            counted = item.tokens, item.steps, item.drafting, item.rest
            self.on_end(Outcome(item.drafter, item.kind, *counted, item.sketch))


class Lane(ForwardingSource):
    """
    A drafter, or a stage of one, as the loop calls it: forwards everything and keeps the log.

    Args:
        route (`str`): The name under which requests go to it. What is learnt of its drafts is learnt under both names:
            two drafters may be sources of one name.
    """

    def __init__(self, source: TreeCandidateGenerator, log: RequestLog, route: str):
        super().__init__(source)
        self.observes_every_step = True  # the log counts steps
        self.log, self.route, self.label = log, route, f"{route}: {label_of(source)}"

    @property
    def name(self) -> str:
        return f"{self.route}: {self.source.name}"

    def propose(
        self, request_ids: Sequence[Hashable], max_nodes: Sequence[int], price: LevelPrice | None = None
    ) -> list[DraftTree]:
        before = self.log.clock()
        try:
            return super().propose(request_ids, max_nodes, price)
        finally:
            self.log.drafted(request_ids, self.log.clock() - before)

    def drafted_by(self, request_id: Hashable, tree: DraftTree) -> list[str]:
        return [f"{self.route}: {label}" for label in super().drafted_by(request_id, tree)]

    def observe(self, request_id: Hashable, tokens: np.ndarray | Committed) -> None:
        self.log.committed(self, request_id, len(Committed.of(tokens).tokens))
        super().observe(request_id, tokens)

    def stop(self, request_id: Hashable) -> None:
        self.log.end(request_id)
        super().stop(request_id)
