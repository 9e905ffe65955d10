"""What drafts' own probabilities are worth in one engine."""

from collections import defaultdict
from functools import cache

import numpy as np

from ..drafts.forest import Forest
from .acceptance import Calibrator, Located
from .running import Drift

_HALF_LIFE = 1000.0  # of an observed node, in nodes
_STRENGTH = 30.0  # of a draft's own probability, in observations: calibrated sources are hardly disturbed
_HIGH = 0.8  # a probability by which a source is judged as a whole


@cache
def _likely() -> Located:
    """Return a node of that probability, for which a compiled function is called."""
    return Located.at([_HIGH], [2], 0)


class Trust:
    """
    Drafts' probabilities, corrected by a `Calibrator` for each source and, where acceptance changes, by how its
    predictions have fared lately.
    """

    def __init__(self) -> None:
        self.calibrator = Calibrator(_HALF_LIFE, _STRENGTH)
        self._drifts: defaultdict[str, Drift] = defaultdict(Drift)  # by source
        self._latest: dict[str, tuple[Forest, Located]] = {}  # by source: what it has drafted

    def probs(self, source: str, forest: Forest) -> np.ndarray:
        """Probabilities that each of a source's nodes comes true if its parent does, `[n]`."""
        calibrated = self.calibrator.calibrate_located(source, self._located(source, forest))
        return np.minimum(calibrated * self._drifts[source].ratio, 1.0)

    def of_source(self, source: str) -> float:
        """The factor by which a source's high probabilities are too low."""
        return float(self.calibrator.calibrate_located(source, _likely())[0]) / _HIGH

    def learn(self, source: str, forest: Forest, nodes: np.ndarray, hits: np.ndarray) -> None:
        """How a source's nodes fared (`[m]` indices, `[m]` bool) whose parents came true."""
        if not len(nodes):
            return
        located = self._located(source, forest).of(nodes)
        self._latest.pop(source)
        expected = self.calibrator.calibrate_located(source, located).sum()
        self._drifts[source].add(expected, hits.sum())
        self.calibrator.update_located(source, located, hits.astype(np.float64))

    def _located(self, source: str, forest: Forest) -> Located:
        """Of the forest's nodes; looked up once for what was drafted, and for what came of it."""
        latest = self._latest.get(source)
        if latest is None or latest[0] is not forest:
            latest = self._latest[source] = forest, Located.of_forest(forest)
        return latest[1]
