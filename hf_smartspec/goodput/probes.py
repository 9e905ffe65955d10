"""Probes: drafts that are not expected to pay, so that rows and sources that do not pay can come back."""

from collections import defaultdict

import numpy as np

from .cost import CostModel
from .draft_cost import DraftCost
from .plan import Plan
from .stage import Stage
from .stage_record import StageRecord, size_class
from .trials import TRIAL_SHARE


class Probes:
    """
    Decides when rows and sources that do not pay are asked all the same, within a share of the time.

    Args:
        cost (`CostModel`): Cost of the target's forward.
        records (`defaultdict` of `DraftCost` to `StageRecord`): Estimates for each source, the auction's own.
    """

    def __init__(self, cost: CostModel, records: defaultdict[DraftCost, StageRecord]):
        self.cost, self.records = cost, records

    def add_levels(self, plan: Plan, stage: Stage, levels: np.ndarray, may: np.ndarray) -> np.ndarray:
        """
        Return the levels of drafts, `[rows]` int64, with one more now and then in rows without a draft: acceptance is
        learnt from it, verified or not.

        Args:
            may (`np.ndarray` of shape `[rows]`, bool): Rows that may get one.
        """
        rows, record = plan.rows, self.records[stage.cost]
        idle = (levels == 0) & may
        if not idle.any():
            return levels
        if stage.cost.is_autoregressive:
            idle = record.for_trial(rows, idle)
        probed = np.where(idle, 1, levels)
        seconds = record.seconds(stage.cost, probed) - record.seconds(stage.cost, levels)
        if not self._can_afford(plan, record, seconds, record.timer.seconds(stage.cost)[0]):
            return levels
        plan.probing = None if levels.any() else stage  # drafts that pay read prompts at their own cost
        return probed

    def may_call(self, plan: Plan, stage: Stage, caps: np.ndarray) -> bool:
        """Return whether to call a source that drafts all levels in one call, though its calls do not pay."""
        record = self.records[stage.cost]
        seconds = record.seconds(stage.cost, caps > 0)
        if seconds < TRIAL_SHARE * plan.plain_seconds:  # it costs next to nothing to go on learning
            return record.trial_time.spend(seconds)
        return self._can_afford(plan, record, seconds, seconds)

    def _can_afford(self, plan: Plan, record: StageRecord, seconds: float, drafting: float) -> bool:
        """
        Return whether enough time has been saved for a trial that takes so many seconds, and begin it if so. Of a usual
        draft, `drafting` seconds are those of the source.
        """
        if record.trial_time.seconds < seconds:  # mostly: the price of a trial is not needed
            record.trial_time.note_refused(record.trials.factor * seconds)
            return False
        size, price = size_class(len(plan.rows)), self._relative_price(plan, drafting)
        if not record.trial_time.spend(record.trials.next_factor(size, price) * seconds):
            return False
        record.trials.begin(size, price)
        return True

    def _relative_price(self, plan: Plan, seconds: float) -> float:
        """Return the price of drafting for so many seconds and verifying a node per row, in steps without drafts."""
        forward = float(self.cost.seconds(*plan.rows.forward_size(len(plan.rows), 2)))
        return (seconds + forward - plan.prefill_seconds) / plan.plain_seconds - 1
