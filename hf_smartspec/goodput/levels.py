"""The auction over the levels of drafts, for sources that are asked by level."""

from collections import defaultdict
from typing import NamedTuple

import numpy as np

from .cost import CostModel
from .draft_cost import DraftCost
from .plan import Before, Plan
from .stage import Stage
from .stage_record import StageRecord, size_class
from .worth import Paces

_LUCK = 0.04  # share of the time by which the last of several rows ends later than by means: it had the least luck
_NUM_GOALS = 16  # numbers of steps that are compared, where rows are waited for together
_DEEPEST = 32  # levels of an autoregressive draft that are considered


class LevelAuction:
    """
    Finds the levels worth drafting, by their expected gains beyond the drafts of earlier stages.

    Args:
        cost (`CostModel`): Cost of the target's forward.
        records (`defaultdict` of `DraftCost` to `StageRecord`): Estimates for each source, the auction's own.
        paces (`Paces`): Worth of the tokens of each row.
        margin (`float`): Share by which the goodput of speculation must exceed that of plain decoding.
    """

    def __init__(self, cost: CostModel, records: defaultdict[DraftCost, StageRecord], paces: Paces, margin: float):
        self.cost, self.records, self.paces, self.margin = cost, records, paces, margin

    def weigh(self, plan: Plan, stage: Stage, caps: np.ndarray, before: Before) -> np.ndarray:
        """
        Return the levels worth drafting, `[rows]` int64: by the mean estimate, or where none pays, by a high one. Steps
        of the same rows keep them for a while, without another auction (`StageRecord.hold`).
        """
        rows, record = plan.rows, self.records[stage.cost]
        held = record.held(rows.request_ids)
        # Rows that wait for their prompts may draft in the next step, and prompts make a step dear.
        is_usual = not before.num_nodes and caps.all() and not rows.num_prefill_tokens
        if held is not None and (is_usual or not held.levels.any()):
            record.count_unweighed()
            plan.held[stage] = held
            if held.levels.any():
                record.trials.reset(size_class(len(rows)))
            return held.levels
        record.let_go()
        # Levels that pay by the mean estimate pay by the optimistic one, too. So after a step in which none paid, the
        # optimistic one alone mostly decides, in one auction instead of two.
        hopes_first = not record.pays and stage.cost.is_autoregressive
        hoped = self.best(plan, stage, caps, before, in_doubt=True) if hopes_first else None
        if hoped is None or hoped.any():
            best = self.best(plan, stage, caps, before)
            record.pays = bool(best.any())
            if record.pays:
                record.trials.reset(size_class(len(rows)))
                if is_usual:
                    plan.held[stage] = record.hold(rows.request_ids, best)
                return best
            hoped = self.best(plan, stage, caps, before, in_doubt=True) if hoped is None else hoped
        if not hoped.any() and is_usual:
            record.hold(rows.request_ids, hoped)
        return hoped

    def best(self, plan: Plan, stage: Stage, caps: np.ndarray, before: Before, in_doubt: bool = False) -> np.ndarray:
        """
        Return the depth of each row's draft of the highest profit, `[rows]` int64; all 0 if no draft pays. `in_doubt`
        takes the optimistic estimate of acceptance.
        """
        gains = self._gains(plan, stage, caps, before, in_doubt)
        width, most = stage.cost.width, gains.size
        widths = before.width + np.arange(1, gains.shape[1] + 1) * width
        seconds = self._seconds(plan, before.num_nodes + most * width, widths)[:, before.num_nodes :]
        record, left = self.records[stage.cost], plan.rows.num_remaining
        reading = record.reading(plan.rows)
        if left is None or len(left) < 2:
            return best_depths(gains, seconds, stage.cost, record, reading, plan.price, self.margin)
        steps = Remaining(left, before.promises, self.paces.row_seconds(plan))
        return soonest_depths(gains, seconds, stage.cost, record, reading, steps, self.margin)

    def _gains(self, plan: Plan, stage: Stage, caps: np.ndarray, before: Before, in_doubt: bool) -> np.ndarray:
        """Return the expected tokens that each level of a draft adds, `[rows, depths]` float64; 0 beyond the caps."""
        most = np.minimum(-(-caps // stage.cost.width), _DEEPEST)
        gains = self.records[stage.cost].gains(plan.rows.request_ids, before.promises, int(most.max()), in_doubt)
        gains[np.arange(gains.shape[1]) >= most[:, None]] = 0.0
        return gains

    def _seconds(self, plan: Plan, most: int, widths: np.ndarray) -> np.ndarray:
        """
        Return T with 0 to `most` draft nodes, for each bound on the nodes of one row, `[widths, most + 1]` float64;
        without the time that prompts add to the step.
        """
        num = np.arange(most + 1)
        width = 1 + np.minimum(num, widths[:, None])
        return self.cost.seconds(*plan.rows.forward_size(num, width)) - plan.prefill_seconds


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


class Remaining(NamedTuple):
    """What rows that are waited for together have to go."""

    tokens: np.ndarray  # [rows] int: at most
    promises: np.ndarray  # [rows] float64: tokens that drafts of earlier stages add to a step
    row_seconds: float  # part of a step without drafts that each row adds

    def seconds(self, gains: np.ndarray, step: np.ndarray) -> np.ndarray:
        """
        Return the time until the last row ends, `[n]` float64, if all steps were like this one, but for rows that have
        ended: of `n` plans that gain so many tokens (`[n, rows]`) in steps of so many seconds (`[n]`).
        """
        steps = self.tokens / (1 + self.promises + gains)
        last = steps.max(axis=1)
        return last * step - self.row_seconds * (last[:, None] - steps).sum(axis=1)


def soonest_depths(
    gains: np.ndarray,
    seconds: np.ndarray,
    cost: DraftCost,
    record: StageRecord,
    reading: np.ndarray,
    remaining: Remaining,
    margin: float,
) -> np.ndarray:
    """
    Return the depths of the rows' drafts with which the last of rows that are waited for together ends soonest, if all
    steps were alike; all 0 if that saves less than the margin. Of each number of steps, every row drafts as deep as it
    must to end within them. Other arguments, and the result, are those of `best_depths`.

    Args:
        remaining (`Remaining`): What the rows have to go.
        margin (`float`): Least share of the time to be saved, beyond what luck takes.
    """
    num_rows = len(gains)
    added = np.concatenate([np.zeros((num_rows, 1)), np.cumsum(gains, axis=1)], axis=1)  # by depth
    steps = remaining.tokens[:, None] / (1 + remaining.promises[:, None] + added)  # falls with the depth
    most, least = max(steps[:, 0].max(), 1), steps[:, -1].max()
    goals = most * (least / most) ** (np.arange(_NUM_GOALS + 1) / _NUM_GOALS)
    depths = (steps[:, :-1] > goals[:, None, None] * (1 + 1e-9)).sum(axis=2)  # [goals, rows]; 0 for the first
    drafts = depths > 0
    deepest, nodes = depths.max(axis=1), depths.sum(axis=1) * cost.width
    per_call, per_row = record.timer.seconds(cost)
    calls, in_calls = deepest, depths.sum(axis=1)
    if not cost.is_autoregressive:  # one call, for every row once
        calls, in_calls = np.minimum(deepest, 1), drafts.sum(axis=1)
    plain = seconds[0, 0]
    step = np.where(deepest, seconds[np.maximum(deepest, 1) - 1, nodes], plain) + per_call * calls + per_row * in_calls
    step += record.overhead(num_rows) * (deepest > 0) + (reading * (1 + gains[:, 0]) * drafts).sum(axis=1)
    total = remaining.seconds(np.take_along_axis(added, depths.T, axis=1).T, step)
    best = int(total.argmin())
    return depths[best] if total[best] < (1 - margin - _LUCK) * total[0] else np.zeros(num_rows, np.int64)
