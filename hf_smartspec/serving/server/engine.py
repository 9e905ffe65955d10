"""An engine as a server needs it: requests with options beside its own drafting, and numbers to watch."""

from dataclasses import replace
from typing import Any, NamedTuple

from ...prepare.resolve import Assistant
from ..engine import Engine


class EngineLoad(NamedTuple):
    """Requests that run and that wait, and the share of key/value memory that the running ones take, in [0, 1]."""

    num_running: int
    num_waiting: int
    kv_usage: float


class ServedEngine(Engine):
    """See `Engine`."""

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
