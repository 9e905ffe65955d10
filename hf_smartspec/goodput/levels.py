"""The auction over the levels of autoregressive drafts."""

import numpy as np

from .draft_cost import DraftCost
from .stage_record import StageRecord


def best_depths(
    gains: np.ndarray,
    seconds: np.ndarray,
    cost: DraftCost,
    record: StageRecord,
    reading: np.ndarray,
    price: float,
    margin: float,
) -> np.ndarray:
    """
    Return the depths of the rows' drafts with the highest profit, all 0 if it is below the margin (SmartSpec,
    algorithm 2 with Eq. 5): among drafts of each greatest depth, the levels that add most come first.

    Args:
        gains (`np.ndarray` of shape `[rows, depths]`, float64): Expected tokens that each level adds.
        seconds (`np.ndarray` of shape `[depths, nodes + 1]`, float64): Of the forward with 0, 1, ... more nodes, where
            the deepest draft has 1, 2, ... levels.
        reading (`np.ndarray` of shape `[rows]`, float64): See `StageRecord.reading`. A step pays for the tokens that
            the first level is expected to yield.
        price (`float`): Tokens that a second is worth.
        margin (`float`): Least profit, in tokens of a row.

    Returns:
        `np.ndarray` of shape `[rows]`, int64.
    """
    reading = reading * (1 + gains[:, 0])
    gains = gains * (gains.sum(axis=1) > price * reading)[:, None]  # else the row would hold back others
    num_rows, depths = len(gains), np.arange(1, gains.shape[1] + 1)
    row, depth = np.divmod(np.argsort(-gains, axis=None, kind="stable"), len(depths))
    is_in = (depth < depths[:, None]) & (gains[row, depth] > 0)  # [depth of the deepest draft, levels of all rows]
    num = np.cumsum(is_in, axis=1)
    tokens = np.cumsum(is_in * gains[row, depth], axis=1)
    per_call, per_row = record.timer.seconds(cost)
    calls, in_calls = depths[:, None], num
    if not cost.is_autoregressive:  # one call, for every row once
        calls, in_calls = np.ones_like(calls), np.cumsum(is_in & (depth == 0), axis=1)
    spent = np.take_along_axis(seconds - seconds[:, :1], num * cost.width, axis=1)
    spent += per_call * calls + per_row * in_calls + record.overhead(num_rows)
    spent += np.cumsum(is_in * (depth == 0) * reading[row], axis=1)
    profit = tokens - price * spent
    deepest, last = np.divmod(int(profit.argmax()), len(row))
    if profit[deepest, last] <= margin * num_rows:
        return np.zeros(num_rows, np.int64)
    chosen = is_in[deepest] & (np.arange(len(row)) <= last)
    return np.bincount(row[chosen], minlength=num_rows)
