"""The interval I between updates, which follows load and drift (Online Speculative Decoding, section 4.2.1)."""

import math
import time
from collections.abc import Callable

_CHANCE = 2.0  # standard errors by which drafts must have become worse
_LEAST_REQUESTS = 2  # before drift can be told from chance
_LEAST_VARIANCE = 0.05**2  # of rates of errors: that of a few equal ones says little


class UpdateInterval:
    """
    Requests up to an update: `least` where there was capacity to train all the time since the last update, and as many
    more as there was less of it, up to `most`; `least` again as soon as drafts are worse than before, which shows that
    the requests have changed.

    Args:
        least (`int`): The interval without load.
        most (`int`): The longest interval; the same as `least` for a fixed one.
        clock (`Callable`): Clock in seconds.
    """

    def __init__(self, least: int, most: int, clock: Callable[[], float] = time.monotonic):
        self.least, self.most, self._clock = least, most, clock
        self._is_idle, self._since = True, clock()
        self._seconds = [0.0, 0.0]  # with and without capacity, since the last update
        self._new: list[float] = []  # rates of errors of requests since then
        self._count, self._mean, self._squares = 0, 0.0, 0.0  # of those before: Welford's sums

    def note_load(self, is_idle: bool) -> None:
        """Record whether there is capacity to train from now on."""
        now = self._clock()
        self._seconds[not self._is_idle] += now - self._since
        self._is_idle, self._since = is_idle, now

    def note_request(self, error_rate: float) -> None:
        """Record the share of a request's tokens in whose place drafts had others."""
        self._new.append(error_rate)

    def restart(self) -> None:
        """Begin a new interval, after an update. After a drift, only the latest requests count as before."""
        if self.has_drifted:
            self._count, self._mean, self._squares = 0, 0.0, 0.0
        for rate in self._new:
            self._count += 1
            step = rate - self._mean
            self._mean += step / self._count
            self._squares += step * (rate - self._mean)
        self._new, self._seconds = [], [0.0, 0.0]
        self._since = self._clock()

    @property
    def has_drifted(self) -> bool:
        """Return whether drafts are worse than before the last update, by more than chance."""
        number = len(self._new)
        if number < _LEAST_REQUESTS or self._count < _LEAST_REQUESTS:
            return False
        variance = max(self._squares / (self._count - 1), _LEAST_VARIANCE)
        error = math.sqrt(variance * (1 / number + 1 / self._count))
        return sum(self._new) / number > self._mean + _CHANCE * error

    @property
    def requests(self) -> int:
        """Return the present interval, in requests."""
        if self.most <= self.least or self.has_drifted:
            return self.least
        seconds = list(self._seconds)
        seconds[not self._is_idle] += self._clock() - self._since
        idle, total = seconds[0], sum(seconds)
        if idle * self.most <= total * self.least:
            return self.most if total else self.least
        return math.ceil(self.least * total / idle)
