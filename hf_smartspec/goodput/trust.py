"""What drafts' own probabilities are worth in one engine."""

from collections import defaultdict

import numpy as np

from ..drafts.forest import Forest
from .acceptance import Calibrator
from .policy import StepRows
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

    def probs(self, rows: StepRows, forest: Forest) -> np.ndarray:
        """Probabilities that each node comes true if its parent does, `[n]`."""
        probs = np.empty(forest.num_nodes)
        for source, nodes in rows.by_source(forest.row):
            lengths = forest.match_lengths[nodes]
            calibrated = self.calibrator.calibrate(source, forest.probs[nodes], forest.depths[nodes], lengths)
            probs[nodes] = calibrated * self._drifts[source].ratio
        return np.minimum(probs, 1.0)

    def of_source(self, source: str) -> float:
        """The factor by which a source's high probabilities are too low."""
        return float(self.calibrator.calibrate(source, [_HIGH], [2])[0]) / _HIGH

    def learn(self, rows: StepRows, forest: Forest, nodes: np.ndarray, hits: np.ndarray) -> None:
        """How nodes fared (`[m]` indices, `[m]` bool) whose parents came true."""
        if not len(nodes):
            return
        probs, depths, lengths = forest.probs[nodes], forest.depths[nodes], forest.match_lengths[nodes]
        for source, part in rows.by_source(forest.row[nodes]):
            expected = self.calibrator.calibrate(source, probs[part], depths[part], lengths[part]).sum()
            self._drifts[source].add(expected, hits[part].sum())
            self.calibrator.update(source, probs[part], depths[part], lengths[part], hits[part])
