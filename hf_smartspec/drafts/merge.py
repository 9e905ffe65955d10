"""Merging of several drafts into one tree of their most probable nodes (SSSD, algorithm 1)."""

import heapq
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np

from .tree import DraftTree


class Discount(NamedTuple):
    """
    Dampening factors of a source, in [0, 1], which compound along a path. The probability of a node at depth d that was
    found by a match of m tokens is multiplied by `first` (d = 1) or `further` (d > 1), and by `short` ** (1 / (m + d -
    1)) where m is known: together with the node's ancestors, the match is m + d - 1 tokens long.
    """

    first: float = 1.0
    further: float = 1.0
    short: float = 1.0


class PathDiscount(NamedTuple):
    """
    SSSD's `discount(source, depth)` (algorithm 1), which does not compound: the probability of the *path* to a node at
    depth d, found by a match of m tokens, is multiplied by `factors[m - 1][d - 1]` (m = 0, where it is unknown, counts
    as 1). The last row serves longer matches, and the last factor of a row greater depths.

    Example:
        >>> chain = Draft.of(DraftTree.chain([5, 6, 7], [0.9, 0.9, 0.9]))
        >>> merge([chain.discounted(PathDiscount([[0.8]]))], 3).path_probs.round(2)  # 0.8 of 0.9, 0.81 and 0.729
        array([0.72, 0.65, 0.58], dtype=float32)
    """

    factors: Sequence[Sequence[float]]

    @classmethod
    def geometric(cls, scale: float, short: float, deep: float, max_prefix: int, branch_len: int) -> "PathDiscount":
        """
        Return the factors `scale * short ** (max_prefix - m) * deep ** (d - 1)` for matches of m = 1 ... `max_prefix`
        tokens and depths d = 1 ... `branch_len`.
        """
        return cls(
            [
                [scale * short ** (max_prefix - length) * deep**depth for depth in range(branch_len)]
                for length in range(1, max_prefix + 1)
            ]
        )

    def of(self, length: int, depth: int) -> float:
        """Return the factor of a node found by a match of `length` tokens; `depth` is 0 for children of the root."""
        row = self.factors[min(max(length, 1), len(self.factors)) - 1]
        return row[min(depth, len(row) - 1)]


_NO_DISCOUNT = Discount()


class Draft(NamedTuple):
    """A source's tree as lists, whose single elements are read faster than those of arrays."""

    tokens: list[int]
    probs: list[float]  # in [0, 1]
    depths: list[int]  # 0 for children of the last committed token
    match_lengths: list[int]  # 0 where unknown
    children: dict[int, list[int]]  # indices by parent, -1 for the last committed token

    @classmethod
    def of(cls, tree: DraftTree) -> "Draft":
        if not len(tree):
            return _NOTHING
        depths: list[int] = []
        children: dict[int, list[int]] = {}
        for node, parent in enumerate(tree.parents.tolist()):
            depths.append(depths[parent] + 1 if parent >= 0 else 0)
            children.setdefault(parent, []).append(node)
        # NaN carries no information: an even chance.
        probs = [min(max(prob, 0.0), 1.0) if prob == prob else 0.5 for prob in tree.probs.tolist()]
        lengths = tree.match_lengths
        match_lengths = lengths.tolist() if isinstance(lengths, np.ndarray) else [int(lengths)] * len(probs)
        return cls(tree.tokens.tolist(), probs, depths, match_lengths, children)

    def discounted(self, discount: Discount | PathDiscount) -> "Draft":
        if discount == _NO_DISCOUNT:
            return self
        if isinstance(discount, PathDiscount):
            return self._discounted_by_path(discount)
        first, further, short = discount
        return self._replace(
            probs=[
                prob * (further if depth else first) * (short ** (1 / (length + depth)) if length > 0 else 1.0)
                for prob, depth, length in zip(self.probs, self.depths, self.match_lengths)
            ]
        )

    def _discounted_by_path(self, discount: PathDiscount) -> "Draft":
        # Each node takes back its parent's factor, so that products along a path hold the last node's alone.
        factors = [discount.of(*place) for place in zip(self.match_lengths, self.depths)]
        probs = list(self.probs)
        for parent, children in self.children.items():
            before = factors[parent] if parent >= 0 else 1.0
            for child in children:
                factor = factors[child] / before if before else 0.0
                probs[child] = min(probs[child] * factor, 1.0)  # no node is likelier than its parent
        return self._replace(probs=probs)

    def nodes_of(self, tree: DraftTree) -> list[int]:
        """Return the node on the same path of tokens for each node of `tree`; -1 where there is none."""
        places = {
            (parent, self.tokens[child]): child
            for parent, children in self.children.items()
            for child in reversed(children)  # so that the first of two equal siblings is kept
        }
        nodes: list[int] = []
        for parent, token in zip(tree.parents.tolist(), tree.tokens.tolist()):
            own = -1 if parent < 0 else nodes[parent]
            nodes.append(-1 if parent >= 0 and own < 0 else places.get((own, token), -1))
        return nodes


