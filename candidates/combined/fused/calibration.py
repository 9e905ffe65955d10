"""Calibration of fused sources from tables: asking a calibrator about every draft costs more than to draft."""

from array import array
from collections import OrderedDict
from collections.abc import Hashable, Sequence

import numpy as np

from ....drafts.merge import Draft
from ....goodput.estimates.calibrator import Calibrator

_NUM_SCORES, _NUM_DEPTHS = 128, 9  # of a table; what lies deeper counts as the last
_LONGEST = 17  # match length with a table of its own; longer ones count as this one
_MOST_PENDING = 512  # observations that wait; tables are made anew when they are learnt
_MOST_SOURCES = 256  # whose tables are kept, of 5 kB for each match length that occurs

_TABLE_SCORES = np.tile(np.linspace(0.0, 1.0, _NUM_SCORES), _NUM_DEPTHS)
_TABLE_DEPTHS = np.repeat(np.arange(1, _NUM_DEPTHS + 1), _NUM_SCORES)


class _Tables(dict[int, array]):
    """A source's calibrated probabilities by depth and raw score, a table for each match length that is asked for."""

    def __init__(self, calibrator: Calibrator, key: Hashable):
        self.calibrator, self.key = calibrator, key

    def __missing__(self, length: int) -> array:
        if not 0 <= length <= _LONGEST:
            return self[min(max(length, 0), _LONGEST)]
        probs = self.calibrator.calibrate(self.key, _TABLE_SCORES, _TABLE_DEPTHS, length)
        table = self[length] = array("f", probs.astype(np.float32).tobytes())
        return table


class _Learner:
    """One source in one namespace: its tables, and observations that are not learnt yet."""

    def __init__(self, calibrator: Calibrator, key: Hashable):
        self.calibrator, self.key = calibrator, key
        self.num_learnt = 0
        self.scores: list[float] = []
        self.depths: list[int] = []
        self.match_lengths: list[int] = []
        self.hits: list[bool] = []
        self.tables = _Tables(calibrator, key)

    def look_up(self, draft: Draft) -> list[float]:
        tables, last = self.tables, _NUM_DEPTHS - 1
        return [
            tables[length][min(depth, last) * _NUM_SCORES + int(score * (_NUM_SCORES - 1) + 0.5)]
            for depth, score, length in zip(draft.depths, draft.probs, draft.match_lengths)
        ]

    def learn(self, draft: Draft, tokens: Sequence[int]) -> None:
        """Note whether each node whose parent was accepted was accepted itself (see `goodput.outcomes`)."""
        nodes = draft.children.get(-1, [])
        for depth, token in enumerate(tokens, start=1):
            following: list[int] = []
            for node in nodes:
                is_hit = draft.tokens[node] == token
                if is_hit:
                    following = draft.children.get(node, [])
                self.scores.append(draft.probs[node])
                self.depths.append(min(depth, _NUM_DEPTHS))
                self.match_lengths.append(min(draft.match_lengths[node], _LONGEST))
                self.hits.append(is_hit)
            nodes = following
        # Often at first, when much is learnt from little.
        if len(self.scores) >= min(_MOST_PENDING, 8 + self.num_learnt // 4):
            self.flush()

    def flush(self) -> None:
        if not self.scores:
            return
        self.calibrator.update(self.key, self.scores, self.depths, self.match_lengths, self.hits)
        self.num_learnt += len(self.scores)
        self.scores, self.depths, self.match_lengths, self.hits = [], [], [], []
        self.tables.clear()


class Calibrations:
    """
    The calibration of several sources, separate for every namespace.

    Args:
        calibrator (`Calibrator`): Has each source under (namespace, name).
        names (sequence of `str`): Names of the sources.
    """

    def __init__(self, calibrator: Calibrator, names: Sequence[str]):
        self.calibrator, self.names = calibrator, names
        self._learners: OrderedDict[Hashable, list[_Learner]] = OrderedDict()  # by namespace, the latest used last

    def _of(self, namespace: Hashable) -> list[_Learner]:
        if namespace not in self._learners:
            while (len(self._learners) + 1) * len(self.names) > max(_MOST_SOURCES, len(self.names)):
                _, learners = self._learners.popitem(last=False)
                for learner in learners:
                    learner.flush()
            self._learners[namespace] = [_Learner(self.calibrator, (namespace, name)) for name in self.names]
        self._learners.move_to_end(namespace)
        return self._learners[namespace]

    def calibrated(self, namespace: Hashable, drafts: Sequence[Draft]) -> list[Draft]:
        """Return the drafts of all sources with calibrated probabilities."""
        learners = self._of(namespace)
        return [draft._replace(probs=learner.look_up(draft)) for learner, draft in zip(learners, drafts)]

    def learn(self, namespace: Hashable, drafts: Sequence[Draft], tokens: np.ndarray) -> None:
        """Learn from the sources' drafts, with raw probabilities, and the tokens that were committed after them."""
        truth = tokens.tolist()
        for learner, draft in zip(self._of(namespace), drafts):
            learner.learn(draft, truth)

    def flush(self, namespace: Hashable) -> None:
        """Learn from all observations of a namespace that wait."""
        for learner in self._learners.get(namespace, ()):
            learner.flush()
