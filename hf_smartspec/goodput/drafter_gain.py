"""What a second, costlier source adds to drafts that are there already."""

from collections.abc import Hashable, Sequence

import numpy as np

from .cost import DraftCost, DraftTimer

_EDGES = np.array([0.05, 0.15, 0.3, 0.5, 0.75, 1.0, 1.5, 2.2, 3.2, 5.0])  # of what the first drafts promise, in tokens
_SHAPE = np.exp(-1.5 * np.append(0.0, _EDGES))  # of the gain: where much is promised, little is left to add
_HALF_LIFE = 300.0  # of an observation, in observations of its bin
_REQUEST_HALF_LIFE = 30.0  # the same among those of one request
_STRENGTH = 4.0  # of what is known in general, in observations
_MOST_LEFT_OUT = 8  # drafts in a row with prompts among them
_GAIN, _LEVELS = 1.0, 3.0  # before anything is known. Optimistic: it takes a try to find out


class DrafterGain:
    """
    Running means, by the tokens that the first draft of a row promises, of how many further tokens come true with the
    second source's draft beside it, and of how many levels that has. Some requests suit it more than others: what they
    gained counts, against what requests of their promises gain.
    """

    def __init__(self) -> None:
        num_bins = len(_EDGES) + 1
        self._num, self._gains, self._levels = np.zeros(num_bins), np.zeros(num_bins), np.zeros(num_bins)
        self._requests: dict[Hashable, tuple[float, float]] = {}  # expected and observed gains, decayed

    def expected(self, request_ids: Sequence[Hashable], promises: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """
        Args:
            promises (`np.ndarray` of shape `[rows]`, float64): Expected tokens of the first drafts.

        Returns:
            Tokens gained and levels drafted, `[rows]` float64 each.
        """
        gains, levels = self._means(np.searchsorted(_EDGES, promises))
        known = (self._requests.get(name, (0.0, 0.0)) for name in request_ids)
        factors = [(observed + _STRENGTH / 2) / (expected + _STRENGTH / 2) for expected, observed in known]
        return gains * factors, levels

    def _means(self, bins: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        gain = (self._gains.sum() + _STRENGTH * _GAIN) / (self._num @ _SHAPE + _STRENGTH) * _SHAPE[bins]
        level = (self._levels.sum() + _STRENGTH * _LEVELS) / (self._num.sum() + _STRENGTH)
        num = self._num[bins] + _STRENGTH
        return (self._gains[bins] + _STRENGTH * gain) / num, (self._levels[bins] + _STRENGTH * level) / num

    def update(
        self, request_ids: Sequence[Hashable], promises: np.ndarray, gains: np.ndarray, levels: np.ndarray
    ) -> None:
        """What came of rows that were drafted for again; arrays `[rows]`."""
        bins = np.searchsorted(_EDGES, promises)
        expected, _ = self._means(bins)
        decay = 0.5 ** (1 / _REQUEST_HALF_LIFE)
        for name, more_expected, more in zip(request_ids, expected.tolist(), gains.tolist()):
            old_expected, old = self._requests.get(name, (0.0, 0.0))
            self._requests[name] = old_expected * decay + more_expected, old * decay + more
        counts = np.bincount(bins, minlength=len(self._num))
        for sums, values in ((self._num, None), (self._gains, gains), (self._levels, levels)):
            sums *= 0.5 ** (counts / _HALF_LIFE)
            sums += np.bincount(bins, values, minlength=len(sums))

    def forget(self, request_id: Hashable) -> None:
        """The request has ended. Unknown ids are ignored."""
        self._requests.pop(request_id, None)


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
