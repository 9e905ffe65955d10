"""What drafters said themselves, and what the target thought of it (Online Speculative Decoding, section 4.1)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from ..drafts.tree import DraftTree

_MOST_NODES = 8  # rejected ones of a step that are kept: of wide trees, the likeliest


@dataclass(frozen=True, eq=False)
class Drafted:
    """
    Drafts of one request: verification has scored them all, those that were rejected too.

    Args:
        is_asked (`np.ndarray` of shape `[n]`, bool): Tokens of the response in whose place something was drafted.
        tokens (`np.ndarray` of shape `[m]`, int32): Drafted tokens that were rejected. Parents stand before children.
        parents (`np.ndarray` of shape `[m]`, int64): The rejected token that each follows; -1: it follows the text.
        roots (`np.ndarray` of shape `[m]`, int64): Tokens of the response that stand before it and its parents.
        top_ids (`torch.Tensor` of shape `[m, k]`, int32): The target's likeliest tokens *behind* each.
        top_probs (`torch.Tensor` of shape `[m, k]`, float16): Their probabilities, before any processor.
    """

    is_asked: np.ndarray
    tokens: np.ndarray
    parents: np.ndarray
    roots: np.ndarray
    top_ids: torch.Tensor
    top_probs: torch.Tensor

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def num_bytes(self) -> int:
        arrays = (self.is_asked, self.tokens, self.parents, self.roots, self.top_ids, self.top_probs)
        return sum(item.nbytes for item in arrays)

    def within(self, length: int) -> "Drafted":
        """Of so many tokens of the response: what was drafted in place of one of them."""
        kept = np.flatnonzero(self.roots < length)  # whole branches
        index = np.full(len(self) + 1, -1)  # the last one serves parent -1
        index[kept] = np.arange(len(kept))
        lines = torch.from_numpy(kept)
        return Drafted(
            self.is_asked[:length].copy(),
            self.tokens[kept],
            index[self.parents[kept]],
            self.roots[kept],
            self.top_ids[lines],
            self.top_probs[lines],
        )


class Branches(NamedTuple):
    """Rejected tokens of one step: which nodes of its draft they were, and what they follow, as in `Drafted`."""

    nodes: np.ndarray
    parents: np.ndarray
    roots: np.ndarray


def rejected(tree: DraftTree, path: np.ndarray, num_before: int) -> Branches:
    """
    What was rejected of a draft, of which `path` was accepted; so many tokens of the response stood before it.
    """
    is_rejected = np.ones(len(tree), bool)
    is_rejected[path] = False
    nodes = np.flatnonzero(is_rejected)
    if len(nodes) > _MOST_NODES:  # a child is never likelier than its parent, and stands behind it
        order = np.lexsort((nodes, tree.depths[nodes], -tree.path_probs[nodes]))
        nodes = np.sort(nodes[order[:_MOST_NODES]])
    roots = np.full(len(tree) + 1, num_before)  # the last one is the committed text
    roots[path] += np.arange(1, len(path) + 1)
    index = np.full(len(tree) + 1, -1)
    for number, node in enumerate(nodes.tolist()):
        index[node], roots[node] = number, roots[tree.parents[node]]
    return Branches(nodes, index[tree.parents[nodes]], roots[nodes])


class Layout(NamedTuple):
    """
    Where rejected tokens stand in a batch: behind the end of their text, and seeing of it what stood before them.

    Args:
        is_drafted (`torch.Tensor` of shape `[rows, length]`, bool): Rejected tokens.
        positions (`torch.Tensor` of shape `[rows, length]`, int64).
        sees (`torch.Tensor` of shape `[rows, length, length]`, bool): Which tokens each may look at.
    """

    is_drafted: torch.Tensor
    positions: torch.Tensor
    sees: torch.Tensor

    @classmethod
    def of(cls, starts: Sequence[int], ends: Sequence[int], drafts: Sequence[Drafted], length: int) -> "Layout":
        """
        Args:
            starts, ends (sequence of `int`): Of each row's response.
            length (`int`): Of the batch.
        """
        rows = len(drafts)
        is_drafted, positions = np.zeros((rows, length), bool), np.tile(np.arange(length), (rows, 1))
        sees = np.broadcast_to(np.tri(length, dtype=bool), (rows, length, length)).copy()
        for row, (start, end, own) in enumerate(zip(starts, ends, drafts)):
            last = end + len(own)
            is_drafted[row, end:last] = True
            sees[row, end:] = np.eye(length, dtype=bool)[end:]  # padding sees itself, so that it stays finite
            for node, (parent, root) in enumerate(zip(own.parents.tolist(), own.roots.tolist()), end):
                before = end + parent if parent >= 0 else start + root - 1
                sees[row, node] |= sees[row, before]
                positions[row, node] = positions[row, before] + 1
        return cls(*map(torch.from_numpy, (is_drafted, positions, sees)))

    def to(self, device: torch.device) -> "Layout":
        return Layout(*[item.to(device) for item in self])
