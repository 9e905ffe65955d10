"""Draft trees: the tokens that candidate sources propose and the target verifies. Plain numpy, no torch."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from .kernels.trees import are_trees


@dataclass(frozen=True)
class DraftTree:
    """
    A tree of draft tokens below the last committed token of one request. A chain is a tree.

    Args:
        tokens (`np.ndarray` of shape `[n]`, int64): Draft tokens; parents come before their children.
        parents (`np.ndarray` of shape `[n]`, int64): Index of each node's parent, -1 for children of the last committed
            token.
        probs (`np.ndarray` of shape `[n]`, float32): Estimated probability that the target picks the node given that it
            picked the node's parent.
        distributions (`torch.Tensor` of shape `[n, vocab_size]`, *optional*): For chains whose tokens were *sampled*:
            the draft distribution of each token, which rejection sampling needs.
        match_lengths (`np.ndarray` of shape `[n]`, int64, or one `int` for all nodes): Tokens of context by whose match
            each node was found (SSSD, section 3.1.3); 0 where the source does not match, or accounts for it in `probs`.
    """

    tokens: np.ndarray
    parents: np.ndarray
    probs: np.ndarray
    distributions: Any = None
    match_lengths: np.ndarray | int = 0

    @classmethod
    def chain(
        cls,
        tokens: Sequence[int] | np.ndarray,
        probs: Sequence[float] | np.ndarray | None = None,
        distributions: Any = None,
        match_lengths: np.ndarray | int = 0,
    ) -> "DraftTree":
        """Return the tree in which every token follows the one before it; `probs` are 1 where none are given."""
        tokens = np.asarray(tokens, dtype=np.int64)
        probs = np.ones(len(tokens), np.float32) if probs is None else np.asarray(probs, np.float32)
        tree = cls(tokens, np.arange(-1, len(tokens) - 1), probs, distributions, match_lengths)
        tree.__dict__["is_chain"] = True  # where `cached_property` stores its value
        return tree

    @classmethod
    def of(
        cls, tokens: np.ndarray, parents: np.ndarray, probs: np.ndarray, match_lengths: np.ndarray | int | None = None
    ) -> "DraftTree":
        """
        Return a tree of these arrays, made faster than by the constructor, which counts for sources of many small
        trees.
        """
        tree = object.__new__(cls)
        fields = tree.__dict__
        fields["tokens"], fields["parents"], fields["probs"], fields["distributions"] = tokens, parents, probs, None
        if match_lengths is not None:  # otherwise the class attribute, 0, is read
            fields["match_lengths"] = match_lengths
        return tree

    @classmethod
    def empty(cls) -> "DraftTree":
        return _EMPTY

    def __len__(self) -> int:
        return len(self.tokens)

    @cached_property
    def is_chain(self) -> bool:
        return self.parents.tolist() == list(range(-1, len(self) - 1))  # lists: numpy is slow on few elements

    @cached_property
    def depths(self) -> np.ndarray:
        """Depth of each node, `[n]` int64; children of the last committed token have depth 1."""
        if self.is_chain:
            return np.arange(1, len(self) + 1)
        depths: list[int] = []
        for parent in self.parents.tolist():  # lists: numpy is slow on single elements
            depths.append(1 if parent < 0 else depths[parent] + 1)
        return np.array(depths, np.int64)

    @cached_property
    def path_probs(self) -> np.ndarray:
        """Probability that the target's path runs through each node, a_n of docs/design.md, `[n]` float32."""
        # Rounded softmax values may exceed 1 by a hair, and a child must never outrank its parent.
        probs = np.clip(self.probs, 0, 1).astype(np.float32)
        if self.is_chain:
            return np.cumprod(probs)
        products: list[float] = []
        for parent, prob in zip(self.parents.tolist(), probs.tolist()):
            products.append(prob if parent < 0 else prob * products[parent])
        return np.array(products, np.float32)

    @cached_property
    def _children(self) -> dict[tuple[int, int], int]:
        # Reversed, so that the first of two equal siblings is kept.
        nodes = range(len(self) - 1, -1, -1)
        return dict(zip(zip(self.parents.tolist()[::-1], self.tokens.tolist()[::-1]), nodes))

    def child(self, parent: int, token: int) -> int | None:
        """Return the child of `parent` (-1: the last committed token) that holds `token`, or None."""
        return self._children.get((parent, token))

    def path_along(self, tokens: np.ndarray) -> list[int]:
        """Return the nodes of the path from the root that holds `tokens` (`[n]` int), as far as the tree has it."""
        if self.is_chain:
            length = min(len(self), len(tokens))
            wrong = np.flatnonzero(self.tokens[:length] != tokens[:length])
            return list(range(int(wrong[0]) if len(wrong) else length))
        path, node = [], -1
        for token in tokens.tolist():
            child = self.child(node, token)
            if child is None:
                break
            path.append(child)
            node = child
        return path

    def with_probs(self, probs: np.ndarray) -> "DraftTree":
        """Return the same nodes with other probabilities (`[n]` float32)."""
        tree = object.__new__(DraftTree)
        tree.__dict__.update(self.__dict__)
        tree.__dict__["probs"] = probs
        tree.__dict__.pop("path_probs", None)  # the cached value no longer holds
        return tree

    def keep(self, nodes: np.ndarray) -> "DraftTree":
        """Return the tree of the given nodes only (bool mask `[n]`); a kept node's parent must be kept too."""
        if nodes.all():
            return self
        index = np.append(np.cumsum(nodes) - 1, -1)  # the last entry serves parent -1
        distributions = self.distributions
        if distributions is not None:  # a chain keeps its first nodes: a view, for which no device is waited for
            distributions = distributions[: nodes.sum()] if self.is_chain else distributions[np.flatnonzero(nodes)]
        lengths = self.match_lengths[nodes] if isinstance(self.match_lengths, np.ndarray) else self.match_lengths
        return DraftTree(self.tokens[nodes], index[self.parents[nodes]], self.probs[nodes], distributions, lengths)

    def most_likely(self, num_nodes: int) -> "DraftTree":
        """Return the `num_nodes` nodes of highest path probability; they always form a tree."""
        if len(self) <= num_nodes:
            return self
        # Ties go to the shallower, then to the earlier node: a child never outranks its parent.
        order = np.lexsort((np.arange(len(self)), self.depths, -self.path_probs))
        nodes = np.zeros(len(self), bool)
        nodes[order[:num_nodes]] = True
        return self.keep(nodes)

    def best_chain(self) -> "DraftTree":
        """Return the chain that takes the most probable child at each step from the root."""
        if self.is_chain:
            return self
        nodes = np.zeros(len(self), bool)
        current = -1
        while (children := np.flatnonzero(self.parents == current)).size:
            current = int(children[np.argmax(self.probs[children])])
            nodes[current] = True
        return self.keep(nodes)

    def within(self, widths: Sequence[int]) -> "DraftTree":
        """Return the part in which every node at depth d has the `widths[d]` likeliest of its children at most."""
        if self.is_chain:  # widths of 0 end a chain, too
            depth = next((depth for depth, width in enumerate(widths) if width < 1), len(widths))
            return self.keep(self.depths <= depth)
        nodes, numbers = np.zeros(len(self), bool), [0] * (len(self) + 1)  # the last number is of children of the root
        for node in np.lexsort((-self.probs, self.depths)).tolist():
            parent, depth = int(self.parents[node]), int(self.depths[node]) - 1
            if depth < len(widths) and numbers[parent] < widths[depth] and (parent < 0 or nodes[parent]):
                nodes[node] = True
                numbers[parent] += 1
        return self.keep(nodes)

    def check_integrity(self, vocab_size: int) -> None:
        """Raise `ValueError` if the arrays do not describe a tree over `vocab_size` tokens."""
        num_nodes = len(self.tokens)
        arrays = [("tokens", self.tokens, "iu"), ("parents", self.parents, "iu"), ("probs", self.probs, "fiu")]
        if not isinstance(self.match_lengths, int | np.integer):
            arrays.append(("match_lengths", self.match_lengths, "iu"))
        for name, array, kinds in arrays:
            if not isinstance(array, np.ndarray) or array.shape != (num_nodes,) or array.dtype.kind not in kinds:
                got = f"{array.dtype} of shape {array.shape}" if isinstance(array, np.ndarray) else type(array).__name__
                kind = "integers" if kinds == "iu" else "numbers"
                raise ValueError(f"`{name}` of a DraftTree must be an array of {num_nodes} {kind}, got {got}.")
        if num_nodes == 0:
            return
        if not self.is_chain and ((self.parents >= np.arange(num_nodes)).any() or self.parents.min() < -1):
            raise ValueError(f"Every parent must stand before its child or be -1, got parents {self.parents.tolist()}.")
        tokens = self.tokens.tolist()  # as lists: numpy is slow on few elements
        if min(tokens) < 0 or max(tokens) >= vocab_size:
            raise ValueError(f"Draft tokens must lie in [0, {vocab_size}), got {min(tokens)} to {max(tokens)}.")


