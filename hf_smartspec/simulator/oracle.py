"""Oracles of simulated engines, which know what will come true."""

from collections.abc import Sequence
from functools import partial

import numpy as np

from ..drafts.tree import DraftTree
from ..goodput.cost import CostModel
from ..goodput.draft_cost import DraftCost
from ..goodput.papers.policies import Oracle
from ..goodput.policy import Stage, StepRows
from ..goodput.prefill_gate import PrefillGate
from .engine import SimulatedEngine
from .sources import TableCandidates


class DraftOracle(Oracle):
    """
    Knows also how much of a draft will come true before it is drafted, so that nothing is drafted in vain. A level
    costs one call for all rows in it, and every node costs the same: the best nodes are those of the first levels.

    The drafter reads every prompt: rows that it is not asked for now say nothing about the next request.

    Args:
        cost (`CostModel`): Of the target's forward.
        engine (`SimulatedEngine`): Whose source is a `TableCandidates` of chains.
        draft (`DraftCost`): What drafting really takes, by the level.
    """

    def __init__(self, cost: CostModel, engine: SimulatedEngine, draft: DraftCost):
        super().__init__(cost, engine.continuation)
        assert draft.is_autoregressive, "others draft all levels at once"
        self.table, self.draft = engine.first_stage.source, draft
        engine.new_gate = partial(PrefillGate, threshold=1.0)

    def max_nodes(self, rows: StepRows, stage: Stage, trees: Sequence[DraftTree]) -> np.ndarray:
        right = self._num_right(rows)
        row, level = np.nonzero(right[:, None] > np.arange(right.max(initial=0)))
        order = np.argsort(level, kind="stable")
        depths = np.append(0, 1 + level[order])
        num = np.arange(len(depths))
        seconds = self.cost.seconds(*rows.without_prefill().forward_size(num, 1 + depths))
        seconds = seconds + self.draft.per_call * depths + self.draft.per_row * num
        return np.bincount(row[order[: self.num_paying(len(rows), seconds)]], minlength=len(rows))

    def _num_right(self, rows: StepRows) -> np.ndarray:
        """How many of the next nodes of each row's draft will come true, `[rows]` int."""
        assert isinstance(self.table, TableCandidates), "only a table tells what will come true"
        pairs = zip(rows.request_ids, rows.caps.tolist())
        return np.array([min(self.table.num_right(name), cap) if cap else 0 for name, cap in pairs], np.int64)

    def select(self, rows: StepRows, trees: Sequence[DraftTree]) -> list[DraftTree]:
        return list(trees)
