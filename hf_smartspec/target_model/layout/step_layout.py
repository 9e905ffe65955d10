"""The layout of one packed forward: the place of every token of the step, and the columns that it may attend to."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, ClassVar, NamedTuple, Protocol

import numpy as np
import torch

from ...cpu.attention import NO_TREE
from ...device import StagingBuffer
from .kernels.places import place_rows
from .kernels.trees import depths_of, lay_out
from .rows import RowInput
from .shared_prefix import SharedPart, shared_parts
from .spans import Spans


class EncodedAttention(Protocol):
    """Attention of a decoder's layers, cross attention included."""

    def owners(self) -> list[Any]:
        """List the objects whose tensors are sent with the layout."""

    def attend(self, *args: Any, **options: Any) -> torch.Tensor:
        """Attend to the row's own tokens, or to its encoder's outputs, whichever the memory is."""


@dataclass(eq=False)
class StepLayout:
    """
    A packed forward of N tokens. It is laid out on the host, and then sent (`send`).

    Token t of a row occupies column `row.own + t` from the row's start, which is that of its slot, where no prefix is
    shared.

    Args:
        tokens, positions (`torch.Tensor` of shape `[1, N]`): Token ids and rotary positions.
        firsts, columns (`np.ndarray` of shape `[N]`): The line at which each token's row starts, and the token's column
            from there.
        parts (list of `PaddedPart`): The rows as attention reads them, split where padding would cost more than one
            more call of attention: between short contexts and long ones, and around prompts beside rows that decode.
        lines (`torch.Tensor` of shape `[N]`): Lines to which keys and values are written.
        kept (`torch.Tensor` of shape `[M]`, *optional*): The tokens whose logits are computed; all, where not given.
        best_only (`bool`): Whether their best tokens are enough, in place of logits.
        spans (`Spans`, *optional*): The rows as flash attention reads them, where it is used.
        is_padded (`bool`): Whether the last token is repeated after the others (`graphs.padding`).
        encoded (`EncodedAttention`, *optional*): Attends in place of tree attention, where there is an encoder.
        shared (list of `SharedPart`): Prefixes that several rows attend to. Slots and columns then begin after them.
    """

    sent: ClassVar = ("tokens", "positions", "lines", "kept")
    tokens: torch.Tensor
    positions: torch.Tensor
    firsts: np.ndarray
    columns: np.ndarray
    lines: torch.Tensor
    parts: "list[PaddedPart]"
    kept: torch.Tensor | None = None
    spans: Spans | None = None
    is_padded: bool = False
    encoded: EncodedAttention | None = None
    seen: dict = field(default_factory=dict)  # `SeenLines` of compiled attention, built once per step
    shared: list[SharedPart] = field(default_factory=list)
    groups: dict = field(default_factory=dict)  # of queries that choose keys, by parts, built once per step
    best_only: bool = False
    chosen: list[torch.Tensor] | None = None  # what the layer that runs next adds to scores, by parts

    def owners(self) -> list[Any]:
        """List the objects whose tensors, which their `sent` names, are sent to the device."""
        owners: list[Any] = [self, *self.parts, *self.shared]
        if self.spans is not None:
            owners.append(self.spans)
        return owners if self.encoded is None else owners + self.encoded.owners()


