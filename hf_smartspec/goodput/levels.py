"""How deep an autoregressive drafter drafts where other drafts are there already."""

import numpy as np


def levels_against_rivals(
    gains: np.ndarray, rivals: np.ndarray, level_cost: float, call_cost: float, least: float = 0.0
) -> np.ndarray:
    """
    The depths that leave most tokens after all costs. The drafter's draft takes the place of the row's rival.

    Args:
        gains (`np.ndarray` of shape `[rows, depths]`, float64): How likely each level of a draft comes true.
        rivals (`np.ndarray` of shape `[rows]`, float64): Tokens that the drafts that are there promise, less what they
            cost.
        level_cost, call_cost (`float`): What each row pays for a level (drafting and verification), and what all rows
            together pay for it, in tokens.
        least (`float`): Tokens that must be left, beyond the rivals'.

    Returns:
        `np.ndarray` of shape `[rows]`, int64; 0 where the rival stays.
    """
    if not gains.size:
        return np.zeros(len(gains), np.int64)
    values = np.cumsum(gains - level_cost, axis=1) - rivals[:, None]
    best = np.maximum(np.maximum.accumulate(values, axis=1), 0.0)
    left = best.sum(axis=0) - call_cost * np.arange(1, values.shape[1] + 1)
    deepest = int(left.argmax())
    if left[deepest] <= least:
        return np.zeros(len(gains), np.int64)
    values = values[:, : deepest + 1]
    return np.where(best[:, deepest] > 0, values.argmax(axis=1) + 1, 0)
