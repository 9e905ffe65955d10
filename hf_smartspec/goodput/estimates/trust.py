"""Correction of drafts' own probabilities by observed acceptance."""

from collections import defaultdict
from functools import cache, partial

import numpy as np

from ...drafts.forest import Forest
from .calibrator import Calibrator, Located
from .decayed import DecayedRate

_HALF_LIFE = 1000.0  # of an observed node, in nodes
_STRENGTH = 30.0  # weight of a draft's own probability, in observations: calibrated sources hardly change
_HIGH = 0.8  # the probability at which a source as a whole is judged
_DRIFT_DECAY = 0.96  # decay per step of expected and observed acceptance
_DRIFT_STRENGTH = 3.0  # weight of the prior that they are equal, in accepted nodes


@cache
def _likely() -> Located:
    """Return a node of probability `_HIGH`, located once, since that calls a compiled function."""
    return Located.at([_HIGH], [2], 0)


class Trust:
    """
    Corrects drafts' probabilities by a `Calibrator` for each source and, as acceptance changes, by the recent ratio of
    observed to predicted acceptance.
    """

    def __init__(self) -> None:
        self.calibrator = Calibrator(_HALF_LIFE, _STRENGTH)
        # Ratio of observed to expected acceptance over the latest steps: quicker and coarser than the calibrator.
        self._drifts: defaultdict[str, DecayedRate] = defaultdict(partial(DecayedRate, 1.0, _DRIFT_STRENGTH))
        self._latest: dict[str, tuple[Forest, Located]] = {}  # latest draft by source

    def probs(self, source: str, forest: Forest) -> np.ndarray:
        """Return the corrected acceptance probabilities of a source's nodes, given accepted parents, `[n]`."""
        calibrated = self.calibrator.calibrate_located(source, self._located(source, forest))
        return np.minimum(calibrated * self._drifts[source].rate, 1.0)

    def of_source(self, source: str) -> float:
        """Return the factor between acceptance and a source's own high probabilities."""
        return float(self.calibrator.calibrate_located(source, _likely())[0]) / _HIGH

    def learn(self, source: str, forest: Forest, nodes: np.ndarray, hits: np.ndarray) -> None:
        """Learn from nodes whose parents were right: their indices `[m]`, and whether they were right, bool `[m]`."""
        if not len(nodes):
            return
        located = self._located(source, forest).of(nodes)
        self._latest.pop(source)
        expected = self.calibrator.calibrate_located(source, located).sum()
        self._drifts[source].add(expected, hits.sum(), _DRIFT_DECAY)
        self.calibrator.update_located(source, located, hits.astype(np.float64))

    def _located(self, source: str, forest: Forest) -> Located:
        """Return the cells of the forest's nodes, kept from drafting until the draft's outcome is learnt."""
        latest = self._latest.get(source)
        if latest is None or latest[0] is not forest:
            latest = self._latest[source] = forest, Located.of_forest(forest)
        return latest[1]
