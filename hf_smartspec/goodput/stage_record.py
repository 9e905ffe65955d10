"""What an auction remembers of each source: what its drafts cost, and what they bring beside those already there."""

from collections.abc import Hashable, Sequence

import numpy as np

from ..drafts.forest import Forest
from .draft_cost import DraftCost, DraftTimer
from .estimators import CERTAIN, AcceptanceEstimator
from .running import Running
from .stage import Stage

_EDGES = np.array([0.0, 0.05, 0.15, 0.3, 0.5, 0.75, 1.0, 1.5, 2.2, 3.2, 5.0])  # of what earlier drafts promise, tokens
_PRIOR = np.append(1.0, np.exp(-1.5 * _EDGES))  # of the share: where much is promised, little is left to add
_HALF_LIFE = 300.0  # of a level that came true, in such levels of its bin
_STRENGTH = 4.0  # of what is known in general, in levels
_MOST_LEFT_OUT = 8  # drafts in a row with prompts among them


class StageRecord:
    """
    One source's. `acceptance` (what came true of its own drafts, verified or not) is kept of sources that are asked by
    what their levels bring.
    """

    def __init__(self) -> None:
        self.timer, self.acceptance, self.novelty = DraftTimer(), AcceptanceEstimator(), Novelty()
        self.benefit = Running()  # seconds that drafts have saved, of first sources that draft in one call
        self.pays = False  # whether levels lately promised more than they cost, of sources that are asked by level
        self._newcomers = Newcomers()
        self._number = 0

    def renew(self, number: int) -> None:
        """The source has learnt, for the `number`-th time: its drafts are tried again, whatever they were worth."""
        if number != self._number:
            self._number = number
            self.acceptance.doubt_all()
            self.benefit = Running()

    def seconds(self, cost: DraftCost, levels: np.ndarray) -> float:
        """What drafts of so many levels (`[rows]` int) take."""
        per_call, per_row = self.timer.seconds(cost)
        calls, in_calls = cost.calls(levels)
        return per_call * calls + per_row * in_calls

    def gains(
        self, request_ids: Sequence[Hashable], promises: np.ndarray, num_levels: int, in_doubt: bool = False
    ) -> np.ndarray:
        """
        How likely each level of a draft brings a token that the trees which promise so much (`[rows]`, in tokens) do
        not hold, `[rows, num_levels]` float64; `in_doubt`, as likely as it may well be.
        """
        known = self.acceptance
        rates = known.of_requests(request_ids, num_levels)
        if in_doubt:
            rates = np.minimum(rates * (1 + known.doubt / known.rate), CERTAIN)
        acceptance = np.cumprod(rates, axis=1)
        return acceptance * self.novelty.share(promises)[:, None]

    def learn_time(self, stage: Stage, request_ids: Sequence[Hashable]) -> None:
        self._newcomers.time(self.timer, stage.cost, request_ids, stage.levels, stage.seconds)

    def learn_levels(
        self, request_ids: Sequence[Hashable], stage: Stage, forest: Forest, nodes: np.ndarray, hits: np.ndarray
    ) -> None:
        """How nodes fared (`[m]` indices, `[m]` bool) whose parents came true. Silence is a level that did not."""
        row, depth = forest.row[nodes], forest.depths[nodes]
        tried = np.zeros((len(request_ids), int(depth.max(initial=1))), bool)
        tried[:, 0] = (stage.asked > 0) & (forest.sizes == 0)
        tried[row, depth - 1] = True
        succeeded = np.zeros_like(tried)
        succeeded[row[hits], depth[hits] - 1] = True
        self.acceptance.update(request_ids, tried, succeeded)

    def forget(self, request_id: Hashable) -> None:
        """The request has ended. Unknown ids are ignored."""
        self.acceptance.forget(request_id)
        self._newcomers.forget(request_id)


class Novelty:
    """
    Of the tokens that a source's drafts had right, the share that the drafts which were there already had not: running
    means by the tokens that these promise. Where there is nothing yet, all are new.
    """

    def __init__(self) -> None:
        self._true, self._new = np.zeros(len(_PRIOR)), np.zeros(len(_PRIOR))

    def share(self, promises: np.ndarray) -> np.ndarray:
        """`[rows]` float64 in [0, 1], for promises `[rows]`, in tokens."""
        general = (self._new[1:].sum() + _STRENGTH) / (self._true[1:] @ _PRIOR[1:] + _STRENGTH)
        prior = np.minimum(general * _PRIOR, 1.0)
        prior[0] = 1.0
        return ((self._new + _STRENGTH * prior) / (self._true + _STRENGTH))[np.searchsorted(_EDGES, promises)]

    def update(self, promises: np.ndarray, before: np.ndarray, reached: np.ndarray) -> None:
        """
        Args:
            promises (`np.ndarray` of shape `[rows]`): Of the drafts that were there before.
            before, reached (`np.ndarray` of shape `[rows]`, int): How deep these drafts came true, and the source's.
        """
        bins = np.searchsorted(_EDGES, promises)
        true, new = (np.bincount(bins, values, len(_PRIOR)) for values in (reached, np.maximum(reached - before, 0)))
        decay = 0.5 ** (true / _HALF_LIFE)
        self._true, self._new = self._true * decay + true, self._new * decay + new


class Newcomers:
    """
    An autoregressive drafter reads a request's prompt before its first draft. That is no draft's cost, and so such
    steps teach nothing about it, unless there are hardly any others.
    """

    def __init__(self) -> None:
        self._known: set[Hashable] = set()
        self._num_left_out = 0

    def time(
        self, timer: DraftTimer, draft: DraftCost, request_ids: Sequence[Hashable], levels: np.ndarray, seconds: float
    ) -> None:
        """Has the timer learn what drafts took that are `levels` deep (`[rows]` int; 0: not asked for)."""
        if draft.is_autoregressive and levels.any():
            names = [name for name, level in zip(request_ids, levels.tolist()) if level]
            are_known = self._known.issuperset(names)
            self._known.update(names)
            self._num_left_out = 0 if are_known else self._num_left_out + 1
            if 0 < self._num_left_out <= _MOST_LEFT_OUT:
                return
            self._num_left_out = 0
        timer.observe(*draft.calls(levels), seconds)

    def forget(self, request_id: Hashable) -> None:
        """The request has ended. Unknown ids are ignored."""
        self._known.discard(request_id)
