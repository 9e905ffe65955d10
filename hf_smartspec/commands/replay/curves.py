"""Sources compared at equal numbers of drafted tokens, over several settings of each."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


class Point(NamedTuple):
    """A source under one setting."""

    drafted: float  # tokens per step
    accepted: float  # tokens per step


def accepted_at(curve: Sequence[Point], drafted: float) -> float:
    """
    Accepted tokens per step of a source when it drafts `drafted` tokens per step, between its settings on a straight
    line. The line begins at (0, 0), where nothing is drafted, and beyond the last setting stays where it was: drafting
    more accepts no less.
    """
    points = sorted({Point(0.0, 0.0), *(Point(*point) for point in curve)})
    accepted = np.maximum.accumulate([point.accepted for point in points])
    return float(np.interp(drafted, [point.drafted for point in points], accepted))


def ratios_at_equal_drafts(curve: Sequence[Point], baseline: Sequence[Point]) -> list[float]:
    """
    For each of the baseline's settings, what `curve` accepts per step at the same number of drafted tokens, as a
    multiple of what the baseline does; nan where the baseline accepts nothing.
    """
    return [accepted_at(curve, drafted) / accepted if accepted else np.nan for drafted, accepted in baseline]


def geometric_mean(ratios: Sequence[float]) -> float:
    """Of the positive finite ratios; nan if there are none."""
    values = np.array([ratio for ratio in ratios if np.isfinite(ratio) and ratio > 0])
    return float(np.exp(np.log(values).mean())) if len(values) else np.nan


def moving_average(requests: np.ndarray, window: int | None = None) -> np.ndarray:
    """
    Tokens per step over the last `window` requests, a twentieth of them by default.

    Args:
        requests (`np.ndarray` of shape `[n, 4]`): As in `Tally`: tokens and steps come first. Those without steps are
            left out.

    Returns:
        `np.ndarray` of shape `[m]`, float64; m is the number of requests with steps.
    """
    done = requests[requests[:, 1] > 0, :2]
    window = max(1, len(done) // 20) if window is None else window
    totals = np.concatenate([np.zeros((1, 2)), np.cumsum(done, axis=0)])
    ends = np.arange(1, len(totals))
    sums = totals[ends] - totals[np.maximum(ends - window, 0)]
    return sums[:, 0] / sums[:, 1]
