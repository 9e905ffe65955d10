"""Comparison of sources at equal numbers of drafted tokens, over several settings of each."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


class Point(NamedTuple):
    """Result of a source under one setting."""

    drafted: float  # tokens per step
    accepted: float  # tokens per step


def accepted_at(curve: Sequence[Point], drafted: float) -> float:
    """
    Return the accepted tokens per step of a source that drafts `drafted` tokens per step, interpolated between its
    settings. The line begins at (0, 0) and is constant after the last setting: with more drafts, no less is accepted.
    """
    points = sorted({Point(0.0, 0.0), *(Point(*point) for point in curve)})
    accepted = np.maximum.accumulate([point.accepted for point in points])
    return float(np.interp(drafted, [point.drafted for point in points], accepted))


def ratios_at_equal_drafts(curve: Sequence[Point], baseline: Sequence[Point]) -> list[float]:
    """
    Return for each of the baseline's settings the accepted tokens per step of `curve` at the same number of drafted
    tokens, as a multiple of the baseline's; nan where the baseline has none.
    """
    return [accepted_at(curve, drafted) / accepted if accepted else np.nan for drafted, accepted in baseline]


def geometric_mean(ratios: Sequence[float]) -> float:
    """Return the geometric mean of the positive finite ratios; nan if there are none."""
    values = np.array([ratio for ratio in ratios if np.isfinite(ratio) and ratio > 0])
    return float(np.exp(np.log(values).mean())) if len(values) else np.nan


def moving_average(requests: np.ndarray, window: int | None = None) -> np.ndarray:
    """
    Return the tokens per step over the last `window` requests, by default a twentieth of all.

    Args:
        requests (`np.ndarray` of shape `[n, 4]`): As in `Tally`, tokens and steps first. Requests without steps are
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
