"""Correction of drafts' own probabilities by observed acceptance."""

from collections import defaultdict
from collections.abc import Hashable, Sequence
from functools import cache, partial
from typing import Any

import numpy as np

from ...drafts.forest import Forest
from .calibrator import Calibrator, Located
from .decayed import DecayedRate, shrunk

_HALF_LIFE = 1000.0  # of an observed node, in nodes
_STRENGTH = 30.0  # weight of a draft's own probability, in observations: calibrated sources hardly change
_HIGH = 0.8  # the probability at which a source as a whole is judged
_DRIFT_DECAY = 0.99  # decay per step of expected and observed acceptance
_DRIFT_STRENGTH = 3.0  # weight of the prior that they are equal, in accepted nodes
_GENERAL_STRENGTH = 3.0  # weight of the ratio of all requests in that of one, in accepted nodes


@cache
def _likely() -> Located:
    """Return a node of probability `_HIGH`, located once, since that calls a compiled function."""
    return Located.at([_HIGH], [2], 0)


class Trust:
    """
    Corrects drafts' probabilities by a `Calibrator` for each source and, as acceptance changes, by the recent ratio of
    observed to predicted acceptance: the request's own, shrunk towards that of all requests.
    """

    def __init__(self) -> None:
        self.calibrator = Calibrator(_HALF_LIFE, _STRENGTH)
        # Ratios of observed to expected acceptance over the latest steps: quicker and coarser than the calibrator.
        self._drifts: defaultdict[str, DecayedRate] = defaultdict(partial(DecayedRate, 1.0, _DRIFT_STRENGTH))
        self._own: dict[Hashable, dict[str, DecayedRate]] = {}  # of running requests, by source
        self._latest: dict[str, tuple[Forest, Located]] = {}  # latest draft by source

    def probs(self, source: str, forest: Forest, request_ids: Sequence[Hashable]) -> np.ndarray:
        """
        Return the corrected acceptance probabilities of a source's nodes, given accepted parents, `[n]`.

        Args:
            request_ids (sequence): Ids of the forest's rows.
        """
        probs = self.calibrator.calibrate_located(source, self._located(source, forest))
        products = probs * self._ratios(source, forest, request_ids)
        # A ratio above 1 multiplies odds: products with it would make certain what is likely already.
        return products / np.maximum(1 - probs + products, 1.0)

    def _ratios(self, source: str, forest: Forest, request_ids: Sequence[Hashable]) -> Any:
        """Return the ratios of observed to expected acceptance: of the only row, or of each node, `[n]`."""
        general = self._drifts[source].rate
        known = [self._own.get(name, {}).get(source) for name in request_ids]
        ratios = [general if own is None else shrunk(own.hits, own.tries, general, _GENERAL_STRENGTH) for own in known]
        return ratios[0] if len(ratios) == 1 else np.array(ratios)[forest.row]

    def of_source(self, source: str) -> float:
        """Return the factor between acceptance and a source's own high probabilities."""
        return float(self.calibrator.calibrate_located(source, _likely())[0]) / _HIGH

    def learn(
        self, source: str, forest: Forest, nodes: np.ndarray, hits: np.ndarray, request_ids: Sequence[Hashable]
    ) -> None:
        """Learn from nodes whose parents were right: their indices `[m]`, and whether they were right, bool `[m]`."""
        if not len(nodes):
            return
        located = self._located(source, forest).of(nodes)
        self._latest.pop(source)
        expected = self.calibrator.calibrate_located(source, located)
        self._drifts[source].add(expected.sum(), hits.sum(), _DRIFT_DECAY)
        sums = [np.bincount(forest.row[nodes], values, len(request_ids)).tolist() for values in (expected, hits)]
        for name, num_expected, num_right in zip(request_ids, *sums):
            self._own.setdefault(name, {}).setdefault(source, DecayedRate()).add(num_expected, num_right, _DRIFT_DECAY)
        self.calibrator.update_located(source, located, hits.astype(np.float64))

    def forget(self, request_id: Hashable) -> None:
        """Delete a request that has ended. Unknown ids are ignored."""
        self._own.pop(request_id, None)

    def _located(self, source: str, forest: Forest) -> Located:
        """Return the cells of the forest's nodes, kept from drafting until the draft's outcome is learnt."""
        latest = self._latest.get(source)
        if latest is None or latest[0] is not forest:
            latest = self._latest[source] = forest, Located.of_forest(forest)
        return latest[1]
