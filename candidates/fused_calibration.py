"""Calibration of fused sources from tables: asking a calibrator about every draft costs more than to draft."""

from array import array
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from ..tree import DraftTree

_NUM_SCORES, _NUM_DEPTHS = 256, 17  # of a table; what lies deeper counts as the last
_MOST_PENDING = 256  # observations that wait; a table is made anew when they are learnt
_MOST_TABLES = 256  # kept, of 17 kB each; others are made anew from what the calibrator knows


class Draft(NamedTuple):
    """A source's tree as lists, which are read faster than arrays element by element."""

    tokens: list[int]
    probs: list[float]  # in [0, 1]
    depths: list[int]  # 0 for children of the last committed token
    children: dict[int, list[int]]  # by node, -1 for the last committed token

    @classmethod
    def of(cls, tree: DraftTree) -> "Draft":
        if not len(tree):
            return _NOTHING
        depths: list[int] = []
        children: dict[int, list[int]] = {}
        for node, parent in enumerate(tree.parents.tolist()):
            depths.append(depths[parent] + 1 if parent >= 0 else 0)
            children.setdefault(parent, []).append(node)
        # What is no number says nothing: an even chance.
        probs = [min(max(prob, 0.0), 1.0) if prob == prob else 0.5 for prob in tree.probs.tolist()]
        return cls(tree.tokens.tolist(), probs, depths, children)


_NOTHING = Draft([], [], [], {})


class ProbabilityCalibrator(Protocol):
    """What a source's raw probabilities are worth; `goodput.Calibrator` is one."""

    def calibrate(self, source: Hashable, scores: Any, depths: Any) -> np.ndarray: ...
    def update(self, source: Hashable, scores: Any, depths: Any, match_lengths: Any, hits: Any) -> None: ...


class _Table:
    """One source in one namespace: its calibrated probabilities by depth and raw score, and what is to be learnt."""

    def __init__(self, calibrator: ProbabilityCalibrator, key: Hashable):
        self.calibrator, self.key = calibrator, key
        self.num_learnt = 0
        self.scores: list[float] = []
        self.depths: list[int] = []
        self.hits: list[bool] = []
        self._fill()

    def _fill(self) -> None:
        scores = np.tile(np.linspace(0.0, 1.0, _NUM_SCORES), _NUM_DEPTHS)
        depths = np.repeat(np.arange(1, _NUM_DEPTHS + 1), _NUM_SCORES)
        self.probs = array("f", self.calibrator.calibrate(self.key, scores, depths).astype(np.float32).tobytes())

    def look_up(self, draft: Draft) -> list[float]:
        probs, last = self.probs, _NUM_DEPTHS - 1
        return [
            probs[min(depth, last) * _NUM_SCORES + int(score * (_NUM_SCORES - 1) + 0.5)]
            for depth, score in zip(draft.depths, draft.probs)
        ]

    def learn(self, draft: Draft, tokens: Sequence[int]) -> None:
        """Notes how the nodes fared whose parent came true (see `goodput.outcomes`)."""
        nodes = draft.children.get(-1, [])
        for depth, token in enumerate(tokens, start=1):
            following: list[int] = []
            for node in nodes:
                is_hit = draft.tokens[node] == token
                if is_hit:
                    following = draft.children.get(node, [])
                self.scores.append(draft.probs[node])
                self.depths.append(depth)
                self.hits.append(is_hit)
            nodes = following
        # Often at first, when much is learnt from little.
        if len(self.scores) >= min(_MOST_PENDING, 8 + self.num_learnt // 4):
            self.flush()

    def flush(self) -> None:
        if not self.scores:
            return
        self.calibrator.update(self.key, self.scores, self.depths, 0, self.hits)
        self.num_learnt += len(self.scores)
        self.scores, self.depths, self.hits = [], [], []
        self._fill()


class Calibrations:
    """
    The calibration of several sources, apart for every namespace.

    Args:
        calibrator (`ProbabilityCalibrator`): Knows each source as (namespace, name).
        names (sequence of `str`): Of the sources.
    """

    def __init__(self, calibrator: ProbabilityCalibrator, names: Sequence[str]):
        self.calibrator, self.names = calibrator, names
        self._tables: OrderedDict[Hashable, list[_Table]] = OrderedDict()  # by namespace, the latest used last

    def _of(self, namespace: Hashable) -> list[_Table]:
        if namespace not in self._tables:
            while (len(self._tables) + 1) * len(self.names) > max(_MOST_TABLES, len(self.names)):
                _, tables = self._tables.popitem(last=False)
                for table in tables:
                    table.flush()
            self._tables[namespace] = [_Table(self.calibrator, (namespace, name)) for name in self.names]
        self._tables.move_to_end(namespace)
        return self._tables[namespace]

    def calibrated(self, namespace: Hashable, drafts: Sequence[Draft]) -> list[Draft]:
        tables = self._of(namespace)
        return [draft._replace(probs=table.look_up(draft)) for table, draft in zip(tables, drafts)]

    def learn(self, namespace: Hashable, drafts: Sequence[Draft], tokens: np.ndarray) -> None:
        """Learns from the sources' drafts, with raw probabilities, and the tokens that were committed behind them."""
        truth = tokens.tolist()
        for table, draft in zip(self._of(namespace), drafts):
            table.learn(draft, truth)

    def flush(self, namespace: Hashable) -> None:
        """Nothing waits to be learnt any more."""
        for table in self._tables.get(namespace, ()):
            table.flush()
