"""Trees of candidates that are known for all depths at once: the likeliest nodes, and trees of a fixed shape."""

from collections.abc import Sequence
from functools import lru_cache
from itertools import product

import numpy as np

from ...drafts.tree import DraftTree
from .kernels.heap import best_nodes


def best_trees(
    tokens: np.ndarray,
    first: np.ndarray,
    given: np.ndarray,
    limits: Sequence[int],
    least: float = 0.0,
    widths: Sequence[int] | None = None,
) -> list[DraftTree]:
    """
    Return the trees of at most `limits[i]` nodes whose paths are the likeliest, in order of their probability (DDTree,
    arXiv 2604.12989). A parent is at least as likely as its children.

    Args:
        tokens (`np.ndarray` of shape `[R, L, k]`, int64), first (`[R, k]`), given (`[R, L - 1, p, k]`): Candidates of
            each depth; the probabilities of those of depth 1, and of those of the next depth after each one of a depth,
            where p is k, or after any, where p is 1.
        least (`float`): Least path probability of a node, except for the likeliest one.
        widths (sequence of `int`, *optional*): The most children of a node at each depth; any number where not given.
    """
    num_rows, num_depths, width = tokens.shape
    most = max(limits, default=0)
    if not most:
        return [DraftTree.empty()] * num_rows
    shape = np.zeros(num_depths, np.int64)
    if widths is None:
        shape[:] = width
    else:
        shape[: len(widths)] = widths[:num_depths]
    nodes, probs = np.empty((num_rows, most, 4), np.int64), np.empty((num_rows, most), np.float32)
    counts, num_entries = np.empty(num_rows, np.int64), 2 * most + 1
    entries, weights = np.empty((num_entries, 4), np.int64), np.empty(num_entries)
    best_nodes(
        np.ascontiguousarray(first, np.float32), np.ascontiguousarray(given, np.float32),
        np.array(limits, np.int64), float(least), shape,
        nodes, probs, counts, entries, weights, np.empty(num_entries, np.int64),
    )  # fmt: skip
    trees = []
    for row, count in enumerate(counts.tolist()):
        parents, depths, candidates, _ = nodes[row, :count].T
        chosen = tokens[row, depths, candidates].astype(np.int64, copy=False)
        trees.append(DraftTree.of(chosen, parents.copy(), probs[row, :count]))
    return trees


class FixedTree:
    """
    A tree of the same shape for all rows.

    Args:
        paths (sequence of sequences of `int`): For every node the ranks of the tokens on its path, as Medusa's files
            have them; parents stand before their children.
    """

    def __init__(self, paths: Sequence[Sequence[int]]):
        paths = list(map(tuple, paths))
        index = {path: number for number, path in enumerate(paths)} | {(): -1}
        self._parents = np.array([index[path[:-1]] for path in paths], np.int64)
        self._depths, self._ranks = np.array([[len(path) - 1, path[-1]] for path in paths]).T

    def of(self, tokens: np.ndarray, probs: np.ndarray, limit: int) -> DraftTree:
        """Return the first `limit` nodes with one row's candidates `[K, w]`."""
        depths, ranks = self._depths[:limit], self._ranks[:limit]
        shares = probs[depths, ranks].astype(np.float32)
        return DraftTree(tokens[depths, ranks].astype(np.int64), self._parents[:limit], shares)


@lru_cache
def full_tree(widths: tuple[int, ...]) -> FixedTree:
    """Return the tree in which every node at depth d has `widths[d]` children (SmartSpec, Figure 8)."""
    levels = [list(map(range, widths[:depth])) for depth in range(1, len(widths) + 1)]
    return FixedTree([path for ranks in levels for path in product(*ranks)])
