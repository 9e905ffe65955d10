"""Several sources as one: a common tree of their best continuations (SSSD, section 3.1.3), a model where these fail."""

import heapq
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Protocol

import numpy as np
from transformers import LogitsProcessorList
from transformers.utils import logging

from ..tree import DraftTree
from .base import TreeCandidateGenerator

logger = logging.get_logger(__name__)

_MEMORY = 0.05  # weight of the newest draft in the drafter's running mean accepted length


class ProbabilityCalibrator(Protocol):
    """What a source's raw probabilities are worth; `goodput.Calibrator` is one."""

    def calibrated(self, source: Hashable, tree: DraftTree) -> DraftTree: ...
    def learn(self, source: Hashable, tree: DraftTree, tokens: np.ndarray) -> None: ...


class FusedCandidates(TreeCandidateGenerator):
    """
    Merges the trees of several sources: one queue over all of them yields the most probable continuation next, and a
    token that two sources propose at one place is one node (SSSD, algorithm 1).

    With a `drafter`, SuffixDecoding's hybrid: where the merged tree promises too few tokens (SCORE, the sum of its path
    probabilities, is at most `threshold`), the drafter is asked in its place.

    Args:
        sources (sequence of `TreeCandidateGenerator`): What is merged.
        discounts (sequence of `float`, *optional*): Per source, the factor on every node's probability: below 1 for a
            source that is too sure of itself. The path probability of a node at depth d is discounted d times.
        drafter (`TreeCandidateGenerator`, *optional*): A source that costs more, such as a draft model.
        threshold (`float`, *optional*): τ, in tokens. By default the drafter's running mean accepted length.
        calibrator (`ProbabilityCalibrator`, *optional*): Replaces the sources' raw probabilities by observed acceptance
            frequencies, before discounts apply.
        min_probability (`float`): Nodes whose path has a lower probability, after all that, are not proposed.
        vocab_size (`int`, *optional*): A source that proposes other tokens is left out, as one that raises.
    """

    def __init__(
        self,
        sources: Sequence[TreeCandidateGenerator],
        discounts: Sequence[float] | None = None,
        drafter: TreeCandidateGenerator | None = None,
        threshold: float | None = None,
        calibrator: ProbabilityCalibrator | None = None,
        min_probability: float = 0.05,
        vocab_size: int | None = None,
    ):
        everyone = [*sources, *([] if drafter is None else [drafter])]
        for source in everyone:
            if not isinstance(source, TreeCandidateGenerator):
                raise TypeError(f"Only TreeCandidateGenerators can be fused, got {type(source).__name__}.")
        if not sources:
            raise ValueError("`sources` must name at least one source.")
        if len(set(map(id, everyone))) < len(everyone):
            raise ValueError("A source can be fused once only: it keeps one state per request.")
        discounts = [1.0] * len(sources) if discounts is None else list(discounts)
        if len(discounts) != len(sources) or not all(0 <= discount <= 1 for discount in discounts):
            raise ValueError(f"`discounts` must give a number in [0, 1] for each source, got {discounts!r}.")
        if threshold is not None and (drafter is None or threshold < 0):
            raise ValueError(f"`threshold` goes with a `drafter` and must not be negative, got {threshold!r}.")
        if not 0 <= min_probability <= 1:
            raise ValueError(f"`min_probability` must lie in [0, 1], got {min_probability!r}.")
        self.min_probability, self.vocab_size = min_probability, vocab_size
        self.sources, self.discounts = list(sources), discounts
        self.drafter, self.calibrator = drafter, calibrator
        self.default_num_nodes = max(source.default_num_nodes for source in everyone)
        self._everyone, self._fixed_threshold = everyone, threshold
        types = [type(source).__name__ for source in sources]
        self._names = [f"{name} {types[:index].count(name) + 1}" for index, name in enumerate(types)]  # to calibrate
        self._mean_accepted = 1.0  # of the drafter
        self._drafts: dict[Hashable, list[DraftTree]] = {}  # each source's latest
        self._modelled: dict[Hashable, DraftTree] = {}  # the drafter's latest
        self._failed: set[tuple[Hashable, int]] = set()  # (request, identity of a source)

    @property
    def threshold(self) -> float:
        """τ: the SCORE up to which the drafter speaks, in tokens."""
        return self._mean_accepted if self._fixed_threshold is None else self._fixed_threshold

    def assign(
        self,
        request_id: Hashable,
        namespace: Hashable = "",
        reads: Sequence[Hashable] = (),
        references: Sequence[np.ndarray] = (),
    ) -> None:
        for source in self._everyone:
            self._tell(source, request_id, source.assign, namespace, reads, references)

    def couple(self, request_id: Hashable, processors: LogitsProcessorList, seed: int | None) -> None:
        for source in self._everyone:
            self._tell(source, request_id, source.couple, processors, seed)

    def start(self, request_id: Hashable, prompt: np.ndarray) -> None:
        for source in self._everyone:
            self._tell(source, request_id, source.start, prompt)

    def _tell(self, source: TreeCandidateGenerator, request_id: Hashable, call: Callable, *args: Any) -> None:
        """One source's failure costs the request that source, not the others."""
        if (request_id, id(source)) in self._failed:
            return
        try:
            call(request_id, *args)
        except Exception as error:
            self._drop(source, [request_id], error)

    def _drop(self, source: TreeCandidateGenerator, request_ids: Sequence[Hashable], error: Exception) -> None:
        self._failed |= {(name, id(source)) for name in request_ids}
        logger.warning_once(f"{type(source).__name__} failed and is left out for its requests: {error!r}")

    def _ask(
        self, source: TreeCandidateGenerator, request_ids: Sequence[Hashable], max_nodes: Sequence[int]
    ) -> list[DraftTree]:
        """A source's trees; empty ones where it has failed."""
        rows = [row for row, name in enumerate(request_ids) if (name, id(source)) not in self._failed]
        trees = [DraftTree.empty()] * len(request_ids)
        names = [request_ids[row] for row in rows]
        try:
            found = source.propose(names, [max_nodes[row] for row in rows]) if rows else []
            for tree in found:
                tree.check_integrity(self.vocab_size or 2**31)
        except Exception as error:
            self._drop(source, names, error)
            return trees
        for row, tree in zip(rows, found):
            trees[row] = tree
        return trees

    def propose(self, request_ids: Sequence[Hashable], max_nodes: Sequence[int]) -> list[DraftTree]:
        proposals = [self._ask(source, request_ids, max_nodes) for source in self.sources]
        merged = []
        for row, (name, limit) in enumerate(zip(request_ids, max_nodes)):
            self._drafts[name] = [trees[row] for trees in proposals]
            merged.append(self._merge(self._drafts[name], limit))
        if self.drafter is None:
            return merged
        weak = [row for row, tree in enumerate(merged) if tree.path_probs.sum() <= self.threshold]
        if weak:
            trees = self._ask(self.drafter, [request_ids[row] for row in weak], [max_nodes[row] for row in weak])
            for row, tree in zip(weak, trees):
                if len(tree):
                    merged[row] = self._modelled[request_ids[row]] = tree
        return merged

    def _merge(self, trees: Sequence[DraftTree], limit: int) -> DraftTree:
        if self.calibrator is not None:
            trees = [self.calibrator.calibrated(name, tree) for name, tree in zip(self._names, trees)]
        return merge(trees, self.discounts, limit, self.min_probability)

    def observe(self, request_id: Hashable, tokens: np.ndarray) -> None:
        drafts, modelled = self._drafts.pop(request_id, []), self._modelled.pop(request_id, None)
        if self.calibrator is not None:
            for name, tree in zip(self._names, drafts):
                self.calibrator.learn(name, tree, tokens)
        if modelled is not None:
            self._mean_accepted += _MEMORY * (_num_accepted(modelled, tokens) - self._mean_accepted)
        for source in self._everyone:
            self._tell(source, request_id, source.observe, tokens)

    def stop(self, request_id: Hashable) -> None:
        self._drafts.pop(request_id, None)
        self._modelled.pop(request_id, None)
        for source in self._everyone:
            self._failed.discard((request_id, id(source)))  # those that have failed hold state too
            self._tell(source, request_id, source.stop)
            self._failed.discard((request_id, id(source)))


