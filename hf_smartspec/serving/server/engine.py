"""An engine as a server needs it: requests with options beside its own drafting, and numbers to watch."""

from dataclasses import replace
from typing import Any, NamedTuple

from ...candidates.text.suffix.source import SuffixTreeCandidates
from ...prepare.sources import Assistant
from ..engine import Engine
from ..memory.base import RequestMemory
from ..memory.budget import Budget
from ..memory.choice import memory_of


class EngineLoad(NamedTuple):
    """Requests that run and that wait, and the share of key/value memory that the running ones take, in [0, 1]."""

    num_running: int
    num_waiting: int
    kv_usage: float


class ServedEngine(Engine):
    """
    See `Engine`.

    Args:
        num_sharing (`int`): Engines on this machine that share its memory: where no `max_kv_bytes` are given, each
            takes its part.
    """

    def __init__(self, *args: Any, num_sharing: int = 1, **kwargs: Any):
        self._num_sharing = num_sharing
        super().__init__(*args, **kwargs)

    def _new_memory(self, max_batch_size: int, max_bytes: int | None) -> RequestMemory:
        return memory_of(self.model, max_batch_size, Budget(max_bytes, self._num_sharing))

    @property
    def max_kv_bytes(self) -> int:
        """Bound on keys and values."""
        return self._memory.max_bytes

    @property
    def suffix_trees(self) -> list[SuffixTreeCandidates]:
        """Those that draft for its requests from earlier ones."""
        stages = self.own_assistant().source.stages
        return [stage for stage in stages if isinstance(stage, SuffixTreeCandidates)]

    def own_assistant(self, num_nodes: int | None = None, **options: Any) -> Assistant:
        """
        What drafts for the engine's requests, for one with options of its own.

        Args:
            num_nodes (`int`, *optional*): Draft nodes per step; where not given, as the engine decides.
            options: `namespace` and `references`, as in `SmartSpecConfig`.
        """
        if num_nodes is not None:
            options |= {"num_nodes": num_nodes, "policy": None}
        return Assistant(replace(self._assistant.config, **options), self._assistant.source)

    def drop_request(self, request_id: str) -> None:
        """Ends a request whose output nobody wants any more; finished and unknown ones are forgotten."""
        self.cancel_request(request_id)
        self._results.discard(request_id)

    @property
    def num_preemptions(self) -> int:
        """How often a request has given way to one of another namespace."""
        return self._runner.num_suspended

    @property
    def load(self) -> EngineLoad:
        scheduler = self._memory.scheduler
        num_waiting = scheduler.num_waiting + len(self._runner._inbox)
        taken = sum(list(scheduler.running.values()))  # a copy: the engine's thread goes on
        return EngineLoad(len(scheduler.running), num_waiting, taken / scheduler.max_tokens)
