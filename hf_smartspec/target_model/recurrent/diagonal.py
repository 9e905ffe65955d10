"""
Diagonal recurrences over draft trees, in which every number of a state decays by itself: Mamba-1 (Gu and Dao, 2023,
arXiv 2312.00752, algorithm 2), and RG-LRU (De et al., 2024, arXiv 2402.19427, section 2.4) with N = B = C = A = 1. With
a state of N numbers for each channel c, and p the parent of node i:

    h_i[c] = e^(Δ_i[c] A[c]) h_p[c] + x_i[c] B_i,  y_i[c] = C_i · h_i[c]

Pairs of nodes would need an exponential for every number of a state, so that nodes are computed level by level of the
tree instead. Of a level, only the states are kept that the next one continues.
"""

from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch

from ...device import send_together


class Levels(NamedTuple):
    """
    The nodes of R trees, T places each, by their depth.

    Args:
        order (array or `torch.Tensor` of shape `[nodes]`): Their places, `tree * T + node`.
        before (array or `torch.Tensor` of shape `[nodes]`): Where each one's parent lies in the level before; for a
            root, the number of its tree.
        bounds (list of `int`): Where the levels begin and end in `order`.
    """

    order: torch.Tensor
    before: torch.Tensor
    bounds: list[int]


def levels_of(parents: np.ndarray, device: torch.device) -> Levels:
    """Return the levels of trees, given by the parent of every node, `[R, T]`: -1 for roots, -2 for padding."""
    num, size = parents.shape
    trees, depths = np.arange(num), np.full((num, size + 1), -1)  # the last one is that of roots' parents
    for node in range(size):
        depths[:, node] = np.where(parents[:, node] < -1, -1, depths[trees, parents[:, node]] + 1)
    depths = depths[:, :size].reshape(-1)
    order = np.argsort(depths, kind="stable")
    order = order[np.searchsorted(depths, 0, sorter=order) :]
    bounds = [0, *np.cumsum(np.bincount(depths[order])).tolist()]
    within = np.empty(num * size, np.int64)
    within[order] = np.arange(len(order)) - np.array(bounds)[depths[order]]
    own, parent = order // size, parents.reshape(-1)[order]
    before = np.where(parent < 0, own, within[own * size + parent])
    sent = send_together([torch.from_numpy(order), torch.from_numpy(before)], device)
    return Levels(sent[0], sent[1], bounds)


class Trail(NamedTuple):
    """
    What a scan leaves, from which states at its nodes are computed.

    Args:
        keys (`torch.Tensor` of shape `[R, N, T]`), values, decays (`torch.Tensor` of shape `[R, channels, T]`): B, x
            and Δ.
        rates (`torch.Tensor` of shape `[channels, N]`): A.
        depth (`int`): Nodes of the longest path, which the host knows without a wait for the device.
        last (`torch.Tensor` of shape `[R, channels, N]`, *optional*): States at the ends, where all trees are chains of
            the same length.
    """

    keys: torch.Tensor
    values: torch.Tensor
    decays: torch.Tensor
    rates: torch.Tensor
    depth: int
    last: torch.Tensor | None

    @property
    def num_bytes(self) -> int:
        """Bytes of what the scan itself has left."""
        left = self.keys, self.values, self.decays, self.last
        return sum(item.nbytes for item in left if item is not None)

    def of(self, trees: torch.Tensor) -> "Trail":
        """Return the part of some trees."""
        return Trail(self.keys[trees], self.values[trees], self.decays[trees], self.rates, self.depth, None)

    def state_after(self, state: torch.Tensor, ends: torch.Tensor, path: torch.Tensor) -> torch.Tensor:
        """Return the states `[R, channels, N]` after a path in every tree, as `Scanned.state_after` does."""
        nodes = path.long().argsort(dim=1, descending=True, stable=True)[:, None, : self.depth]
        is_in = path[:, None].take_along_dim(nodes, dim=2)
        keys, values, decays = [item.take_along_dim(nodes, dim=2) for item in (self.keys, self.values, self.decays)]
        values, decays = [item.where(is_in, 0) for item in (values, decays)]
        for key, value, decay in zip(keys.unbind(2), values.unbind(2), decays.unbind(2)):
            state = _continued(state, key, value, decay, self.rates)
        return state

    def state_at_end(self, state: torch.Tensor) -> torch.Tensor:
        """Return the states `[R, channels, N]` after all nodes of trees without branches, of the same length."""
        assert self.last is not None, "of pieces of prompts"
        return self.last


def scan_levels(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    decay: torch.Tensor,
    rates: torch.Tensor,
    state: torch.Tensor,
    levels: Levels,
    before: Trail | None = None,
) -> tuple[torch.Tensor, Trail]:
    """
    Compute the outputs of the last W of at most T nodes of R trees.

    Args:
        query, key (`torch.Tensor` of shape `[R, N, W]`): C, in the dtype in which states are read, and B.
        value, decay (`torch.Tensor` of shape `[R, channels, W]`): x and Δ.
        rates (`torch.Tensor` of shape `[channels, N]`): A; like all others but the queries in float32.
        state (`torch.Tensor` of shape `[R, channels, N]`): States before the roots.
        levels (`Levels`): Those of all T nodes.
        before (`Trail`, *optional*): What scans of the first nodes have left, which are run again; where not given, W
            is T.

    Returns:
        Outputs `[R, channels, W]` in the queries' dtype, and what states at nodes are computed from.
    """
    num_before = 0
    if before is not None:
        num_before = before.keys.shape[2]
        query = torch.nn.functional.pad(query, (num_before, 0))
        known = before.keys, before.values, before.decays
        key, value, decay = [torch.cat(pair, dim=2) for pair in zip(known, (key, value, decay))]
    queries, keys, values, decays = [item.mT.flatten(0, 1)[levels.order] for item in (query, key, value, decay)]
    outputs = queries.new_zeros(query.shape[0] * query.shape[2], value.shape[1])
    found, states = [], state
    for part in [slice(*bounds) for bounds in pairwise(levels.bounds)]:
        states = _continued(states[levels.before[part]], keys[part], values[part], decays[part], rates)
        found.append((states.to(query.dtype) @ queries[part, :, None])[..., 0])
    outputs[levels.order] = torch.cat(found)
    outputs = outputs.unflatten(0, (query.shape[0], query.shape[2])).mT[:, :, num_before:]
    return outputs, Trail(key, value, decay, rates, len(levels.bounds) - 1, states)


def _continued(
    states: torch.Tensor, key: torch.Tensor, value: torch.Tensor, decay: torch.Tensor, rates: torch.Tensor
) -> torch.Tensor:
    """Return states `[nodes, channels, N]` after one node each."""
    return (decay[:, :, None] * rates).exp_().mul_(states).add_(value[:, :, None] * key[:, None])
