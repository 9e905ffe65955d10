"""Acceptance probabilities of draft nodes: raw scores of sources, calibrated by observed acceptance."""

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import replace
from threading import Lock
from typing import NamedTuple

import numpy as np

from ...drafts.forest import Forest
from ...drafts.tree import DraftTree
from ..kernels.cells import count, estimate, locate
from .decayed import shrunk

# Upper ends of the bins of raw scores. No k / (k + 1) and no 1 / k lies on an edge, where float32 would decide: these
# are the ratios of small counts, which are the scores that suffix trees give most often.
_SCORE_EDGES = np.array(
    [0.015, 0.035, 0.07, 0.12, 0.18, 0.23, 0.29, 0.36, 0.44, 0.55, 0.63, 0.71, 0.78, 0.845, 0.895, 0.935, 0.965, 0.985,
     0.995]
)  # fmt: skip
# Lower ends of the bins of depths and match lengths, which matter by ratio: 4 differs from 2 as 32 does from 16.
_LENGTH_EDGES = np.array([1, 2, 3, 4, 5, 7, 9, 13, 17, 33])
_NUM_SCORES, _NUM_LENGTHS = len(_SCORE_EDGES) + 1, len(_LENGTH_EDGES) + 1
_LENGTH_BINS = np.searchsorted(_LENGTH_EDGES, np.arange(_LENGTH_EDGES[-1] + 1), side="right")  # by length

# Cells of all levels lie in one array, coarse levels first: [whole source | by score | and depth | and match length].
_SIZES = np.array([1, _NUM_SCORES, _NUM_SCORES * _NUM_LENGTHS, _NUM_SCORES * _NUM_LENGTHS**2])
_STARTS = np.cumsum(_SIZES) - _SIZES

_MOST_SOURCES = 512  # sources whose counts are kept