@dataclass(eq=False)
class PaddedPart:
    """
    R neighbouring slots of a slab, at most S tokens a row, K cache columns read. Fed tokens attend to all columns up to
    their own; a tree node attends to the committed columns and its ancestors.

    Args:
        tokens (`slice`): The rows' tokens in the packed sequence.
        first_line, stride (`int`): The line at which the first slot begins, and the lines from one slot to the next.
        num_rows, width, num_columns (`int`): R, S and K.
        limits (`torch.Tensor` of shape `[R, S]`): A query attends to all columns below its limit ...
        tree_pairs (`torch.Tensor` of shape `[P]`): ... and to those at these indices into `[R, S, K]`: its ancestors.
        query_positions (`torch.Tensor` of shape `[R, S]`, *optional*), nodes (`torch.Tensor` of shape `[2, nodes]`):
            Positions, for sliding windows: those of queries; and for all tree nodes, the index of their column in `[R,
            K]` and their position. None where all drafts are chains, whose tokens are in the column of their position.
        gather (`torch.Tensor` of shape `[R * S]`, *optional*): Index of every padded query among the part's tokens;
            None where these already are the padded batch.
        scatter (`torch.Tensor` of shape `[tokens]`, *optional*): Padded index of every token.
        sees_all (`bool`): Whether every query attends to every column, windows aside.
        seen_nodes (`np.ndarray` of shape `[1 + words, tokens]`, int64, *optional*): The column of each row's first
            node, and bits of the nodes from there on that each token attends to, 64 in each word; for tokens that are
            not tree nodes, `NO_TREE`. None where all drafts are chains.
        on_host (tuple of `np.ndarray` of shape `[R, S]`, *optional*): `limits` as they were before they were sent, and
            the numbers of columns that queries attend to, windows aside: below their limits, and their ancestors.
    """

    sent: ClassVar = ("limits", "tree_pairs", "query_positions", "nodes", "gather", "scatter")
    tokens: slice
    first_line: int
    stride: int
    num_rows: int
    width: int
    num_columns: int
    limits: torch.Tensor
    tree_pairs: torch.Tensor | None
    query_positions: torch.Tensor | None
    nodes: torch.Tensor | None
    gather: torch.Tensor | None
    scatter: torch.Tensor | None
    sees_all: bool
    seen_nodes: np.ndarray | None = None
    on_host: tuple[np.ndarray, np.ndarray] | None = None
    _masks: dict = field(default_factory=dict)

    def view(self, memory: torch.Tensor) -> torch.Tensor:
        """
        Return the part's columns of a layer's keys or values `[lines, heads, head_dim]`: `[R, heads, K, head_dim]`.
        """
        line, head, item = memory.stride()
        shape = self.num_rows, memory.shape[1], self.num_columns, memory.shape[2]
        return memory.as_strided(
            shape, (self.stride * line, head, line, item), memory.storage_offset() + self.first_line * line
        )

    def mask(self, window: int | None, num_groups: int, dtype: torch.dtype) -> torch.Tensor | None:
        """
        Return the additive attention mask of shape `[R, 1, S * num_groups, K]`: 0 where a query may attend, -inf
        elsewhere; None where all may attend everywhere. It is built once per step for every distinct window, not once
        per layer.
        """
        if window is not None and window >= self.num_columns:
            window = None
        if window is None and self.sees_all:
            return None
        key = (window, num_groups, dtype)
        if key not in self._masks:
            self._masks[key] = self._build_mask(window, num_groups, dtype)
        return self._masks[key]

    def distances(self) -> torch.Tensor:
        """Return by how many positions every column's token precedes each query, `[R, S, K]`; 0 for later tokens."""
        columns = torch.arange(self.num_columns, device=self.limits.device)
        if self.nodes is None or self.query_positions is None:
            return (self.limits[:, :, None] - 1 - columns).clamp(min=0)
        return (self.query_positions[:, :, None] - self._column_positions(columns)[:, None, :]).clamp(min=0)

    def _column_positions(self, columns: torch.Tensor) -> torch.Tensor:
        """Return the positions of the tokens in all columns, `[R, K]`, where there are trees."""
        assert self.nodes is not None, "tokens of chains are in the column of their position"
        positions = columns.repeat(self.num_rows, 1)
        positions.view(-1)[self.nodes[0]] = self.nodes[1]
        return positions

    def _build_mask(self, window: int | None, num_groups: int, dtype: torch.dtype) -> torch.Tensor:
        columns = torch.arange(self.num_columns, device=self.limits.device)
        visible = columns < self.limits[:, :, None]
        if self.tree_pairs is not None:
            visible.view(-1).index_fill_(0, self.tree_pairs, True)  # `[...] = True` would wait for a GPU
        if window is not None:
            if self.nodes is None or self.query_positions is None:
                visible &= columns >= self.limits[:, :, None] - window
            else:
                positions = self._column_positions(columns)
                visible &= positions[:, None, :] > self.query_positions[:, :, None] - window
        if num_groups > 1:
            visible = visible.repeat_interleave(num_groups, dim=1)
        mask = torch.zeros(visible.shape, dtype=dtype, device=visible.device)
        return mask.masked_fill_(~visible, -torch.inf)[:, None]


_FEW_DRAFTS = 4  # up to here, drafts are checked faster one by one


