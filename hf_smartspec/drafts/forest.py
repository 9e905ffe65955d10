"""All rows' draft trees as flat arrays, so that a step costs a few numpy calls, however many rows and nodes it has."""

import copy
from collections.abc import Sequence
from functools import cached_property

import numpy as np

from .tree import DraftTree


class Forest:
    """
    The trees of one step side by side.

    Attributes:
        sizes (`np.ndarray` of shape `[rows]`, int64): Nodes of each tree.
        row (`[n]` int64): The row of each node.
        parents (`[n]` int64): Index of each node's parent in the flat arrays; n for children of committed tokens.
        probs (`[n]` float32): As drafted, clipped to [0, 1]; what is no number is an even chance.
    """

    def __init__(self, trees: Sequence[DraftTree]):
        self.trees = list(trees)
        self.sizes = np.array([len(tree.tokens) for tree in self.trees], np.int64)
        self.num_nodes = int(self.sizes.sum())
        self.starts = np.cumsum(self.sizes) - self.sizes
        self.row = np.repeat(np.arange(len(self.trees)), self.sizes)
        if not self.num_nodes:
            self.parents, self.probs = np.zeros(0, np.int64), np.zeros(0, np.float32)
            return
        parents = np.concatenate([tree.parents for tree in self.trees])
        self.parents = np.where(parents < 0, self.num_nodes, parents + np.repeat(self.starts, self.sizes))
        # Rounded softmax values may exceed 1 by a hair.
        self.probs = np.clip(np.concatenate([tree.probs for tree in self.trees]), 0, 1)
        self.probs[np.isnan(self.probs)] = 0.5  # what is no number says nothing: an even chance

    @cached_property
    def tokens(self) -> np.ndarray:
        """`[n]` int64."""
        return np.concatenate([tree.tokens for tree in self.trees]) if self.num_nodes else np.zeros(0, np.int64)

    @cached_property
    def match_lengths(self) -> np.ndarray:
        """`[n]` int64; 0 where a tree knows none."""
        lengths = [tree.match_lengths for tree in self.trees]
        if not any(isinstance(item, np.ndarray) for item in lengths):
            return np.repeat(np.array(lengths, np.int64), self.sizes)
        pairs = zip(lengths, self.sizes.tolist())
        return np.concatenate([item if isinstance(item, np.ndarray) else np.full(size, item) for item, size in pairs])

    @cached_property
    def depths(self) -> np.ndarray:
        """`[n]` int64; children of committed tokens have depth 1."""
        depths = np.append(np.ones(self.num_nodes, np.int64), 0)
        for pointers in self._jumps:
            depths[:-1] += depths[pointers]
        return depths[:-1]

    def along_paths(self, values: np.ndarray) -> np.ndarray:
        """Products of `[n]` values from the root down to each node, `[n]` float64."""
        products = np.append(values.astype(np.float64), 1.0)
        for pointers in self._jumps:
            products[:-1] *= products[pointers]
        return products[:-1]

    @cached_property
    def _jumps(self) -> list[np.ndarray]:
        """The ancestors that lie 1, 2, 4, ... levels above each node: what goes along paths takes log(depth) passes."""
        jumps, pointers = [], np.append(self.parents, self.num_nodes)
        while (pointers < self.num_nodes).any():
            jumps.append(pointers[:-1])
            pointers = pointers[pointers]
        return jumps

    def outcomes(self, tokens: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
        """
        Scores all nodes against the tokens that really followed, as `acceptance.outcomes` does for one tree.

        Args:
            tokens (sequence of `np.ndarray` of shape `[m]`): What is known of each row's continuation.

        Returns:
            The indices of the nodes whose parent came true and whose depth is known, and whether each came true.
        """
        known = np.array([len(line) for line in tokens], np.int64)
        truth = np.full((len(known), int(known.max(initial=0)) + 1), -1, np.int64)
        for line, ids in zip(truth, tokens):
            line[: len(ids)] = ids
        is_known = self.depths <= known[self.row]
        is_true = is_known & (self.tokens == truth[self.row, np.minimum(self.depths, truth.shape[1]) - 1])
        on_path = np.append(self.along_paths(is_true) > 0, True)
        nodes = np.flatnonzero(is_known & on_path[self.parents])
        return nodes, on_path[nodes]

    def depths_reached(self, tokens: Sequence[np.ndarray]) -> np.ndarray:
        """How many tokens of each row's continuation (`tokens`, as for `outcomes`) its tree holds, `[rows]` int64."""
        nodes, hits = self.outcomes(tokens)
        reached = np.zeros(len(self.trees), np.int64)
        np.maximum.at(reached, self.row[nodes[hits]], self.depths[nodes[hits]])
        return reached

    def with_probs(self, probs: np.ndarray) -> "Forest":
        """The same nodes with other probabilities (`[n]`, in [0, 1])."""
        forest = copy.copy(self)
        forest.probs = probs.astype(np.float32)
        ends = np.cumsum(self.sizes).tolist()
        forest.trees = [
            tree.with_probs(forest.probs[start:end]) if end > start else tree
            for tree, start, end in zip(self.trees, self.starts.tolist(), ends)
        ]
        return forest

    def ranks(self) -> np.ndarray:
        """How many nodes of its tree `DraftTree.most_likely` prefers to each node, `[n]` int64."""
        numbers = np.arange(self.num_nodes)
        order = np.lexsort((numbers, self.depths, -self.along_paths(self.probs), self.row))
        ranks = np.empty(self.num_nodes, np.int64)
        ranks[order] = numbers - self.starts[self.row[order]]
        return ranks

    def keep(self, nodes: np.ndarray) -> list[DraftTree]:
        """The trees of the given nodes only (bool mask `[n]`); a kept node's parent must be kept too."""
        counts = np.bincount(self.row[nodes], minlength=len(self.trees))
        ends = np.cumsum(counts)
        tokens, probs = self.tokens[nodes], self.probs[nodes]
        index = np.append(np.cumsum(nodes) - 1, -1)  # the last entry serves the roots
        parents = index[self.parents[nodes]]
        parents = np.where(parents < 0, -1, parents - np.repeat(ends - counts, counts))
        kept = []
        for tree, size, start, count, end in zip(
            self.trees, self.sizes.tolist(), self.starts.tolist(), counts.tolist(), ends.tolist()
        ):
            if count == size:
                kept.append(tree)
            elif count == 0:
                kept.append(DraftTree.empty())
            elif tree.distributions is not None:
                kept.append(tree.keep(nodes[start : start + size]))
            else:
                part = slice(end - count, end)
                lengths = tree.match_lengths
                if isinstance(lengths, np.ndarray):
                    lengths = lengths[nodes[start : start + size]]
                kept.append(DraftTree.of(tokens[part], parents[part], probs[part], lengths))
        return kept


def ranks_in_rows(row: np.ndarray) -> np.ndarray:
    """How many earlier entries hold the same row, `[n]` int64."""
    by_row = np.argsort(row.astype(np.uint16), kind="stable")  # 16 bits: sorted by radix
    counts = np.bincount(row)
    ranks = np.empty(len(row), np.int64)
    ranks[by_row] = np.arange(len(row)) - np.repeat(np.cumsum(counts) - counts, counts)
    return ranks
