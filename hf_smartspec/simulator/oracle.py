"""Oracles of simulated engines, which know what will come true."""

import numpy as np

from ..goodput.cost import CostModel, DraftCost
from ..goodput.papers.policies import Oracle
from ..goodput.policy import StepRows
from .engine import SimulatedEngine
from .sources import TableCandidates


class DraftOracle(Oracle):
    """
    Knows also how much of a draft will come true before it is drafted, so that no level is drafted in vain. A level
    costs one call, and the same for every row in it: the best levels are the first ones.

    Args:
        engine (`SimulatedEngine`): Whose source is a `TableCandidates` of chains.
        draft (`DraftCost`): What drafting really takes.
    """

    def __init__(self, cost: CostModel, engine: SimulatedEngine, draft: DraftCost):
        super().__init__(cost, engine.continuation)
        self.table, self.draft = engine.source.source, draft

    def max_nodes(self, rows: StepRows) -> np.ndarray:
        assert isinstance(self.table, TableCandidates), "only a table tells what will come true"
        pairs = zip(rows.request_ids, rows.caps.tolist())
        right = np.array([min(self.table.num_right(name), cap) if cap else 0 for name, cap in pairs], np.int64)
        levels = right[:, None].clip(max=np.arange(int(np.max(rows.caps, initial=0)) + 1))
        num = levels.sum(axis=0)
        seconds = self.cost.seconds(*rows.forward_size(num, 1 + levels.max(axis=0, initial=0)))
        draft = [self.draft.per_call * calls + self.draft.per_row * in_calls
                 for calls, in_calls in map(self.draft.calls, levels.T)]  # fmt: skip
        return levels[:, int(((len(rows) + num) / (seconds + draft)).argmax())]