class _Tokens(NamedTuple):
    """The tokens of some rows end to end, `[N]` int64 each, in the order in which `place_rows` has them."""

    firsts: np.ndarray  # lines of their slots
    query: np.ndarray  # index within the row
    columns: np.ndarray
    positions: np.ndarray
    limits: np.ndarray  # every token attends to all columns below its own, nodes of trees to some others, too
    lines: np.ndarray

    def of(self, part: slice) -> "_Tokens":
        return _Tokens(*[array[part] for array in self])


def send(
    layouts: Sequence[StepLayout], device: torch.device, staging: StagingBuffer, more: Sequence[torch.Tensor] = ()
) -> list[torch.Tensor]:
    """
    Send all tensors of layouts to a device in one copy, with `more` (int64), and return `more` on the device. Tensors
    sent through `staging` before are overwritten.
    """
    if device.type == "cpu":
        return list(more)
    owners = [owner for layout in layouts for owner in layout.owners()]
    places = [(owner, name) for owner in owners for name in owner.sent if getattr(owner, name) is not None]
    tensors = staging.send([*more, *[getattr(owner, name) for owner, name in places]], device)
    for (owner, name), tensor in zip(places, tensors[len(more) :]):
        setattr(owner, name, tensor)
    return tensors[: len(more)]


class Rounding(NamedTuple):
    """Functions that round sizes of rectangles up to sizes that recur."""

    tokens: Callable[[int], int]
    columns: Callable[[int], int]


def build_layout(groups: Sequence[Sequence[RowInput]], rounding: Rounding | None = None) -> StepLayout:
    """
    Lay out one packed forward of the given rows, grouped as by `arrange`. Rectangles are as small as possible, or have
    sizes that `rounding` gives.
    """
    rows = [item for group in groups for item in group]
    places, has_tree = _places(rows), _has_tree(rows)
    tokens = np.concatenate([part for item in rows for part in _tokens(item)])
    parts, start, first = [], 0, 0
    for group in groups:
        end, last = start + sum([item.num_tokens for item in group]), first + len(group)
        parts.append(_build_part(group, slice(start, end), places, has_tree[first:last], rounding))
        start, first = end, last
    positions = places.positions
    offsets = [item.row.position_offset + item.row.shared_read_len for item in rows]
    shares = any([item.row.shared_read_len for item in rows])
    if any(offsets):  # embeddings only: windows and masks count columns
        positions = positions + np.repeat(offsets, [item.num_tokens for item in rows])
    return StepLayout(
        tokens=_tensor(tokens)[None],
        positions=_tensor(positions)[None],
        firsts=places.firsts,
        columns=places.columns,
        lines=_tensor(places.lines),
        parts=parts,
        shared=shared_parts(rows) if shares else [],
    )


def _tokens(item: RowInput) -> list[np.ndarray]:
    """Return the arrays of tokens that the row runs, without an empty one."""
    return [item.feed, item.tree.tokens[item.first_node :]] if item.num_nodes else [item.feed]


def _places(rows: Sequence[RowInput]) -> _Tokens:
    """Return the places of all tokens as if all drafts were chains: in the column of their position."""
    numbers = np.array([(item.row.start, item.row.own + item.first_node, item.num_tokens) for item in rows], np.int64)
    places = np.empty((len(_Tokens._fields), sum([item.num_tokens for item in rows])), np.int64)
    place_rows(numbers, places)
    return _Tokens(*places)


def _has_tree(rows: Sequence[RowInput]) -> list[bool]:
    """Return for each row whether its draft is more than a chain."""
    drafts = [(number, item.tree.parents) for number, item in enumerate(rows) if len(item.tree.tokens)]
    if len(drafts) <= _FEW_DRAFTS:
        return [not item.tree.is_chain for item in rows]
    has_tree = [False] * len(rows)
    sizes = np.array([len(parents) for _, parents in drafts])
    starts = np.cumsum(sizes) - sizes
    parents = np.concatenate([parents for _, parents in drafts]) + np.repeat(starts, sizes)
    branches = parents != np.arange(-1, len(parents) - 1)
    for (number, _), is_tree in zip(drafts, np.logical_or.reduceat(branches, starts).tolist()):
        has_tree[number] = is_tree
    return has_tree


