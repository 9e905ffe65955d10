"""The auction over the levels of drafts, for sources that are asked by level."""

from collections import defaultdict
from typing import NamedTuple

import numpy as np

from .cost import CostModel
from .draft_cost import DraftCost
from .plan import Before, Plan
from .stage import Stage
from .stage_record import StageRecord, size_class

_LUCK = 0.04  # share of the time by which the last row ends later than is expected of each: it had the least luck
_NUM_GOALS = 16  # numbers of steps that are compared, where rows are waited for together
_DEEPEST = 32  # levels of an autoregressive draft that are considered


class LevelAuction:
    """
    Finds the levels worth drafting, by their expected gains beyond the drafts of earlier stages.

    Args:
        cost (`CostModel`): Cost of the target's forward.
        records (`defaultdict` of `DraftCost` to `StageRecord`): Estimates for each source, the auction's own.
        margin (`float`): Share by which the goodput of speculation must exceed that of plain decoding.
    """

    def __init__(self, cost: CostModel, records: defaultdict[DraftCost, StageRecord], margin: float):
        self.cost, self.records, self.margin = cost, records, margin

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
        Return the depth of each row's draft, `[rows]` int64: of the highest profit, or where rows are waited for
        together, so that the last one ends soonest; all 0 if no draft pays. `in_doubt` takes the optimistic estimate of
        acceptance.
        """
        left = plan.rows.num_remaining if plan.rows.end_together else None
        if left is not None:
            caps = np.minimum(caps, left - 1)  # of further nodes nothing can come
            if not (caps > 0).any():
                return np.zeros_like(caps)
        gains = self._gains(plan, stage, caps, before, in_doubt)
        width, most = stage.cost.width, gains.size
        widths = before.width + np.arange(1, gains.shape[1] + 1) * width
        seconds = self._seconds(plan, before.num_nodes + most * width, widths)[:, before.num_nodes :]
        record = self.records[stage.cost]
        steps = Steps(gains, seconds, stage.cost, record, record.reading(plan.rows))
        best = best_depths(*steps, plan.price, self.margin)
        if left is None:
            return best
        left = np.where((stage.caps == 0) & (plan.rows.caps > 0), 0, left)  # other sources draft for these rows
        remaining = Remaining(left, before.promises, plan.seconds_of_a_row(self.cost))
        return soonest_depths(steps, remaining, best, self.margin)

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


class Steps(NamedTuple):
    """Compute what steps with drafts bring and cost, by the rows' depths, from arguments of `best_depths`."""

    gains: np.ndarray
    seconds: np.ndarray
    cost: DraftCost
    record: StageRecord
    reading: np.ndarray

    def tokens(self, depths: np.ndarray) -> np.ndarray:
        """Return the tokens that each row gains in steps of such depths (`[n, rows]`), `[n, rows]` float64."""
        added = np.concatenate([np.zeros((len(self.gains), 1)), np.cumsum(self.gains, axis=1)], axis=1)
        return np.take_along_axis(added, depths.T, axis=1).T

    def durations(self, depths: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        """Return the seconds of steps of such depths, in which rows have so many tokens, both `[n, rows]`."""
        drafts, deepest, num = depths > 0, depths.max(axis=1), depths.sum(axis=1)
        per_call, per_row = self.record.timer.seconds(self.cost)
        forward = self.seconds[np.maximum(deepest, 1) - 1, num * self.cost.width]
        around = self.record.overhead(depths.shape[1]) * (deepest > 0) + (self.reading * tokens * drafts).sum(axis=1)
        if not self.cost.is_autoregressive:  # one call, for every row once
            deepest, num = np.minimum(deepest, 1), drafts.sum(axis=1)
        return forward + per_call * deepest + per_row * num + around


class Remaining(NamedTuple):
    """Compute when rows that are waited for together end, by the tokens that they still generate."""

    tokens: np.ndarray  # [rows] int: at most
    promises: np.ndarray  # [rows] float64: what drafts of earlier stages add to a step's tokens
    row_seconds: float  # part of a step without drafts that each row adds

    def steps(self, gains: np.ndarray) -> np.ndarray:
        """Return the steps until each row ends, if a step brings so many tokens more, `[..., rows]` float64."""
        return np.maximum(self.tokens / (1 + self.promises + gains), 1)

    def plans(self, gains: np.ndarray) -> np.ndarray:
        """
        Return depths of the rows' drafts, `[n, rows]` int64: for each of `n` numbers of steps, those just deep enough
        for every row to end within them, all 0 for the first. Of `gains` `[rows, depths]`.
        """
        steps = self.steps(np.cumsum(gains, axis=1).T).T  # [rows, depths], which falls with the depth
        steps = np.concatenate([self.steps(np.zeros(len(gains)))[:, None], steps], axis=1)
        most, least = steps[:, 0].max(), steps[:, -1].max()
        goals = most * (least / most) ** (np.arange(_NUM_GOALS + 1) / _NUM_GOALS)
        return (steps[:, :-1] > goals[:, None, None] * (1 + 1e-9)).sum(axis=2)

    def seconds(self, gains: np.ndarray, step: np.ndarray) -> np.ndarray:
        """
        Return the time until the last row ends, `[n]` float64, if all steps are alike, but for rows that have ended: of
        `n` plans that gain so many tokens (`[n, rows]`) in steps of so many seconds (`[n]`).
        """
        steps = self.steps(gains)
        last = steps.max(axis=1)
        return last * step - self.row_seconds * (last[:, None] - steps).sum(axis=1)


def soonest_depths(steps: Steps, remaining: Remaining, other: np.ndarray, margin: float) -> np.ndarray:
    """
    Return the depths of the rows' drafts with which the last of rows that are waited for together ends soonest, of
    `Remaining.plans` and another plan, `[rows]` int64; all 0 if that saves less than this share of the time, and what
    luck takes.
    """
    depths = np.concatenate([remaining.plans(steps.gains), other[None]])
    gained = steps.tokens(depths)
    total = remaining.seconds(gained, steps.durations(depths, 1 + remaining.promises + gained))
    best = int(total.argmin())
    return depths[best] if total[best] < (1 - margin - _LUCK) * total[0] else np.zeros_like(other)
