"""The engine of a server: with drafting options per request, and its load."""

from dataclasses import replace
from typing import Any, NamedTuple

from ...candidates import RoutedCandidates, SuffixTreeCandidates
from ...online.distillation import OnlineDistillation
from ...online.learner import LearningStatistics
from ...prepare.sources import Assistant
from ..engine import Engine


class EngineLoad(NamedTuple):
    """Numbers of running and waiting requests, and the share of key/value memory in use, in [0, 1]."""

    num_running: int
    num_waiting: int
    kv_usage: float


class ServedEngine(Engine):
    """Engine with numbers to watch, and with its assistant to be adapted to a request."""

    @property
    def max_kv_bytes(self) -> int:
        """Return the bound on keys and values."""
        return self._memory.max_bytes

    @property
    def suffix_trees(self) -> list[SuffixTreeCandidates]:
        """Return the suffix trees that draft for the engine's requests."""
        stages = self.own_assistant().source.stages
        return [stage for stage in stages if isinstance(stage, SuffixTreeCandidates)]

    def own_assistant(
        self, num_nodes: int | None = None, namespace: str = "", teaches: bool = True, **options: Any
    ) -> Assistant:
        """
        Return the engine's own assistant with options for one request.

        Args:
            num_nodes (`int`, *optional*): Draft nodes per step; if omitted, the engine's policy decides.
            namespace (`str`): The tenant's. A `RoutedCandidates` gets it as the tag, so that a tenant may have a
                drafter of its own.
            teaches (`bool`): Whether drafters may learn from the request.
            options: `references`, as in `SmartSpecConfig`.
        """
        options["namespace"] = namespace
        if num_nodes is not None:
            options |= {"num_nodes": num_nodes, "policy": None}
        if not teaches:
            options["online"] = None
        if namespace and any(isinstance(stage, RoutedCandidates) for stage in self._assistant.source.stages):
            options["tag"] = namespace
        return Assistant(replace(self._assistant.config, **options), self._assistant.source)

    @property
    def learning(self) -> list[LearningStatistics]:
        """Return the counts of drafters that learn from the engine's requests."""
        online = self.config.online
        return list(online.statistics.values()) if isinstance(online, OnlineDistillation) else []

    @property
    def num_preemptions(self) -> int:
        """Return how often a request has given way to one of another namespace."""
        return self._runner.num_suspended

    @property
    def load(self) -> EngineLoad:
        scheduler = self._memory.scheduler
        taken = sum(list(scheduler.running.values()))  # a copy: the engine's thread goes on
        return EngineLoad(len(self.running), len(self.waiting), taken / scheduler.max_tokens)
