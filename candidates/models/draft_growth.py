"""The trees of draft models, which grow level by level."""

from dataclasses import dataclass, field

import numpy as np
import torch

from ...drafts.tree import DraftTree
from ...goodput.estimates.decayed import DecayedRate
from ...sampling.processors import ScoreProcessing
from ...target_model.layout.rows import CacheRow, RowInput
from ..request import SourceRequest

_MEMORY = 0.8  # weight of all earlier drafts against the newest
_FIRST_GUESS = 0.7


class Outlook:
    """
    Estimate of the promise of a level, in tokens, before it is drafted: a share of the promise of the level above it,
    the same at all depths, learnt from drafts.
    """

    def __init__(self, share: float = _FIRST_GUESS):
        self._promised = DecayedRate(tries=1.0, hits=share)  # by levels, of what the levels above them promised

    def at(self, depth: int) -> float:
        """Return the promise of the level at this depth."""
        return float(self._promised.rate**depth)

    def learn(self, promises: list[float]) -> None:
        """Learn from the promises of one draft's levels."""
        self._promised.add(sum([1.0, *promises][:-1]), sum(promises), _MEMORY)

    def for_new_request(self) -> "Outlook":
        """Return the outlook that another request begins with."""
        return Outlook(self.at(1))


@dataclass(eq=False)
class DraftState:
    """One request's text, its row in the draft's cache, and the nodes whose keys and values lie after the text's."""

    row: CacheRow
    tokens: list[int]
    request: SourceRequest | None = None
    outlook: Outlook = field(default_factory=Outlook)
    processing: ScoreProcessing = field(default_factory=ScoreProcessing)
    seed: int | None = None
    num_generated: int = 0
    nodes: DraftTree = field(default_factory=DraftTree.empty)
    accepted: list[int] | None = None  # of these nodes, where the cache does not know yet

    def features(self) -> torch.Tensor | None:
        """Return the features of the tokens that are to be fed, `[tokens, D]`; None for forwards that take ids only."""
        return None


@dataclass(eq=False)
class Growth:
    """
    A tree that grows level by level. Candidates are all tokens that the draft considered; `expanded` are those of them
    that were run through the draft, in the order in which they lie in its cache.
    """

    state: DraftState
    limit: int
    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)  # indices of candidates
    probs: list[float] = field(default_factory=list)
    path_probs: list[float] = field(default_factory=list)
    depths: list[int] = field(default_factory=list)
    distributions: list[torch.Tensor] = field(default_factory=list)
    expanded: list[int] = field(default_factory=list)
    frontier: list[int] = field(default_factory=lambda: [-1])  # candidates whose children come next
    cached: DraftTree = field(default_factory=DraftTree.empty)  # the expanded candidates
    promises: list[float] = field(default_factory=list)  # of the levels of a tree that was run at once
    hidden: torch.Tensor | None = None  # [nodes, D], what the newest nodes that were run leave to their children
    hidden_of: list[int] = field(default_factory=list)  # these nodes

    @property
    def depth(self) -> int:
        """Number of levels so far."""
        return self.depths[-1] if self.depths else 0

    @property
    def newest(self) -> range:
        """The candidates of the deepest level."""
        return range(self.depths.index(self.depths[-1]), len(self.depths))

    def best(self, num: int) -> list[int]:
        """Return the newest candidates of highest path probability, the best first."""
        return sorted(self.newest, key=lambda node: -self.path_probs[node])[:num]

    def promise_of(self, nodes: list[int]) -> float:
        """Return the expected tokens among some candidates of a level."""
        return sum([self.path_probs[node] for node in nodes])

    def expand(self) -> None:
        """Add the frontier to the expanded candidates."""
        self.expanded += [node for node in self.frontier if node >= 0]
        self.cached = self._tree_of(self.expanded)

    def next_input(self) -> RowInput:
        """Return the input of the next level: the tokens of the text that are not cached, or else the frontier."""
        feed = np.array(self.state.tokens[self.state.row.length :], np.int64)
        first, features = len(self.expanded), self._features()
        self.expand()
        return RowInput(self.state.row, feed, self.cached, first, features)

    def _features(self) -> torch.Tensor | None:
        """Return the features of the next level's tokens: for nodes, those that their parents' forward left."""
        if self.frontier[0] < 0:
            return self.state.features()
        return (
            None if self.hidden is None else self.hidden[[self.hidden_of.index(self.parents[n]) for n in self.frontier]]
        )

    def add_children(self, node: int, tokens: list[int], probs: list[float], trust: float = 1.0) -> None:
        """Add candidates after candidate `node` (-1: after the text), the best first."""
        path_prob, depth = (self.path_probs[node], self.depths[node]) if node >= 0 else (1.0, 0)
        self.tokens += tokens
        self.parents += [node] * len(tokens)
        self.probs += probs
        self.path_probs += [path_prob * min(prob * trust, 1.0) for prob in probs]
        self.depths += [depth + 1] * len(tokens)

    def tree(self, least: float = 0.0, confidence: float = 0.0) -> DraftTree:
        """
        Return the candidates of highest path probability, as many as the draft may have, out of those whose paths have
        `least` or more and no token of less `confidence` before the last. One candidate of every level is kept, so that
        the cost of levels is learnt.
        """
        nodes = list(range(len(self.tokens))) if confidence <= 0 else self._after_confident(confidence)
        if least > 0 and nodes:
            deepest = self._path_to(next(node for node in nodes if self.depths[node] == self.depths[nodes[-1]]))
            nodes = [node for node in nodes if self.path_probs[node] >= least or node in deepest]
        if len(nodes) > self.limit:  # ties go to the earlier node: a child never outranks its parent
            nodes = sorted(sorted(nodes, key=lambda node: -self.path_probs[node])[: self.limit])
        distributions = torch.stack(self.distributions[: len(nodes)]) if self.distributions else None
        return self._tree_of(nodes, distributions)

    def _after_confident(self, confidence: float) -> list[int]:
        """Return the candidates that have no ancestor of less confidence."""
        nodes = {-1}
        for node, parent in enumerate(self.parents):
            if parent in nodes and (parent < 0 or self.probs[parent] >= confidence):
                nodes.add(node)
        return sorted(nodes - {-1})

    def _path_to(self, node: int) -> set[int]:
        path = set()
        while node >= 0:
            path.add(node)
            node = self.parents[node]
        return path

    def _tree_of(self, nodes: list[int], distributions: torch.Tensor | None = None) -> DraftTree:
        """Return some of the candidates, parents first, as a tree."""
        index = {node: position for position, node in enumerate(nodes)} | {-1: -1}
        return DraftTree(
            np.array([self.tokens[node] for node in nodes], np.int64),
            np.array([index[self.parents[node]] for node in nodes], np.int64),
            np.array([self.probs[node] for node in nodes], np.float32),
            distributions,
        )


def distribute_features(hidden: torch.Tensor | None, growths: list[Growth], numbers: list[int]) -> None:
    """Give each growth its part of the features that a level left, `[nodes, D]`, for so many nodes each."""
    if hidden is not None:
        for growth, part in zip(growths, hidden.split(numbers)):
            growth.hidden, growth.hidden_of = part, list(growth.frontier)