def _build_part(
    rows: Sequence[RowInput],
    tokens: slice,
    places: _Tokens,
    has_tree: Sequence[bool],
    rounding: Rounding | None,
) -> PaddedPart:
    """Build one part from the places of all tokens; correct the positions of tree nodes."""
    first = rows[0].row
    first_line, stride = first.start, first.stride
    firsts, query, _, positions, limits, _ = places.of(tokens)
    num_rows, width = rows[-1].row.slot - rows[0].row.slot + 1, max([item.num_tokens for item in rows])
    ends = [item.row.own + item.first_node + item.num_tokens for item in rows]
    num_columns = max(ends)
    if rounding is not None:
        width = rounding.tokens(width)
        num_columns = min(rounding.columns(num_columns), stride - (first.shared_read_len - first.prefix_len))
    is_padded = len(query) != num_rows * width
    lines = (firsts - first_line) // stride * width + query  # of the padded batch
    query_positions = tree_pairs = nodes = seen_nodes = None
    if any(has_tree):
        shape = num_rows, width, num_columns
        tree_pairs, nodes, seen_nodes = _lay_out_trees(rows, has_tree, shape, positions, limits)
        query_positions = _padded(positions, lines, num_rows, width) if is_padded else positions.reshape(-1, width)
    # Padding queries attend to column 0: a softmax over no columns is NaN.
    padded_limits = _padded(limits, lines, num_rows, width, padding=1) if is_padded else limits.reshape(-1, width)
    return PaddedPart(
        tokens=tokens,
        first_line=first_line,
        stride=stride,
        num_rows=num_rows,
        width=width,
        num_columns=num_columns,
        limits=_tensor(padded_limits),
        tree_pairs=None if tree_pairs is None else _tensor(tree_pairs),
        query_positions=None if query_positions is None else _tensor(query_positions),
        nodes=None if nodes is None else _tensor(nodes),
        gather=_tensor(_padded(np.arange(len(lines)), lines, num_rows * width)) if is_padded else None,
        scatter=_tensor(lines) if is_padded else None,
        seen_nodes=seen_nodes,
        on_host=(padded_limits, padded_limits if query_positions is None else query_positions + 1),
        sees_all=width == 1 and not is_padded and tree_pairs is None and min(ends) == num_columns,
    )


def _padded(values: np.ndarray, lines: np.ndarray, *shape: int, padding: int = 0) -> np.ndarray:
    """Return the values of tokens (`[N]`) in the padded batch."""
    batch = np.full(shape, padding, np.int64)
    batch.reshape(-1)[lines] = values
    return batch


def _lay_out_trees(
    rows: Sequence[RowInput],
    has_tree: Sequence[bool],
    shape: tuple[int, int, int],
    positions: np.ndarray,
    limits: np.ndarray,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """
    Correct the positions and limits of all tree nodes in a part of `shape` `[R, S, K]`; return `PaddedPart.tree_pairs`,
    `nodes` and `seen_nodes`.
    """
    first_slot, (_, width, num_columns) = rows[0].row.slot, shape
    ends = accumulate([item.num_tokens for item in rows])
    trees = [(item, end) for item, end, is_tree in zip(rows, ends, has_tree) if is_tree]
    sizes = np.array([len(item.tree.tokens) for item, _ in trees])
    firsts = np.array([item.first_node for item, _ in trees])
    parents = np.concatenate([item.tree.parents for item, _ in trees], dtype=np.int64, casting="same_kind")
    if len(parents) != sizes.sum():  # compiled code relies on this
        raise ValueError(f"A draft must have as many parents as tokens, got {len(parents)} and {sizes.sum()} in all.")
    # For every tree: its row, its first column, and the first of its nodes in the part and in its row, run or not.
    places = [
        (
            item.row.slot - first_slot,
            item.row.own + len(item.feed),
            end - len(item.tree.tokens),
            len(item.feed) - item.first_node,
        )
        for item, end in trees
    ]
    depths, nodes = np.empty_like(parents), np.empty((2, len(parents)), np.int64)
    num_pairs = depths_of(sizes, parents, firsts, depths)
    if num_pairs < 0:
        raise ValueError("Every parent of a draft's nodes must stand before its child.")
    pairs, seen = np.empty(num_pairs, np.int64), np.zeros((1 + -(-int(sizes.max()) // 64), len(positions)), np.int64)
    seen[0] = NO_TREE
    own = np.array(places), width, num_columns, positions, limits
    lay_out(sizes, parents, firsts, depths, *own, pairs, nodes, seen, np.empty_like(parents))
    return pairs, nodes, seen


def _tensor(array: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(array.astype(np.int64, copy=False))
