"""Rejected drafts and the target's distributions after them (Online Speculative Decoding, section 4.1)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from ..drafts.tree import DraftTree

_MOST_NODES = 8  # rejected nodes that are kept of a step: the likeliest


@dataclass(frozen=True, eq=False)
class Drafted:
    """
    Rejected drafts of one request, which verification has scored as it has the accepted ones.

    Args:
        is_asked (`np.ndarray` of shape `[n]`, bool): Tokens of the response in whose place there was a draft.
        tokens (`np.ndarray` of shape `[m]`, int32): Drafted tokens that were rejected, parents before children.
        parents (`np.ndarray` of shape `[m]`, int64): Index of the rejected token before each; -1 for those after the
            text.
        roots (`np.ndarray` of shape `[m]`, int64): Number of tokens of the response before each branch.
        top_ids (`torch.Tensor` of shape `[m, k]`, int32): The target's likeliest tokens *after* each.
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
        """Return the drafts in the place of one of the first `length` tokens of the response."""
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
    """Rejected nodes of one step's draft, int64 `[m]`, with parents and roots as in `Drafted`."""

    nodes: np.ndarray
    parents: np.ndarray
    roots: np.ndarray


def rejected(tree: DraftTree, path: np.ndarray, num_before: int) -> Branches:
    """Return the rejected nodes of a draft, whose `path` was accepted after `num_before` tokens of the response."""
    is_rejected = np.ones(len(tree), bool)
    is_rejected[path] = False
    nodes = np.flatnonzero(is_rejected)
    if len(nodes) > _MOST_NODES:  # a child is never likelier than its parent, and comes after it
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
    Places of rejected drafts in a batch: after the end of their text, and attending to the part of it before them.

    Args:
        is_drafted (`torch.Tensor` of shape `[rows, length]`, bool): Rejected tokens.
        positions (`torch.Tensor` of shape `[rows, length]`, int64): Position ids.
        attends (`torch.Tensor` of shape `[rows, length, length]`, bool): Attention mask: tokens that each attends to.
    """

    is_drafted: torch.Tensor
    positions: torch.Tensor
    attends: torch.Tensor

    @classmethod
    def of(cls, starts: Sequence[int], ends: Sequence[int], drafts: Sequence[Drafted], length: int) -> "Layout":
        """
        Return the layout of a batch.

        Args:
            starts, ends (sequence of `int`): Columns of the first token of each row's response, and after its last.
            drafts (sequence of `Drafted`): Rejected drafts of each row.
            length (`int`): Length of the batch.
        """
        rows = len(drafts)
        is_drafted, positions = np.zeros((rows, length), bool), np.tile(np.arange(length), (rows, 1))
        attends = np.broadcast_to(np.tri(length, dtype=bool), (rows, length, length)).copy()
        for row, (start, end, own) in enumerate(zip(starts, ends, drafts)):
            last = end + len(own)
            is_drafted[row, end:last] = True
            attends[row, end:] = np.eye(length, dtype=bool)[end:]  # padding attends to itself, for finite outputs
            for node, (parent, root) in enumerate(zip(own.parents.tolist(), own.roots.tolist()), end):
                before = end + parent if parent >= 0 else start + root - 1
                attends[row, node] |= attends[row, before]
                positions[row, node] = positions[row, before] + 1
        return cls(*map(torch.from_numpy, (is_drafted, positions, attends)))

    def to(self, device: torch.device) -> "Layout":
        return Layout(*[item.to(device) for item in self])
