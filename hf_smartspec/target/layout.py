"""The layout of one packed forward: where every token of the step stands, and what it may attend to."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import attrgetter

import numpy as np
import torch

from ..device import to_device
from ..drafts.tree import DraftTree
from .row_groups import split


@dataclass(eq=False)
class CacheRow:
    """
    One request's row of a `SlotCache`: the slot it lies in, the number of committed tokens it holds, and that of the
    draft nodes behind them, which wait for `commit`.

    A token's position is `position_offset` more than the number of those before it: images may take fewer positions
    than tokens.

    The rest is for rotary embeddings that depend on the length of the text: plain decoding takes that of the longest
    row (`rotary.seen_lengths`).

    Args:
        ahead (`int`): Tokens by which the longest row of the batch is longer than this one.
        least_length (`int`): What all tokens see at least: the longest prompt, in whose forward all prompts are run.
        renewal (`int`, *optional*): The model computes all keys and values anew when the row outgrows this length
            (Phi-3, on its way from short to long texts).
    """

    slot: int
    length: int = 0
    num_nodes: int = 0
    position_offset: int = 0
    ahead: int = 0
    least_length: int = 0
    renewal: int | None = None

    def is_due(self, length: int) -> bool:
        """Whether the row's keys and values must be computed anew before those of a text of so many tokens."""
        return self._renews and self.renewal is not None and length > self.renewal

    def renew(self) -> None:
        """Forgets all keys and values; those of the whole text see the length at which the model does so."""
        assert self.renewal is not None, "nothing is ever computed anew"
        self.length, self.num_nodes, self.least_length = 0, 0, self.renewal + self.ahead + 1

    def room(self, length: int) -> int | None:
        """How deep a draft behind a text of so many tokens may be; None if as deep as it likes."""
        return self.renewal - length if self._renews and self.renewal is not None else None

    @property
    def _renews(self) -> bool:
        return self.renewal is not None and self.least_length <= self.renewal + self.ahead


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

    def __post_init__(self) -> None:
        self.num_nodes = len(self.tree.tokens) - self.first_node
        self.num_tokens = len(self.feed) + self.num_nodes


@dataclass(eq=False)
class StepLayout:
    """
    A packed forward of N tokens from R slots of the cache, of whose columns the first K are read.

    Token t of a row occupies column `row.length + t` of its slot.

    Args:
        tokens, positions (`torch.Tensor` of shape `[1, N]`): Token ids and rotary positions.
        slots, columns (`np.ndarray` of shape `[N]`): Where each token's key and value are written.
        num_rows, num_columns (`int`): R and K.
        parts (list of `PaddedPart`): The rows as attention sees them, cut where padding would cost more than one more
            call of attention: between short contexts and long ones, and around prompts beside rows that decode.
    """

    tokens: torch.Tensor
    positions: torch.Tensor
    slots: np.ndarray
    columns: np.ndarray
    num_rows: int
    num_columns: int
    parts: "list[PaddedPart]"


@dataclass(eq=False)
class PaddedPart:
    """
    R neighbouring rows of the cache, at most S tokens a row, K cache columns read. Fed tokens see all columns up to
    their own; a tree node sees the committed columns and its ancestors.

    Args:
        tokens (`slice`): The rows' tokens in the packed sequence.
        first_slot, num_rows, width, num_columns: The first row's slot, R, S and K.
        limits (`torch.Tensor` of shape `[R, S]`): A query sees all columns below its limit ...
        tree_pairs (`torch.Tensor` of shape `[3, P]`): ... and the (row, query, column) triples listed here.
        query_positions (`np.ndarray` of shape `[R, S]`, *optional*), key_positions (`[R, K]`): Positions, for sliding
            windows; None where all drafts are chains, whose tokens stand in the column of their position.
        gather (`torch.Tensor` of shape `[R * S]`, *optional*): Index of every padded query among the part's tokens;
            None where these already are the padded batch.
        scatter (`torch.Tensor` of shape `[tokens]`, *optional*): Padded index of every token.
        sees_all (`bool`): Whether every query sees every column, windows aside.
    """

    tokens: slice
    first_slot: int
    num_rows: int
    width: int
    num_columns: int
    limits: torch.Tensor
    tree_pairs: torch.Tensor | None
    query_positions: np.ndarray | None
    key_positions: np.ndarray | None
    gather: torch.Tensor | None
    scatter: torch.Tensor | None
    sees_all: bool
    _masks: dict = field(default_factory=dict)

    def mask(self, window: int | None, num_groups: int, dtype: torch.dtype) -> torch.Tensor | None:
        """
        The additive attention mask of shape `[R, 1, S * num_groups, K]`: 0 where a query may look, -inf elsewhere; None
        where all may look everywhere. Built once per step for every distinct window, not once per layer.
        """
        if window is not None and window >= self.num_columns:
            window = None
        if window is None and self.sees_all:
            return None
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


_slot = attrgetter("slot")


def arrange(rows: Sequence[RowInput], call: int) -> list[list[RowInput]]:
    """The rows of each part, in ascending order of their slots; `call` is what one more part costs (`call_columns`)."""
    rows = sorted(rows, key=lambda item: item.row.slot)
    columns = [item.row.length + item.first_node + item.num_tokens for item in rows]
    runs = split([item.row.slot for item in rows], columns, [item.num_tokens for item in rows], call)
    return [rows[run] for run in runs]