class Calibrator:
    """
    Maps (source, raw score bin, depth, match length) to the observed acceptance frequency (docs/design.md, "Trust").

    Every cell shrinks towards the next coarser one by `strength` pseudo-observations, and the coarsest towards the raw
    score: without data the raw score is returned, with little data it is scaled by the source's overall error, with
    much data the observed frequency of the finest cell is returned. Counts decay, so that estimates follow a source
    that learns, or another kind of text.

    Counts of the 512 sources that were updated last are kept, in 39 kB each. Calls may come from several threads.

    Args:
        half_life (`float`): Observed nodes of a source after which an observation counts half. Recorded text changes
            within a file, so that much longer half-lives lag.
        strength (`float`): Weight of the coarser level, in observations.

    Example:
        >>> calibrator = Calibrator()
        >>> calibrator.update("suffix", scores=[0.9, 0.9], depths=[1, 2], match_lengths=[3, 3], hits=[True, False])
        >>> probs = calibrator.calibrate("suffix", scores=[0.9], depths=[1], match_lengths=[3])
    """

    def __init__(self, half_life: float = 4_000, strength: float = 8.0):
        for name, value in (("half_life", half_life), ("strength", strength)):
            if not np.isfinite(value) or value <= 0:
                raise ValueError(f"`{name}` must be a positive number, got {value!r}.")
        self.half_life, self.strength = float(half_life), float(strength)
        self._tables: OrderedDict[Hashable, _Table] = OrderedDict()
        self._lock = Lock()

    def calibrate(
        self,
        source: Hashable,
        scores: Sequence[float] | np.ndarray,
        depths: Sequence[int] | np.ndarray,
        match_lengths: Sequence[int] | np.ndarray | int = 0,
    ) -> np.ndarray:
        """
        Return calibrated acceptance probabilities of nodes.

        Args:
            source: Name of the source; each has separate counts.
            scores (`[n]` floats): Raw estimates that a node is accepted given its parent was; clipped to [0, 1].
            depths (`[n]` integers): Depth of each node, 1 for children of the last committed token.
            match_lengths (`[n]` integers or one): Tokens of context that the draft was found by; 0 where unknown.

        Returns:
            `np.ndarray` of shape `[n]`, float32: Acceptance probabilities, to replace `DraftTree.probs`.

        Raises:
            ValueError: if the arrays differ in length.
        """
        return self.calibrate_located(source, Located.at(scores, depths, match_lengths))

    def calibrate_located(self, source: Hashable, nodes: "Located") -> np.ndarray:
        """Return `calibrate` for nodes whose cells are already located."""
        with self._lock:
            table = self._tables.get(source)
            probs = nodes.scores if table is None else table.probs(*nodes, self.strength)
        return probs.astype(np.float32)

    def update(
        self,
        source: Hashable,
        scores: Sequence[float] | np.ndarray,
        depths: Sequence[int] | np.ndarray,
        match_lengths: Sequence[int] | np.ndarray | int,
        hits: Sequence[bool] | np.ndarray,
    ) -> None:
        """
        Learn whether nodes were right (`hits`). Pass only nodes whose parent was right, see `outcomes`, and their raw
        scores, not those that `calibrate` has returned.

        Raises:
            ValueError: if the arrays differ in length.
        """
        nodes, hits = Located.at(scores, depths, match_lengths), np.asarray(hits, np.float64)
        if hits.shape != nodes.scores.shape:
            raise ValueError(f"`hits` must have the shape of `scores`, got {hits.shape} and {nodes.scores.shape}.")
        self.update_located(source, nodes, hits)

    def update_located(self, source: Hashable, nodes: "Located", hits: np.ndarray) -> None:
        """Do `update` with nodes whose cells are already located; `hits` are float64."""
        if not len(hits):
            return
        with self._lock:
            table = self._tables.get(source)
            if table is None:
                table = self._tables[source] = _Table()
            self._tables.move_to_end(source)  # the latest to learn
            if len(self._tables) > _MOST_SOURCES:
                self._tables.popitem(last=False)
            table.add(*nodes, hits, 0.5 ** (len(hits) / self.half_life))

    def calibrated(self, source: Hashable, tree: DraftTree) -> DraftTree:
        """Return the tree with calibrated probabilities."""
        if not len(tree):
            return tree
        return replace(tree, probs=self.calibrate(source, tree.probs, tree.depths, tree.match_lengths))

    def learn(self, source: Hashable, tree: DraftTree, tokens: Sequence[int] | np.ndarray) -> None:
        """Learn from a tree with raw probabilities, verified or not, and the tokens that were committed after it."""
        if not len(tree):
            return
        nodes, hits = outcomes(tree, tokens)
        lengths = np.broadcast_to(tree.match_lengths, len(tree))[nodes]
        self.update(source, tree.probs[nodes], tree.depths[nodes], lengths, hits)


class Located(NamedTuple):
    """Input of a `Calibrator`: nodes' raw scores in [0, 1], float64 `[n]`, and their cells, int64 `[n, levels]`."""

    scores: np.ndarray
    cells: np.ndarray

    @classmethod
    def at(
        cls,
        scores: Sequence[float] | np.ndarray,
        depths: Sequence[int] | np.ndarray,
        match_lengths: Sequence[int] | np.ndarray | int,
    ) -> "Located":
        """
        Locate nodes; arguments are as in `Calibrator.calibrate`.

        Raises:
            ValueError: if the arrays differ in length.
        """
        return cls._of(*_checked(scores, depths, match_lengths))

    @classmethod
    def of_forest(cls, forest: Forest) -> "Located":
        """Locate all nodes of a forest."""
        return cls._of(forest.probs.astype(np.float64), forest.depths, forest.match_lengths)

    @classmethod
    def _of(cls, scores: np.ndarray, depths: np.ndarray, match_lengths: np.ndarray) -> "Located":
        cells = np.empty((len(scores), len(_SIZES)), np.int64)
        locate(scores, depths, match_lengths, _SCORE_EDGES, _LENGTH_BINS, _STARTS, cells)
        return cls(scores, cells)

    def of(self, nodes: np.ndarray) -> "Located":
        """Return the entries of some nodes, by index."""
        return Located(self.scores[nodes], self.cells[nodes])


