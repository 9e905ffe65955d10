"""The worth of a row's tokens where all rows of a step are waited for together."""

from collections import defaultdict
from collections.abc import Hashable, Sequence
from functools import partial
from typing import Any

import numpy as np

from .cost import CostModel
from .estimates.decayed import DecayedMean
from .plan import Plan
from .policy import StepRows

# Steps by which a row is ahead if it is e times less likely than another to be the last one to end, at least; and as a
# share of the steps to go, since the more there are, the likelier rows end before. With smaller ones rows take turns
# in being last, and all that is drafted for them counts for more than it is.
_SPREAD, _SPREAD_SHARE = 4.0, 1 / 16
_PACE, _PACE_STRENGTH = 0.05, 8  # least weight of the newest step in a row's pace, and weight of the prior, in steps


class Paces:
    """
    Tokens per step of each request where rows are waited for together: the slow ones are likely to end last.

    Args:
        cost (`CostModel`): Cost of the target's forward.
    """

    def __init__(self, cost: CostModel) -> None:
        self.cost = cost
        self._means: defaultdict[Hashable, DecayedMean] = defaultdict(partial(DecayedMean, _PACE, 1.0, _PACE_STRENGTH))

    def worth(self, plan: Plan, promises: np.ndarray) -> Any:
        """
        Return the worth of a token of each of the plan's rows, 1 in the mean: 1, or `[rows]` float64. Where all rows
        are waited for together, a further token of a row saves the row's own part of a forward, and the rest of a
        forward only if the row is the last one to end. That is likely where many tokens are left after this step, in
        which a row gains `promises` (`[rows]`) tokens of its draft.
        """
        rows, plain = plan.rows, plan.plain_seconds
        if not rows.end_together:
            return 1.0
        assert rows.num_remaining is not None, "what `end_together` means"
        num, means = len(rows), np.array([self._means[name].mean for name in rows.request_ids])
        own = plan.seconds_of_a_row(self.cost)
        left = (rows.num_remaining - promises) / means
        most = left.max()
        is_last = np.exp((left - most) / max(_SPREAD_SHARE * most, _SPREAD))
        return (own * num + (plain - own * num) * num * is_last / is_last.sum()) / plain

    def learn(self, rows: StepRows, accepted: Sequence[int]) -> None:
        for name, num in zip(rows.request_ids, accepted):
            self._means[name].add(1 + num)

    def forget(self, request_id: Hashable) -> None:
        """Delete a request that has ended. Unknown ids are ignored."""
        self._means.pop(request_id, None)
