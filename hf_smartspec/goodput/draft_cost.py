"""The cost of drafting, by calls and rows in calls: known beforehand, or learnt from measured drafts."""

from dataclasses import dataclass

import numpy as np

from .cost import CostModel


@dataclass(frozen=True)
class DraftCost:
    """
    The cost of drafting (SmartSpec, Eq. 4 and 5). An autoregressive drafter runs once per level of the deepest draft,
    with the rows that reach that level; any other source takes one call.

    Args:
        per_call, per_row (`float`): Seconds of one call (of one level), and of each row in it. 0 if unknown:
            measurements of earlier steps replace them.
        is_autoregressive (`bool`): Whether every level is a call.
        width (`int`): Nodes per level and row of the drafts.
        source (`str`): Name of the source: each source's probabilities are calibrated separately.
        heeds_prices (`bool`): Whether the source ends drafts by itself where a further level, or node, costs more than
            it promises.
        follows_target (`bool`): Whether it drafts from the target's hidden states, and so not during prefill.
        is_learned (`bool`): See `TreeCandidateGenerator`.
    """

    per_call: float = 0.0
    per_row: float = 0.0
    is_autoregressive: bool = False
    width: int = 1
    source: str = ""
    heeds_prices: bool = False
    follows_target: bool = False
    is_learned: bool = False

    @classmethod
    def of_model(cls, cost: CostModel, mean_context: float, width: int = 1, source: str = "") -> "DraftCost":
        """Return a draft model's cost from its profile (Eq. 5): T_fwd of a level, split into a call and its rows."""
        one, many = cost.seconds(mean_context, width, width), cost.seconds(8 * mean_context, 8 * width, width)
        per_row = max(float(many - one) / 7, 0.0)
        return cls(max(float(one) - per_row, 0.0), per_row, True, width, source)

    def calls(self, levels: np.ndarray) -> tuple[float, float]:
        """Return the calls, and rows in calls, of drafts with so many levels (`[rows]` int; 0: not asked for)."""
        if self.is_autoregressive:
            return float(levels.max(initial=0)), float(levels.sum())
        num_rows = np.count_nonzero(levels)
        return float(num_rows > 0), float(num_rows)


class DraftTimer:
    """
    Learns seconds per call and per row in a call from measured drafts, by decayed least squares of the relative error,
    shrunk towards the `DraftCost`.

    Args:
        decay (`float`): Factor of earlier drafts' weights at each new one.
    """

    _SCALE = 0.05  # ratio of a row's seconds to a call's, by which indistinguishable costs are split
    _TRUST = 1e-3  # weight of the prior

    def __init__(self, decay: float = 0.97):
        self._decay = decay
        # Sums over drafts of products and targets, x being calls and y scaled rows in calls, both by seconds.
        self._xx = self._xy = self._yy = self._x = self._y = 0.0

    def observe(self, calls: float, rows: float, seconds: float) -> None:
        """Learn from one step's drafting, with `calls` and `rows` as `DraftCost.calls` counts them."""
        if calls <= 0 or not 1e-9 < seconds < 1e9:
            return
        x, y, decay = calls / seconds, self._SCALE * rows / seconds, self._decay
        self._xx, self._xy, self._yy = self._xx * decay + x * x, self._xy * decay + x * y, self._yy * decay + y * y
        self._x, self._y = self._x * decay + x, self._y * decay + y

    def seconds(self, cost: DraftCost) -> tuple[float, float]:
        """Return the seconds per call, and per row in a call."""
        trust = self._TRUST * (self._xx + self._yy)
        if not trust:
            return cost.per_call, cost.per_row
        xx, yy, xy = self._xx + trust, self._yy + trust, self._xy
        x, y = self._x + trust * cost.per_call, self._y + trust * cost.per_row / self._SCALE
        determinant = xx * yy - xy * xy
        per_call, per_row = (yy * x - xy * y) / determinant, (xx * y - xy * x) / determinant
        if per_call < 0:  # costs are not negative: refit with the other one alone
            per_call, per_row = 0.0, y / yy
        elif per_row < 0:
            per_call, per_row = x / xx, 0.0
        return per_call, per_row * self._SCALE