def check_trees(trees: Sequence[DraftTree], vocab_size: int) -> None:
    """Run `check_integrity` on all trees; valid ones are checked together, in compiled code."""
    trees = [tree for tree in trees if tree is not _EMPTY]
    if not (all(map(_has_arrays, trees)) and _are_trees(trees, vocab_size)):
        for tree in trees:
            tree.check_integrity(vocab_size)


def _has_arrays(tree: DraftTree) -> bool:
    """Return whether the arrays of a tree are certainly of the right kinds and of one length."""
    tokens, parents, probs, lengths = tree.tokens, tree.parents, tree.probs, tree.match_lengths
    is_sound = (
        type(tokens) is type(parents) is type(probs) is np.ndarray
        and tokens.ndim == 1
        and tokens.shape == parents.shape == probs.shape
        and tokens.dtype.kind == parents.dtype.kind == "i"
        and probs.dtype.kind == "f"
    )
    if type(lengths) is np.ndarray:
        return is_sound and lengths.shape == tokens.shape and lengths.dtype.kind == "i"
    return is_sound and type(lengths) is int


def _are_trees(trees: Sequence[DraftTree], vocab_size: int) -> bool:
    """Return whether all parents come before their children, and all tokens lie in the vocabulary."""
    if not trees:
        return True
    sizes = np.array([len(tree.tokens) for tree in trees])
    tokens = np.concatenate([tree.tokens for tree in trees], dtype=np.int64)
    parents = np.concatenate([tree.parents for tree in trees], dtype=np.int64)
    return bool(are_trees(sizes, parents, tokens, vocab_size))


_EMPTY = DraftTree.chain([])
