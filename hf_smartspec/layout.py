"""The layout of one packed forward: where every token of the step stands, and what it may attend to."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from .tree import DraftTree


@dataclass(eq=False)
class CacheRow:
    """
    One request's row of a `SlotCache`: the slot it lies in, the number of committed tokens it holds, and that of the
    draft nodes behind them, which wait for `commit`.
    """

    slot: int
    length: int = 0
    num_nodes: int = 0


@dataclass
class RowInput:
    """
    What one row brings to a packed forward.

    Args:
        row (`CacheRow`): Where the row's keys and values lie.
        feed (`np.ndarray` of shape `[f]`): Committed tokens that are not cached yet; draft trees hang on the last one.
            May be empty when only further nodes of a tree follow.
        tree (`DraftTree`): The row's draft.
        first_node (`int`): Nodes before this one were part of an earlier forward and are in the cache; `feed` is empty
            then.
    """

    row: CacheRow
    feed: np.ndarray
    tree: DraftTree = field(default_factory=DraftTree.empty)
    first_node: int = 0

    @property
    def num_nodes(self) -> int:
        return len(self.tree) - self.first_node

    @property
    def num_tokens(self) -> int:
        return len(self.feed) + self.num_nodes


@dataclass
class StepLayout:
    """
    Index tensors of a packed forward of N tokens from R cache rows, at most S tokens a row, K cache columns read.

    Token t of a row occupies column `row.length + t` of its slot. Fed tokens see all columns up to their own; a tree
    node sees the committed columns and its ancestors.

    Args:
        tokens, positions (`torch.Tensor` of shape `[1, N]`): Token ids and rotary positions.
        slots, columns (`np.ndarray` of shape `[N]`): Where each token's key and value are written.
        num_rows, width, num_columns: R, S and K.
        limits (`torch.Tensor` of shape `[R, S]`): A query sees all columns below its limit ...
        tree_pairs (`torch.Tensor` of shape `[3, P]`): ... and the (row, query, column) triples listed here.
        query_positions (`np.ndarray` of shape `[R, S]`, *optional*), key_positions (`[R, K]`): Positions, for sliding
            windows; None where all drafts are chains, whose tokens stand in the column of their position.
        gather (`torch.Tensor` of shape `[R * S]`, *optional*): Packed index of every padded query; None where the
            packed sequence already is the padded batch.
        scatter (`torch.Tensor` of shape `[N]`, *optional*): Padded index of every packed token.
    """

    tokens: torch.Tensor
    positions: torch.Tensor
    slots: np.ndarray
    columns: np.ndarray
    num_rows: int
    width: int
    num_columns: int
    limits: torch.Tensor
    tree_pairs: torch.Tensor | None
    query_positions: np.ndarray | None
    key_positions: np.ndarray | None
    gather: torch.Tensor | None
    scatter: torch.Tensor | None
    _masks: dict = field(default_factory=dict)

    def mask(self, window: int | None, num_groups: int, dtype: torch.dtype) -> torch.Tensor:
        """
        The additive attention mask of shape `[R, 1, S * num_groups, K]`: 0 where a query may look, -inf elsewhere.
        Built once per step for every distinct window, not once per layer.
        """
        if window is not None and window >= self.num_columns:
            window = None
        key = (window, num_groups, dtype)
        if key not in self._masks:
            self._masks[key] = self._build_mask(window, num_groups, dtype)
        return self._masks[key]

    def _build_mask(self, window: int | None, num_groups: int, dtype: torch.dtype) -> torch.Tensor:
        columns = torch.arange(self.num_columns, device=self.limits.device)
        visible = columns < self.limits[:, :, None]
        if self.tree_pairs is not None:
            visible[tuple(self.tree_pairs)] = True
        if window is not None:
            if self.key_positions is None or self.query_positions is None:
                visible &= columns >= self.limits[:, :, None] - window
            else:
                seen = self.key_positions[:, None, :] > self.query_positions[:, :, None] - window
                visible &= torch.from_numpy(seen).to(visible.device)
        if num_groups > 1:
            visible = visible.repeat_interleave(num_groups, dim=1)
        mask = torch.zeros(visible.shape, dtype=dtype, device=visible.device)
        return mask.masked_fill_(~visible, -torch.inf)[:, None]


def build_layout(rows: Sequence[RowInput], device: torch.device) -> StepLayout:
    """Lays out one packed forward of the given rows, which must be in ascending order of their slots."""
    num_rows = rows[-1].row.slot + 1
    counts = np.array([row.num_tokens for row in rows])
    width, ends = int(counts.max()), np.cumsum(counts)
    slots = np.repeat([row.row.slot for row in rows], counts)
    query = np.arange(len(slots)) - np.repeat(ends - counts, counts)  # index within the row
    columns = np.repeat([row.row.length + row.first_node for row in rows], counts) + query
    tokens = np.concatenate([part for row in rows for part in (row.feed, row.tree.tokens[row.first_node :])])
    num_columns = int(columns.max()) + 1

    # In chains, a token's column is its position, and it sees all columns up to its own.
    positions, limits, pairs = columns, columns + 1, []
    query_positions = key_positions = None
    if not all(row.tree.is_chain for row in rows):
        positions = columns.copy()
        key_positions = np.tile(np.arange(num_columns), (num_rows, 1))
        for row, end in zip(rows, ends):
            if not row.tree.is_chain:
                pairs.append(_lay_out_tree(row, slice(end - row.num_nodes, end), positions, limits, key_positions))
        query_positions = np.zeros((num_rows, width), np.int64)
        query_positions[slots, query] = positions

    padded_limits = np.ones((num_rows, width), np.int64)  # padding queries see column 0: a softmax over nothing is NaN
    padded_limits[slots, query] = limits

    gather = scatter = None
    if len(slots) != num_rows * width:
        flat = slots * width + query
        index = np.zeros(num_rows * width, np.int64)
        index[flat] = np.arange(len(slots))
        gather, scatter = _tensor(index, device), _tensor(flat, device)
    packed = _tensor(np.stack([tokens, positions]), device)
    return StepLayout(
        tokens=packed[:1],
        positions=packed[1:],
        slots=slots,
        columns=columns,
        num_rows=num_rows,
        width=width,
        num_columns=num_columns,
        limits=_tensor(padded_limits, device),
        tree_pairs=_tensor(np.concatenate(pairs, axis=1), device) if pairs else None,
        query_positions=query_positions,
        key_positions=key_positions,
        gather=gather,
        scatter=scatter,
    )


def _lay_out_tree(
    row: RowInput, nodes: slice, positions: np.ndarray, limits: np.ndarray, key_positions: np.ndarray
) -> np.ndarray:
    """Corrects the positions and limits of a row's tree nodes; returns its part of `StepLayout.tree_pairs`."""
    slot, base = row.row.slot, row.row.length + len(row.feed)  # the tree's first column
    depths = row.tree.depths + (base - 1)
    positions[nodes], limits[nodes] = depths[row.first_node :], base
    key_positions[slot, base : base + len(depths)] = depths
    node, ancestor = np.nonzero(row.tree.ancestors[row.first_node :])
    return np.stack([np.full(len(node), slot), node + len(row.feed), ancestor + base])


def _tensor(array: np.ndarray, device: torch.device) -> torch.Tensor:
    return torch.from_numpy(array.astype(np.int64, copy=False)).to(device, non_blocking=True)