_NOTHING = Draft([], [], [], [], {})


def merge(drafts: Sequence[Draft], limit: int, least: float = 0.0) -> DraftTree:
    """
    Return the `limit` most probable nodes of several drafts as one tree (SSSD, algorithm 1), without those whose path
    probability is below `least`.
    """
    tokens: list[int] = []
    parents: list[int] = []
    paths: list[float] = []
    lengths: list[int] = []  # match lengths
    places: dict[tuple[int, int], int] = {}  # (parent, token) of every node
    # Entries: minus path probability, source, its node, the parent in the merged tree.
    queue: list[tuple[float, int, int, int]] = [
        (-draft.probs[child], source, child, -1)
        for source, draft in enumerate(drafts)
        for child in draft.children.get(-1, ())
    ]
    heapq.heapify(queue)
    while queue:
        negative, source, node, parent = heapq.heappop(queue)
        draft = drafts[source]
        place = parent, draft.tokens[node]
        if place not in places:
            if len(tokens) == limit or -negative < least:
                break
            places[place] = len(tokens)
            tokens.append(place[1])
            parents.append(parent)
            paths.append(-negative)
            lengths.append(draft.match_lengths[node])
        for child in draft.children.get(node, ()):
            heapq.heappush(queue, (negative * draft.probs[child], source, child, places[place]))
    if not tokens:
        return DraftTree.empty()
    ratios = [path / max(paths[parent], 1e-30) if parent >= 0 else path for path, parent in zip(paths, parents)]
    return DraftTree.of(
        np.array(tokens, np.int64),
        np.array(parents, np.int64),
        np.array(ratios, np.float32),
        np.array(lengths, np.int64) if any(lengths) else 0,
    )


def first_drafters(
    tree: DraftTree, drafts: Iterable[tuple[Draft, Callable[[DraftTree], Sequence[str]]]]
) -> list[str | None]:
    """
    Return the label of the first sub-source that drafted each node of a tree; None for nodes that no sub-source
    drafted.

    Args:
        drafts (iterable of pairs): Drafts in order of precedence, each with a function that returns the labels of a
            part's nodes.
    """
    labels: list[str | None] = [None] * len(tree)
    for draft, drafters in drafts:
        is_found = np.array(draft.nodes_of(tree), np.int64) >= 0
        if is_found.any():
            for node, label in zip(np.flatnonzero(is_found), drafters(tree.keep(is_found))):
                labels[node] = labels[node] or label
    return labels


def join(
    trees: Sequence[DraftTree], others: Sequence[DraftTree], limits: Sequence[int] | np.ndarray
) -> list[DraftTree]:
    """Merge two drafts of each row, with at most `limits` nodes per row."""
    joined = []
    for tree, other, limit in zip(trees, others, limits):
        if len(tree) and len(other):
            tree = merge([Draft.of(tree), Draft.of(other)], int(limit))
        joined.append(tree if len(tree) else other)
    return joined