def merge(trees: Sequence[DraftTree], discounts: Sequence[float], limit: int, least: float = 0.0) -> DraftTree:
    """
    The `limit` most probable nodes of several trees as one tree (SSSD, algorithm 1), as far as their paths have a
    probability of at least `least`.
    """
    children = [_children(tree) for tree in trees]
    probs = [np.clip(tree.probs, 0, 1).tolist() for tree in trees]
    tokens: list[int] = []
    parents: list[int] = []
    paths: list[float] = []
    places: dict[tuple[int, int], int] = {}  # (parent, token) of every node
    # Entries: minus path probability, source, its node, the parent in the merged tree.
    queue: list[tuple[float, int, int, int]] = []

    def push(source: int, node: int, parent: int, path: float) -> None:
        for child in children[source].get(node, ()):
            heapq.heappush(queue, (-path * probs[source][child] * discounts[source], source, child, parent))

    for source in range(len(trees)):
        push(source, -1, -1, 1.0)
    while queue:
        negative, source, node, parent = heapq.heappop(queue)
        place = parent, int(trees[source].tokens[node])
        if place not in places:
            if len(tokens) == limit or -negative < least:
                break
            places[place] = len(tokens)
            tokens.append(place[1])
            parents.append(parent)
            paths.append(-negative)
        push(source, node, places[place], -negative)
    above = [paths[parent] if parent >= 0 else 1.0 for parent in parents]
    ratios = [path / max(other, 1e-30) for path, other in zip(paths, above)]
    return DraftTree(np.array(tokens, np.int64), np.array(parents, np.int64), np.array(ratios, np.float32))


def _children(tree: DraftTree) -> dict[int, list[int]]:
    children: dict[int, list[int]] = {}
    for node, parent in enumerate(tree.parents.tolist()):
        children.setdefault(parent, []).append(node)
    return children


def _num_accepted(tree: DraftTree, tokens: np.ndarray) -> int:
    node, count = -1, 0
    for token in tokens.tolist():
        child = tree.child(node, token)
        if child is None:
            break
        node, count = child, count + 1
    return count
