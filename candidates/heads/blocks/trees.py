"""Trees of one block: the nodes of highest path probability of its lattice."""

from collections.abc import Sequence

import numpy as np

from ....drafts.tree import DraftTree
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
        tokens (`np.ndarray` of shape `[R, L, k]`, int64), first (`[R, k]`, float32), given (`[R, L - 1, p, k]`,
            float32): See `Lattice`, with probabilities in place of their logarithms.
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
        np.ascontiguousarray(first), np.ascontiguousarray(given), np.array(limits, np.int64), float(least), shape,
        nodes, probs, counts, entries, weights, np.empty(num_entries, np.int64),
    )  # fmt: skip
    trees = []
    for row, count in enumerate(counts.tolist()):
        parents, depths, candidates, _ = nodes[row, :count].T
        chosen = tokens[row, depths, candidates].astype(np.int64, copy=False)
        trees.append(DraftTree.of(chosen, parents.copy(), probs[row, :count]))
    return trees


def with_confidence(probs: np.ndarray, confidence: np.ndarray) -> np.ndarray:
    """
    Return probabilities of candidates `[..., k]` of which the likeliest is accepted with a probability of `confidence`
    `[...]`; the others share the rest as they would without (DSpark, arXiv 2607.05147).
    """
    best = probs.max(axis=-1, keepdims=True)
    others = probs * ((1 - confidence[..., None]) / np.maximum(1 - best, 1e-6))
    return np.where(probs == best, confidence[..., None], others).astype(np.float32)
