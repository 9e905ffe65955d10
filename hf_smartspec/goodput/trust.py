"""What drafts' own probabilities are worth in one engine."""

from collections import defaultdict

import numpy as np

from ..drafts.forest import Forest
from .acceptance import Calibrator
from .running import Drift

_HALF_LIFE = 1000.0  # of an observed node, in nodes
_STRENGTH = 30.0  # of a draft's own probability, in observations: calibrated sources are hardly disturbed
_HIGH = 0.8  # a probability by which a source is judged as a whole


class Trust:
    """
    Drafts' probabilities, corrected by a `Calibrator` for each source and, where acceptance changes, by how its
    predictions have fared lately.
    """

    def __init__(self) -> None:
        self.calibrator = Calibrator(_HALF_LIFE, _STRENGTH)
        self._drifts: defaultdict[str, Drift] = defaultdict(Drift)  # by source

    def probs(self, source: str, forest: Forest) -> np.ndarray:
        """Probabilities that each of a source's nodes comes true if its parent does, `[n]`."""
        calibrated = self.calibrator.calibrate(source, forest.probs, forest.depths, forest.match_lengths)
        return np.minimum(calibrated * self._drifts[source].ratio, 1.0)

    def of_source(self, source: str) -> float:
        """The factor by which a source's high probabilities are too low."""
        return float(self.calibrator.calibrate(source, [_HIGH], [2])[0]) / _HIGH

    def learn(self, source: str, forest: Forest, nodes: np.ndarray, hits: np.ndarray) -> None:
        """How a source's nodes fared (`[m]` indices, `[m]` bool) whose parents came true."""
        if not len(nodes):
            return
        probs, depths, lengths = forest.probs[nodes], forest.depths[nodes], forest.match_lengths[nodes]
        expected = self.calibrator.calibrate(source, probs, depths, lengths).sum()
        self._drifts[source].add(expected, hits.sum())
        self.calibrator.update(source, probs, depths, lengths, hits)
