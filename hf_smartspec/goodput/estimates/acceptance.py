"""Estimates of acceptance rates from recent drafts: over all requests, per depth, and per request."""

from collections.abc import Hashable, Sequence

import numpy as np

from ..kernels.level_counts import count_levels
from .decayed import DecayedRate, shrunk

CERTAIN = 0.995  # upper bound on estimated rates: a perfect record proves little
_NUM_DEPTHS = 8  # depths in the counts of a request; deeper levels count as the last
_DOUBT = 12.0  # tried levels that are added when the doubt in a rate is estimated, so that few tries leave some doubt


class AcceptanceEstimator:
    """
    Moving averages of the acceptance rate (SmartSpec, section 4.4): of all requests, per depth, and per request.

    A level of a draft is tried if all levels above it were accepted, and succeeds if one of its nodes is. Counts decay,
    so that the averages follow the text. Estimates from few counts are shrunk: a depth's towards the level above it, a
    request's towards the average of all. A request's successes are compared with those that the current averages
    expect: for a single request the two agree, so that its luck does not count twice.

    Args:
        half_life (`float`): Tried levels after which one counts half in the averages over all requests. The paper finds
            results hardly sensitive to the window.
        request_half_life (`float`): The same for the averages of one request.
        prior (`float`): The rate before the first draft. It is optimistic, since only drafts can correct it.
    """

    # Weights of priors, in tried levels:
    _PRIOR_STRENGTH = 4.0  # of `prior`
    _DEPTH_STRENGTH = 12.0  # of the level above, for a depth's rate
    _REQUEST_STRENGTH = 12.0  # of all requests, for one request's rate

    def __init__(self, half_life: float = 300.0, request_half_life: float = 30.0, prior: float = 0.7):
        for name, value in (("half_life", half_life), ("request_half_life", request_half_life)):
            if not np.isfinite(value) or value <= 0:
                raise ValueError(f"`{name}` must be a positive number, got {value!r}.")
        if not 0 <= prior <= 1:
            raise ValueError(f"`prior` must lie in [0, 1], got {prior!r}.")
        self.half_life, self.request_half_life, self.prior = float(half_life), float(request_half_life), prior
        self._levels = DecayedRate(tries=np.zeros(1), hits=np.zeros(1))  # per depth
        self._requests: dict[Hashable, int] = {}  # lines of requests in the two arrays below
        self._free: list[int] = []  # lines of requests that have ended
        self._request_tried = np.zeros((0, _NUM_DEPTHS))  # per request and depth, decayed
        self._request_succeeded = np.zeros(0)

    def update(self, request_ids: Sequence[Hashable], tried: np.ndarray, succeeded: np.ndarray) -> None:
        """
        Count the outcomes of one step's drafts.

        Args:
            request_ids (sequence of `Hashable`): The rows' requests.
            tried, succeeded (`np.ndarray` of shape `[rows, depths]`, bool or int64): Levels of each row's draft that
                could be judged, and those that were accepted.
        """
        assert tried.shape == succeeded.shape and len(tried) == len(request_ids), "a line of levels for each row"
        if not tried.any():
            return
        levels, num_depths = self._levels, max(tried.shape[1], len(self._levels.tries))
        levels.tries, levels.hits = tries, hits = longer(levels.tries, num_depths), longer(levels.hits, num_depths)
        lines = np.array([self._line(name) for name in request_ids], np.int64)
        own = self.request_half_life, self._request_tried, self._request_succeeded
        count_levels(tried, succeeded, lines, *own, self.half_life, tries, hits)

    def _line(self, request_id: Hashable) -> int:
        """Return the line of a request's counts; a new request gets a line of zeros."""
        line = self._requests.get(request_id)
        if line is None:
            if not self._free:
                self._grow()
            line = self._requests[request_id] = self._free.pop()
        return line

    def _grow(self) -> None:
        num = len(self._request_succeeded)
        more = max(num, 8)
        self._free += range(num + more - 1, num - 1, -1)
        self._request_tried = np.concatenate([self._request_tried, np.zeros((more, _NUM_DEPTHS))])
        self._request_succeeded = np.append(self._request_succeeded, np.zeros(more))

    @property
    def rate(self) -> float:
        """alpha over all requests and depths."""
        return _bounded(self._levels.hits.sum(), self._levels.tries.sum(), self.prior, self._PRIOR_STRENGTH)

    @property
    def doubt(self) -> float:
        """
        One standard deviation of the rate, by which an optimistic estimate is higher. Drafts that were rejected by
        chance at first would not be tried again for long, while rates that are too high are soon corrected.
        """
        rate = self.rate
        return float(np.sqrt(rate * (1 - rate) / (self._levels.tries.sum() + _DOUBT)))

    def decay_counts(self) -> None:
        """Shrink past counts to the prior's weight, so that new observations dominate."""
        share = min(1.0, self._PRIOR_STRENGTH / max(self._levels.tries.sum(), 1e-9))
        self._levels.add(0, 0, share)
        for counts in (self._request_tried, self._request_succeeded):
            counts *= share

    def by_depth(self, num_depths: int) -> np.ndarray:
        """Return the rates at depths 1 to `num_depths`, given accepted levels above, `[num_depths]` float64."""
        rates, rate = [], self.rate
        for tried, succeeded in zip(self._levels.tries[:num_depths].tolist(), self._levels.hits[:num_depths].tolist()):
            rate = _bounded(succeeded, tried, rate, self._DEPTH_STRENGTH)
            rates.append(rate)
        return np.array(rates + [rate] * (num_depths - len(rates)))

    def of_requests(self, request_ids: Sequence[Hashable], num_depths: int = 1) -> np.ndarray:
        """Return `by_depth` for each request, scaled by its own acceptance, `[rows, num_depths]` float64."""
        return np.minimum(self.by_depth(num_depths) * self._ratios(request_ids)[:, None], CERTAIN)

    def rates(self, request_ids: Sequence[Hashable]) -> np.ndarray:
        """Return alpha of each request, over all depths, `[rows]` float64."""
        return np.minimum(self.rate * self._ratios(request_ids), CERTAIN)

    def _ratios(self, request_ids: Sequence[Hashable]) -> np.ndarray:
        """Return each request's successes relative to those that the averages over all requests expect, `[rows]`."""
        lines = np.array([self._requests.get(name, -1) for name in request_ids], np.int64)
        prior = max(self._REQUEST_STRENGTH * self.rate, 1e-9)
        if not self._requests:
            return np.ones(len(lines))
        expected = self._request_tried[lines] @ self.by_depth(_NUM_DEPTHS)
        ratios = shrunk(self._request_succeeded[lines], expected, 1.0, prior)
        return np.where(lines < 0, 1.0, ratios)

    def forget(self, request_id: Hashable) -> None:
        """Delete the counts of a request that has ended. Unknown ids are ignored."""
        line = self._requests.pop(request_id, None)
        if line is not None:
            self._request_tried[line], self._request_succeeded[line] = 0.0, 0.0
            self._free.append(line)


def _bounded(succeeded: float, tried: float, general: float, strength: float) -> float:
    return min(float(shrunk(succeeded, tried, general, strength)), CERTAIN)


def longer(counts: np.ndarray, num: int) -> np.ndarray:
    """Return counts `[num]`, of which those that are appended are 0."""
    return counts if len(counts) == num else np.append(counts, np.zeros(num - len(counts)))
