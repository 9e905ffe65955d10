"""An oracle policy of simulated engines, which reads ahead in the target's answers."""

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
    Oracle that also reads how much of a draft will be accepted before it is drafted, so that only accepted tokens are
    drafted. A level costs one call for all rows in it, and every node costs the same: the best nodes are those of the
    first levels.

    The drafter prefills every prompt, with a gate of threshold 1: drafts that the oracle leaves out of this step are no
    evidence against drafting for the next request.

    Args:
        cost (`CostModel`): Cost of the target's forward.
        engine (`SimulatedEngine`): An engine whose source is a `TableCandidates` of chains.
        draft (`DraftCost`): The true cost of drafting, by the level.
    """

    def __init__(self, cost: CostModel, engine: SimulatedEngine, draft: DraftCost):
        super().__init__(cost, engine.continuation)
        assert draft.is_autoregressive, "other drafters draft all levels at once"
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
        """Return how many nodes of each row's next draft will be accepted, `[rows]` int64."""
        assert isinstance(self.table, TableCandidates), "only a table holds what will be accepted"
        pairs = zip(rows.request_ids, rows.caps.tolist())
        return np.array([min(self.table.num_right(name), cap) if cap else 0 for name, cap in pairs], np.int64)

    def select(self, rows: StepRows, trees: Sequence[DraftTree]) -> list[DraftTree]:
        return list(trees)