class _Table:
    """One source's decayed counts, in cells of all levels."""

    def __init__(self) -> None:
        self.num = np.zeros(_SIZES.sum())
        self.hits = np.zeros(_SIZES.sum())
        self.expected = 0.0  # decayed sum of raw scores: the source's own expectation of `hits[0]`

    def add(self, scores: np.ndarray, cells: np.ndarray, hits: np.ndarray, decay: float) -> None:
        self.expected = self.expected * decay + scores.sum()
        count(self.num, self.hits, decay, cells, hits)

    def probs(self, scores: np.ndarray, cells: np.ndarray, strength: float) -> np.ndarray:
        """Return probabilities `[n]` float64, from the raw score, level by level, to the finest cell."""
        ratio = shrunk(self.hits[0], self.expected, 1.0, strength)
        probs = np.empty_like(scores)
        estimate(self.num, self.hits, cells, scores, ratio, strength, probs)
        return probs


def _checked(
    scores: Sequence[float] | np.ndarray,
    depths: Sequence[int] | np.ndarray,
    match_lengths: Sequence[int] | np.ndarray | int,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    scores, depths, match_lengths = np.asarray(scores, np.float64), _integers(depths), _integers(match_lengths)
    if match_lengths.ndim == 0:
        match_lengths = np.full(scores.shape, match_lengths)
    if scores.ndim != 1 or not scores.shape == depths.shape == match_lengths.shape:
        raise ValueError(
            "`scores`, `depths` and `match_lengths` must be of one length, got shapes "
            f"{scores.shape}, {depths.shape} and {match_lengths.shape}."
        )
    # NaN scores carry no information: an even chance.
    if np.isnan(scores).any():
        scores = np.nan_to_num(scores, nan=0.5)
    return np.clip(scores, 0.0, 1.0), np.ascontiguousarray(depths), np.ascontiguousarray(match_lengths)


def _integers(values: Sequence[int] | np.ndarray | int) -> np.ndarray:
    return np.asarray(values).astype(np.int64, copy=False)


class Outcomes(NamedTuple):
    """Nodes of a tree whose outcome is known, and their outcomes."""

    nodes: np.ndarray  # [m] int64, indices of nodes whose parent is on the true path and whose depth is known
    hits: np.ndarray  # [m] bool, whether each of them is the true token


def outcomes(tree: DraftTree, tokens: Sequence[int] | np.ndarray) -> Outcomes:
    """
    Compare a proposal with the true continuation, whether its nodes were verified or not (docs/design.md, "Trust").

    Args:
        tree (`DraftTree`): The proposal as drafted, before any selection.
        tokens (`[n]` integers): The true tokens after the tree's root, as many as are known. Nodes deeper than n are
            left out, since their outcome is unknown.
    """
    nodes, hits = Forest([tree]).outcomes([np.asarray(tokens, np.int64)])
    return Outcomes(nodes, hits)


def expected_calibration_error(
    probs: Sequence[float] | np.ndarray, hits: Sequence[bool] | np.ndarray, num_bins: int = 15
) -> float:
    """
    Return the mean distance between predicted probability and observed frequency, over `num_bins` bins of equal width
    in [0, 1], weighted by the number of nodes in them (ECE). 0 is perfect; 0 also without nodes.

    Raises:
        ValueError: if the arrays differ in length, or for less than one bin.
    """
    probs, hits = np.asarray(probs, np.float64), np.asarray(hits, np.float64)
    if probs.ndim != 1 or probs.shape != hits.shape:
        raise ValueError(f"`probs` and `hits` must be of one length, got shapes {probs.shape} and {hits.shape}.")
    if num_bins < 1:
        raise ValueError(f"`num_bins` must be at least 1, got {num_bins}.")
    if not len(probs):
        return 0.0
    bins = np.clip((probs * num_bins).astype(np.int64), 0, num_bins - 1)
    gaps = np.bincount(bins, weights=probs - hits, minlength=num_bins)
    return float(np.abs(gaps).sum() / len(probs))