def padded_context(rows: Sequence[CacheRow], call: int) -> int:
    """
    N_context of a step in which each row brings one token: the committed tokens that its parts read, padding included,
    and `call` for every part but the first.
    """
    if not rows:
        return 0
    if len(rows) == 1:
        return rows[0].length
    rows = sorted(rows, key=_slot)
    slots, lengths = [row.slot for row in rows], [row.length for row in rows]
    runs = split(slots, [length + 1 for length in lengths], [1] * len(rows), call)
    context = sum([(slots[run.stop - 1] - slots[run.start] + 1) * max(lengths[run]) for run in runs])
    return context + call * (len(runs) - 1)


def build_layout(groups: Sequence[Sequence[RowInput]], device: torch.device) -> StepLayout:
    """Lays out one packed forward of the given rows, as `arrange` orders them."""
    rows = [item for group in groups for item in group]
    counts = np.array([row.num_tokens for row in rows])
    slots = np.repeat([row.row.slot for row in rows], counts)
    query = np.arange(len(slots)) - np.repeat(np.cumsum(counts) - counts, counts)  # index within the row
    columns = np.repeat([row.row.length + row.first_node for row in rows], counts) + query
    tokens = np.concatenate([part for row in rows for part in (row.feed, row.tree.tokens[row.first_node :])])
    # In chains, a token's column is its position.
    positions = columns if all(row.tree.is_chain for row in rows) else columns.copy()
    parts, start = [], 0
    for group in groups:
        end = start + sum(row.num_tokens for row in group)
        parts.append(_build_part(group, slice(start, end), slots, query, columns, positions, device))
        start = end
    if any(row.row.position_offset for row in rows):  # rotary positions only: windows and masks count tokens
        positions = positions + np.repeat([row.row.position_offset for row in rows], counts)
    packed = _tensor(np.stack([tokens, positions]), device)
    return StepLayout(
        tokens=packed[:1],
        positions=packed[1:],
        slots=slots,
        columns=columns,
        num_rows=int(slots.max()) + 1,
        num_columns=int(columns.max()) + 1,
        parts=parts,
    )


def _build_part(
    rows: Sequence[RowInput],
    tokens: slice,
    slots: np.ndarray,
    query: np.ndarray,
    columns: np.ndarray,
    positions: np.ndarray,
    device: torch.device,
) -> PaddedPart:
    """One part, from where its tokens stand (`[N]` each); corrects the positions of nodes of trees."""
    first_slot = rows[0].row.slot
    slots, query, columns, positions = slots[tokens] - first_slot, query[tokens], columns[tokens], positions[tokens]
    is_chain = all(row.tree.is_chain for row in rows)
    num_rows, num_columns = int(slots[-1]) + 1, int(columns.max()) + 1
    width = max([row.num_tokens for row in rows])
    limits = columns + 1  # every token sees all columns up to its own
    tree_pairs = query_positions = key_positions = None
    if not is_chain:
        key_positions = np.tile(np.arange(num_columns), (num_rows, 1))
        tree_pairs = _lay_out_trees(rows, first_slot, positions, limits, key_positions)
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
    return PaddedPart(
        tokens=tokens,
        first_slot=first_slot,
        num_rows=num_rows,
        width=width,
        num_columns=num_columns,
        limits=_tensor(padded_limits, device),
        tree_pairs=None if tree_pairs is None else _tensor(tree_pairs, device),
        query_positions=query_positions,
        key_positions=key_positions,
        gather=gather,
        scatter=scatter,
        sees_all=is_chain and bool((padded_limits == num_columns).all()),
    )


def _lay_out_trees(
    rows: Sequence[RowInput], first_slot: int, positions: np.ndarray, limits: np.ndarray, key_positions: np.ndarray
) -> np.ndarray:
    """Corrects the positions and limits of all nodes of trees; returns `PaddedPart.tree_pairs`."""
    ends = np.cumsum([row.num_tokens for row in rows]).tolist()
    trees = [(row, end) for row, end in zip(rows, ends) if not row.tree.is_chain]
    sizes = np.array([len(row.tree) for row, _ in trees])
    starts = np.cumsum(sizes) - sizes
    # Of every node: its tree's slot, first column, first token in the part, number of fed tokens, first new node
    facts = [
        (row.row.slot - first_slot, row.row.length + len(row.feed), end - len(row.tree), len(row.feed), row.first_node)
        for row, end in trees
    ]
    start, line, base, token, num_fed, first_node = np.repeat(np.column_stack([starts, facts]), sizes, axis=0).T
    number = np.arange(len(start)) - start  # of every node within its tree
    parents = np.concatenate([row.tree.parents for row, _ in trees])
    parents = np.where(parents < 0, -1, parents + start)

    depths, pairs = np.zeros_like(start), []
    nodes = ancestors = np.arange(len(start))
    while len(nodes):  # one level further up each time
        depths[nodes] += 1
        pairs.append((nodes, ancestors))
        ancestors = parents[ancestors]
        nodes, ancestors = nodes[ancestors >= 0], ancestors[ancestors >= 0]

    columns, depths = base + number, depths + base - 1
    key_positions[line, columns] = depths
    is_new = number >= first_node
    tokens = (token + number)[is_new]
    positions[tokens], limits[tokens] = depths[is_new], base[is_new]
    nodes, ancestors = np.concatenate(pairs, axis=1)
    nodes, ancestors = nodes[is_new[nodes]], ancestors[is_new[nodes]]
    return np.stack([line[nodes], (num_fed + number - first_node)[nodes], columns[ancestors]])


def _tensor(array: np.ndarray, device: torch.device) -> torch.Tensor:
    return to_device(array.astype(np.int64, copy=False), device)
