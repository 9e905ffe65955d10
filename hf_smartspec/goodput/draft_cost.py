"""What drafting costs: by calls and rows in calls, known beforehand or learnt from measured drafts."""

from dataclasses import dataclass

import numpy as np

from .cost import CostModel


@dataclass(frozen=True)
class DraftCost:
    """
    What drafting costs (SmartSpec, Eq. 4 and 5). An autoregressive drafter runs once per level of the deepest draft,
    with the rows that reach that level; any other source takes one call.

    Args:
        per_call, per_row (`float`): Seconds of one call (of one level), and of each row in it. 0 where unknown: what
            was measured at earlier steps takes their place.
        is_autoregressive (`bool`): Whether every level is a call.
        width (`int`): Nodes per level and row of the drafts.
        source (`str`): Whose probabilities they are: sources are calibrated apart.
        heeds_prices (`bool`): Whether the source ends drafts by itself where a further level, or node, costs more than
            it promises.
        follows_target (`bool`): Whether it drafts from what the target has left of a text, and so nothing while a
            prompt is run.
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
        """A draft model's, from its own profile (Eq. 5): T_fwd of one level as a call and a share of every row."""
        one, many = cost.seconds(mean_context, width, width), cost.seconds(8 * mean_context, 8 * width, width)
        per_row = max(float(many - one) / 7, 0.0)
        return cls(max(float(one) - per_row, 0.0), per_row, True, width, source)

    def calls(self, levels: np.ndarray) -> tuple[float, float]:
        """Calls, and rows in calls, of drafts that are `levels` deep (`[rows]` int; 0: not asked for)."""
        if self.is_autoregressive:
            return float(levels.max(initial=0)), float(levels.sum())
        num_rows = np.count_nonzero(levels)
        return float(num_rows > 0), float(num_rows)


class DraftTimer:
    """
    Learns seconds per call and per row in a call from measured drafts: decayed least squares of the relative error,
    drawn to what the `DraftCost` says.

    Args:
        decay (`float`): Weight of all earlier drafts against the newest.
    """

    _SCALE = 0.05  # of a row's seconds to a call's: what cannot be told apart is split this way
    _TRUST = 1e-3  # in the prior

    def __init__(self, decay: float = 0.97):
        self._decay = decay
        # Sums over drafts of products and targets, x being calls and y scaled rows in calls, both by seconds.
        self._xx = self._xy = self._yy = self._x = self._y = 0.0

    def observe(self, calls: float, rows: float, seconds: float) -> None:
        """One step's drafting; `calls` and `rows` as `DraftCost.calls` counts them."""
        if calls <= 0 or not 1e-9 < seconds < 1e9:
            return
        x, y, decay = calls / seconds, self._SCALE * rows / seconds, self._decay
        self._xx, self._xy, self._yy = self._xx * decay + x * x, self._xy * decay + x * y, self._yy * decay + y * y
        self._x, self._y = self._x * decay + x, self._y * decay + y

    def seconds(self, cost: DraftCost) -> tuple[float, float]:
        """(seconds per call, seconds per row in a call)."""
        trust = self._TRUST * (self._xx + self._yy)
        if not trust:
            return cost.per_call, cost.per_row
        xx, yy, xy = self._xx + trust, self._yy + trust, self._xy
        x, y = self._x + trust * cost.per_call, self._y + trust * cost.per_row / self._SCALE
        determinant = xx * yy - xy * xy
        per_call, per_row = (yy * x - xy * y) / determinant, (xx * y - xy * x) / determinant
        if per_call < 0:  # one of them explains it all
            per_call, per_row = 0.0, y / yy
        elif per_row < 0:
            per_call, per_row = x / xx, 0.0
        return per_call, per_row * self._SCALE
