"""All rows' draft trees as flat arrays, so that a step costs a few numpy calls for any number of rows and nodes."""

from collections.abc import Sequence
from functools import cached_property

import numpy as np

from .kernels.trees import flatten, judge, multiply_along_paths, select
from .tree import DraftTree


class Forest:
    """
    The trees of one step side by side.

    Attributes:
        sizes (`np.ndarray` of shape `[rows]`, int64): Number of nodes of each tree.
        row (`[n]` int64): The row of each node.
        parents (`[n]` int64): Index of each node's parent in the flat arrays; n for children of committed tokens.
        depths (`[n]` int64): Depth of each node; children of committed tokens have depth 1.
        probs (`[n]` float32): Probabilities as drafted, clipped to [0, 1]; 0.5 in place of NaN.
    """

    def __init__(self, trees: Sequence[DraftTree]):
        self.trees = list(trees)
        self.sizes = np.array([len(tree.tokens) for tree in self.trees], np.int64)
        self.num_nodes = int(self.sizes.sum())
        self.row, self.parents, self.depths = np.empty((3, self.num_nodes), np.int64)
        self.probs = np.empty(self.num_nodes, np.float32)
        if self.num_nodes:
            np.concatenate([tree.parents for tree in self.trees], out=self.parents, casting="same_kind")
            with np.errstate(over="ignore"):  # an overflow to infinity is clipped to 1
                np.concatenate([tree.probs for tree in self.trees], out=self.probs, casting="same_kind")
            if not flatten(self.sizes, self.row, self.parents, self.depths, self.probs):
                raise ValueError("Every parent must stand before its child.")

    @cached_property
    def starts(self) -> np.ndarray:
        """Index of the first node of each tree, `[rows]` int64."""
        return np.cumsum(self.sizes) - self.sizes

    @cached_property
    def tokens(self) -> np.ndarray:
        """Tokens of all nodes, `[n]` int64."""
        if not self.num_nodes:
            return np.zeros(0, np.int64)
        return np.concatenate([tree.tokens for tree in self.trees], dtype=np.int64, casting="same_kind")

    @cached_property
    def match_lengths(self) -> np.ndarray:
        """Match lengths of all nodes, `[n]` int64; 0 where a tree has none."""
        lengths = [tree.match_lengths for tree in self.trees]
        if not any(isinstance(item, np.ndarray) for item in lengths):
            return np.repeat(np.array(lengths, np.int64), self.sizes)
        pairs = zip(lengths, self.sizes.tolist())
        arrays = [item if isinstance(item, np.ndarray) else np.full(size, item) for item, size in pairs]
        return np.concatenate(arrays, dtype=np.int64, casting="same_kind")

    def along_paths(self, values: np.ndarray) -> np.ndarray:
        """Return products of `[n]` values along the path from the root to each node, `[n]` float64."""
        products = values.astype(np.float64)
        multiply_along_paths(self.parents, products)
        return products

    def outcomes(self, tokens: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
        """
        Compare nodes with the tokens that followed, as `acceptance.outcomes` does for one tree.

        Args:
            tokens (sequence of `np.ndarray` of shape `[m]`): The known part of each row's continuation.

        Returns:
            The indices of the nodes whose parent was accepted and whose depth is within the continuation, and whether
            each was accepted.
        """
        assert len(tokens) == len(self.trees), "every row has a continuation"
        ends = np.cumsum([len(line) for line in tokens], dtype=np.int64)
        if not self.num_nodes:
            return np.zeros(0, np.int64), np.zeros(0, bool)
        truth = np.concatenate(tokens, dtype=np.int64, casting="same_kind")
        nodes, is_true = np.empty(self.num_nodes, np.int64), np.zeros(self.num_nodes, bool)
        num = judge(self.row, self.parents, self.depths, self.tokens, truth, ends, nodes, is_true)
        return nodes[:num], is_true[nodes[:num]]

    def depths_reached(self, tokens: Sequence[np.ndarray]) -> np.ndarray:
        """
        Return how many tokens of each row's continuation (`tokens`, as for `outcomes`) its tree holds, `[rows]` int64.
        """
        nodes, hits = self.outcomes(tokens)
        reached = np.zeros(len(self.trees), np.int64)
        np.maximum.at(reached, self.row[nodes[hits]], self.depths[nodes[hits]])
        return reached

    def with_probs(self, probs: np.ndarray) -> "Forest":
        """Return the same nodes with other probabilities (`[n]`, in [0, 1])."""
        forest = object.__new__(Forest)
        forest.__dict__.update(self.__dict__)
        forest.probs = probs = probs.astype(np.float32)
        forest.trees, start = [], 0
        for tree, size in zip(self.trees, self.sizes.tolist()):
            end = start + size
            forest.trees.append(tree.with_probs(probs[start:end]) if size else tree)
            start = end
        return forest

    def ranks(self) -> np.ndarray:
        """
        Return each node's rank in its tree, in the order of `DraftTree.most_likely` (0 for the likeliest), `[n]` int64.
        """
        numbers = np.arange(self.num_nodes)
        order = np.lexsort((numbers, self.depths, -self.along_paths(self.probs), self.row))
        ranks = np.empty(self.num_nodes, np.int64)
        ranks[order] = numbers - self.starts[self.row[order]]
        return ranks

    def keep(self, nodes: np.ndarray) -> list[DraftTree]:
        """Return the trees of the given nodes only (bool mask `[n]`); a kept node's parent must be kept too."""
        if nodes.all():
            return list(self.trees)
        places, indices, parents = np.empty((3, self.num_nodes), np.int64)
        counts = np.empty_like(self.sizes)
        num = select(self.sizes, self.parents, nodes, places, indices, parents, counts)
        indices = indices[:num]
        tokens, probs = self.tokens[indices], self.probs[indices]
        kept, start, first = [], 0, 0
        for tree, size, count in zip(self.trees, self.sizes.tolist(), counts.tolist()):
            part, start = slice(start, start + count), start + count
            if count == size:
                kept.append(tree)
            elif count == 0:
                kept.append(DraftTree.empty())
            elif tree.distributions is not None:
                kept.append(tree.keep(nodes[first : first + size]))
            else:
                lengths = tree.match_lengths
                if isinstance(lengths, np.ndarray):
                    lengths = lengths[nodes[first : first + size]]
                kept.append(DraftTree.of(tokens[part], parents[part], probs[part], lengths))
            first += size
        return kept
