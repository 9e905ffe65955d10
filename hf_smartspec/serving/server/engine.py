"""The engine of a server: with drafting options per request, and its load."""

from dataclasses import replace
from typing import Any, NamedTuple

from ...candidates.text.suffix.source import SuffixTreeCandidates
from ...prepare.sources import Assistant
from ..engine import Engine
from ..memory.base import RequestMemory
from ..memory.budget import Budget
from ..memory.choice import memory_of


class EngineLoad(NamedTuple):
    """Numbers of running and waiting requests, and the share of key/value memory in use, in [0, 1]."""

    num_running: int
    num_waiting: int
    kv_usage: float


class ServedEngine(Engine):
    """
    `Engine` of a server.

    Args:
        num_sharing (`int`): Engines that share this machine's memory: the default of `max_kv_bytes` is divided among
            them.
    """

    def __init__(self, *args: Any, num_sharing: int = 1, **kwargs: Any):
        self._num_sharing = num_sharing
        super().__init__(*args, **kwargs)

    def _new_memory(self, max_batch_size: int, max_bytes: int | None) -> RequestMemory:
        return memory_of(self.model, max_batch_size, Budget(max_bytes, self._num_sharing))

    @property
    def max_kv_bytes(self) -> int:
        """Return the bound on keys and values."""
        return self._memory.max_bytes

    @property
    def suffix_trees(self) -> list[SuffixTreeCandidates]:
        """Return the suffix trees that draft for the engine's requests."""
        stages = self.own_assistant().source.stages
        return [stage for stage in stages if isinstance(stage, SuffixTreeCandidates)]

    def own_assistant(self, num_nodes: int | None = None, **options: Any) -> Assistant:
        """
        Return the engine's own assistant with options for one request.

        Args:
            num_nodes (`int`, *optional*): Draft nodes per step; if omitted, the engine's policy decides.
            options: `namespace` and `references`, as in `SmartSpecConfig`.
        """
        if num_nodes is not None:
            options |= {"num_nodes": num_nodes, "policy": None}
        return Assistant(replace(self._assistant.config, **options), self._assistant.source)

    def drop_request(self, request_id: str) -> None:
        """Cancel a request and discard its output; a finished output is discarded, too."""
        self.cancel_request(request_id)
        self._results.discard(request_id)

    @property
    def num_preemptions(self) -> int:
        """Return how often a request has given way to one of another namespace."""
        return self._runner.num_suspended

    @property
    def load(self) -> EngineLoad:
        scheduler = self._memory.scheduler
        num_waiting = scheduler.num_waiting + len(self._runner._inbox)
        taken = sum(list(scheduler.running.values()))  # a copy: the engine's thread goes on
        return EngineLoad(len(scheduler.running), num_waiting, taken / scheduler.max_tokens)
