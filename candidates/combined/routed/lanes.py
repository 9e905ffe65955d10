"""A drafter for the requests that go to it, and the log of what these take and yield."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from transformers import LogitsProcessorList

from ....drafts.price import LevelPrice
from ....drafts.tree import DraftTree
from ...base import TreeCandidateGenerator, label_of
from ...committed import Committed, Likeliest
from ...encoder_inputs import EncoderInputs
from .bandit import Outcome


@dataclass
class _Running:
    """A request, and what it has taken and yielded so far."""

    drafter: str
    kind: str
    sketch: np.ndarray | None = None
    counting: "Lane | None" = None  # the stage that counts tokens: the first that is told of some
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
        """Requests that run."""
        return len(self._running)

    def __contains__(self, request_id: Hashable) -> bool:
        return request_id in self._running

    def begin(self, request_id: Hashable, drafter: str, kind: str, sketch: np.ndarray | None) -> None:
        self._running[request_id] = _Running(drafter, kind, sketch)

    def drafted(self, request_ids: Sequence[Hashable], seconds: float) -> None:
        """One call of a drafter, whose time each of its requests is charged with: so much longer the step took."""
        self._drafted += seconds
        for name in request_ids:
            if name in self._running:
                self._running[name].drafting += seconds

    def committed(self, lane: "Lane", request_id: Hashable, num_tokens: int) -> None:
        """Of a request; the first tokens come with the prompt, whose time is no step's."""
        running = self._running.get(request_id)
        if running is None or not num_tokens or running.counting not in (None, lane):
            return
        now = self.clock()
        if running.counting is not None:
            running.tokens, running.steps = running.tokens + num_tokens, running.steps + 1
            running.rest += max(now - running.last - (self._drafted - running.drafted), 0.0)
        running.counting, running.last, running.drafted = lane, now, self._drafted

    def end(self, request_id: Hashable) -> None:
        """Unknown ids are ignored."""
        item = self._running.pop(request_id, None)
        if item is not None:
            counted = item.tokens, item.steps, item.drafting, item.rest
            self.on_end(Outcome(item.drafter, item.kind, *counted, item.sketch))


class Lane(TreeCandidateGenerator):
    """
    A drafter, or a stage of one, as the loop sees it: passes everything on and keeps the log.

    Args:
        route (`str`): The name under which requests go to it. What is learnt of its drafts is learnt under both names:
            two drafters may be sources of one name.
    """

    def __init__(self, source: TreeCandidateGenerator, log: RequestLog, route: str):
        self.source, self.log, self.route, self.label = source, log, route, f"{route}: {label_of(source)}"
        self.default_num_nodes, self.is_autoregressive = source.default_num_nodes, source.is_autoregressive
        self.width, self.heeds_prices = source.width, source.heeds_prices
        self.follows_target = source.follows_target
        self.needs, self.hidden_layers, self.num_likeliest = source.needs, source.hidden_layers, source.num_likeliest

    @property
    def name(self) -> str:
        return f"{self.route}: {self.source.name}"

    @property
    def origin(self) -> TreeCandidateGenerator:
        return self.source.origin

    @property
    def most_nodes(self) -> int:
        return self.source.most_nodes

    def couple(self, request_id: Hashable, processors: LogitsProcessorList, seed: int | None) -> None:
        self.source.couple(request_id, processors, seed)

    def attach(self, request_id: Hashable, *args: Any) -> None:
        self.source.attach(request_id, *args)

    def assign(self, request_id: Hashable, *args: Any, **kwargs: Any) -> None:
        self.source.assign(request_id, *args, **kwargs)

    def encode(self, rows: Mapping[Hashable, int], inputs: EncoderInputs) -> None:
        self.source.encode(rows, inputs)

    def start(self, request_id: Hashable, prompt: np.ndarray) -> None:
        self.source.start(request_id, prompt)

    def propose(
        self, request_ids: Sequence[Hashable], max_nodes: Sequence[int], price: LevelPrice | None = None
    ) -> list[DraftTree]:
        before = self.log.clock()
        try:
            arguments: dict[str, Any] = {"price": price} if self.heeds_prices else {}
            return self.source.propose(request_ids, max_nodes, **arguments)
        finally:
            self.log.drafted(request_ids, self.log.clock() - before)

    def drafted_by(self, request_id: Hashable, tree: DraftTree) -> list[str]:
        return [f"{self.route}: {label}" for label in self.source.drafted_by(request_id, tree)]

    def reuse(self, request_id: Hashable, length: int, earlier: Hashable | None) -> int:
        return self.source.reuse(request_id, length, earlier)

    def observe(self, request_id: Hashable, tokens: np.ndarray | Committed) -> None:
        num = len(tokens.tokens if isinstance(tokens, Committed) else tokens)
        self.log.committed(self, request_id, num)
        self.source.observe(request_id, tokens)

    def show(self, request_id: Hashable, committed: Committed) -> None:
        self.log.committed(self, request_id, len(committed.tokens))
        self.source.show(request_id, committed)

    def observe_likeliest(self, shown: Mapping[Hashable, Likeliest]) -> None:
        self.source.observe_likeliest(shown)

    def stop(self, request_id: Hashable) -> None:
        self.log.end(request_id)
        self.source.stop(request_id)

    def forget(self, request_id: Hashable) -> None:
        self.source.forget(request_id)
