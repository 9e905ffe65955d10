"""Prefill disabling: draft models skip prompts of requests that they would not draft for."""

from collections.abc import Hashable, Sequence

import numpy as np

from .estimates.decayed import DecayedRate


class PrefillGate:
    """
    Decides whether the draft model prefills a new request's prompt (SmartSpec, section 5, "Prefill disabling"). If
    drafts were empty in more than `threshold` of the latest steps, it does not, and does not draft for the request.

    Of every `retry` new requests that would be refused, the last `group` are admitted: otherwise the share would never
    change again. They come together, since a draft model's call may pay for several rows where it does not for one.

    Args:
        threshold (`float`): Share of steps with empty drafts, in [0, 1]; a step counts by the share of its rows.
        window (`int`): Number of latest steps that count.
        retry, group (`int`): Numbers of requests, at least 1, and `group` at most `retry`.
    """

    _LEAST_STEPS = 16  # steps before the first request is refused

    def __init__(self, threshold: float = 0.7, window: int = 64, retry: int = 64, group: int = 8):
        if not 0 <= threshold <= 1:
            raise ValueError(f"`threshold` must lie in [0, 1], got {threshold!r}.")
        for name, value in (("window", window), ("retry", retry), ("group", group)):
            if value < 1:
                raise ValueError(f"`{name}` must be at least 1, got {value!r}.")
        if group > retry:
            raise ValueError(f"`group` must be at most `retry`, got {group} > {retry}.")
        self.threshold, self.window, self.retry, self.group = threshold, window, retry, group
        self._idle = DecayedRate()  # steps with empty drafts among all
        self._num_met = 0
        self._refused: set[Hashable] = set()

    @property
    def idle_share(self) -> float:
        """Share of the latest steps with empty drafts; 0 before the first step."""
        return self._idle.rate if self._idle.tries else 0.0

    def observe(self, request_ids: Sequence[Hashable], num_nodes: Sequence[int] | np.ndarray) -> None:
        """Count one step's draft lengths. Requests that were refused do not count."""
        idle = [num == 0 for request_id, num in zip(request_ids, num_nodes) if request_id not in self._refused]
        if idle:
            self._idle.add(1, sum(idle) / len(idle), 1 - 1 / self.window)

    def admits(self, request_id: Hashable) -> bool:
        """Return whether the draft model serves this new request."""
        if self.idle_share <= self.threshold or self._idle.tries < self._LEAST_STEPS:
            return True
        self._num_met = (self._num_met + 1) % self.retry
        if self._num_met >= self.retry - self.group:
            return True
        self._refused.add(request_id)
        return False

    def forget(self, request_id: Hashable) -> None:
        """Delete the state of a request that has ended. Unknown ids are ignored."""
        self._refused.discard(request_id)
