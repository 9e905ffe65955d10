"""Trials of what is not expected to pay: the time for them, and how often they come."""

import math

from .plan import Plan

TRIAL_SHARE = 0.01  # share of the time for what is not expected to pay
_MOST_DEBT = 50  # steps without drafts: debt of trials, which may read whole prompts first, at most
_GROWTH = 1.5  # factor by which a trial that has failed makes the next one rarer,
_MOST = 2.0  # up to this one: of the time for trials, 1 % of all, it leaves half
_ENOUGH = 8  # failed trials, after which the number does not matter
_CHEAPER = 0.8  # ratio of prices below which drafts may pay now


class TrialTime:
    """
    Time for one kind of trial: a share of the time of all steps is saved for the next one.

    Attributes:
        seconds (`float`): Time saved; negative after a trial that took longer than expected.
        due (`float`): Seconds of the least expensive trial that was refused in the latest decided step; infinite where
            none was.
    """

    def __init__(self) -> None:
        self.seconds, self.due = 0.0, math.inf

    @property
    def is_due(self) -> bool:
        """Return whether a trial that was refused can be afforded now."""
        return self.seconds >= self.due

    def save(self, plan: Plan, part: float = 1.0) -> None:
        """Save a share of a step's time, or a part of it where several kinds share it."""
        self.seconds += part * TRIAL_SHARE * plan.plain_seconds

    def spend(self, seconds: float) -> bool:
        """Spend all saved time if it has reached so many seconds, and return whether it has."""
        if self.seconds < seconds:
            self.note_refused(seconds)
            return False
        self.seconds = 0.0
        return True

    def note_refused(self, seconds: float) -> None:
        """Note that a trial of so many seconds was refused."""
        self.due = min(self.due, seconds)

    def charge(self, plan: Plan, seconds: float) -> None:
        """Count seconds that a trial took beyond those expected, bounded so that the next one need not wait long."""
        self.seconds = max(self.seconds - seconds, -_MOST_DEBT * plan.plain_seconds)


class Trials:
    """
    Trials of one source. As long as none makes it pay, they become rarer, until drafts cost less beside a step. Failing
    with some rows counts with more of them, too, and paying with fewer.

    Attributes:
        num (`int`): Number of trials.
        factor (`float`): How much more time is saved for the latest trial than for a first one.
    """

    def __init__(self) -> None:
        self.num, self.factor = 0, 1.0
        self._num_failed: dict[int, int] = {}  # trials that have failed, by size,
        self._prices: dict[int, float] = {}  # and the latest one's price

    def next_factor(self, size: int, price: float) -> float:
        """
        Return `factor` of a trial now.

        Args:
            size (`int`): `size_class` of the step's rows.
            price (`float`): Seconds that a draft costs by those of a step without drafts.
        """
        if price < _CHEAPER * max(self._prices.get(size, 0.0), 0.0):
            self.reset(size)
        return min(_GROWTH ** self._most_failed(size), _MOST)

    def _most_failed(self, size: int) -> int:
        return max([num for other, num in self._num_failed.items() if other <= size], default=0)

    def begin(self, size: int, price: float) -> None:
        """Begin a trial, which has failed unless `reset` is called before the next one."""
        self.factor = self.next_factor(size, price)
        self.num += 1
        self._num_failed[size] = min(self._most_failed(size) + 1, _ENOUGH)
        self._prices[size] = price

    def reset(self, size: int | None = None) -> None:
        """Make trials with so many rows, or fewer, as frequent as at first: the source pays, or may do so now."""
        for other in [other for other in self._num_failed if size is None or other <= size]:
            del self._num_failed[other], self._prices[other]
