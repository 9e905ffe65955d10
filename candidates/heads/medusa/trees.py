"""Trees from heads that do not depend on one another: the candidates at a depth are the same after all paths."""

from collections.abc import Sequence
from functools import lru_cache
from itertools import product

import numpy as np

from ....drafts.tree import DraftTree


def best_trees(tokens: np.ndarray, probs: np.ndarray, limits: Sequence[int]) -> list[DraftTree]:
    """
    Return the trees of at most `limits[i]` nodes with the highest expected number of accepted tokens, if the heads'
    probabilities are right and independent: a path's is their product.

    Args:
        tokens, probs (`np.ndarray` of shape `[B, K, w]`): Candidates of each depth, the likeliest first.
    """
    most = max(limits, default=0)
    if not most:
        return [DraftTree.empty()] * len(limits)
    levels = _levels(probs, most)
    path_probs = np.concatenate([level[0] for level in levels], axis=1)
    # A child is never likelier than its parent, which stands before it: the best nodes are closed under parents.
    order = np.argsort(-path_probs, axis=1, kind="stable")
    depths = np.repeat(np.arange(len(levels)), [level[0].shape[1] for level in levels])
    parents, ranks = (np.concatenate([level[number] for level in levels], axis=1) for number in (1, 2))
    return [
        _tree(tokens[row], probs[row], np.sort(order[row, :limit]), depths, parents[row], ranks[row])
        for row, limit in enumerate(limits)
    ]


def _levels(probs: np.ndarray, most: int) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """
    Return for every depth the `most` best paths `[B, m]`: their probabilities, the number of their parent among all
    nodes (-1: none), and the rank of their last token.
    """
    batch, _, width = probs.shape
    levels: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
    above, first = np.ones((batch, 1)), -1
    for depth in range(probs.shape[1]):
        paths = (above[:, :, None] * probs[:, depth, None, :]).reshape(batch, -1)
        chosen = np.argsort(-paths, axis=1, kind="stable")[:, :most]
        above = np.take_along_axis(paths, chosen, axis=1)
        levels.append((above, chosen // width + first, chosen % width))
        first = 0 if depth == 0 else first + levels[-2][0].shape[1]
    return levels


def _tree(
    tokens: np.ndarray, probs: np.ndarray, nodes: np.ndarray, depths: np.ndarray, parents: np.ndarray, ranks: np.ndarray
) -> DraftTree:
    """Return the tree of these nodes, in ascending order, of one row's levels."""
    depth, rank = depths[nodes], ranks[nodes]
    place = np.full(len(depths) + 1, -1)  # the last entry: of no parent
    place[nodes] = np.arange(len(nodes))
    return DraftTree(tokens[depth, rank].astype(np.int64), place[parents[nodes]], probs[depth, rank].astype(np.float32))


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
