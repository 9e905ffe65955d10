"""The slot cache: static key/value memory for rows of different lengths, one slot per running request."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache, DynamicLayer

from ..device import to_device
from .layout import CacheRow, StepLayout


class SlotLayer(CacheLayerMixin):
    """
    Keys and values of one layer, stored as `[slots, capacity, heads, head_dim]`.

    Token-major storage makes one token's heads contiguous, so that scattering a packed step and committing an accepted
    path are copies of whole lines; attention reads the transposed view.
    """

    is_sliding = False
    is_compileable = False
    keys: torch.Tensor
    values: torch.Tensor

    def __init__(self, cache: "SlotCache"):
        super().__init__()
        self.cache = cache

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.keys, self.values = self._allocate(key_states), self._allocate(value_states)
        self.is_initialized = True

    def _allocate(self, states: torch.Tensor) -> torch.Tensor:
        # Zeros, not uninitialised memory: masked columns are multiplied by 0, and 0 * NaN is NaN.
        shape = (self.cache.num_slots, self.cache.capacity, states.shape[1], states.shape[3])
        with torch.inference_mode(False):  # others write to it outside
            return torch.zeros(shape, dtype=states.dtype, device=states.device)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Writes packed states `[1, heads, N, head_dim]`; as `write` otherwise."""
        return self.write(key_states[0].transpose(0, 1), value_states[0].transpose(0, 1))

    def write(self, key_states: torch.Tensor, value_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Scatters packed states `[N, heads, head_dim]`; returns views `[rows, heads, columns, head_dim]`."""
        if not self.is_initialized:
            self.lazy_initialization(key_states[None].transpose(1, 2), value_states[None].transpose(1, 2))
        layout = self.cache.layout
        assert layout is not None, "a slot cache is written by a packed forward only"
        assert layout.lines is not None, "a layout is located before it is sent"
        views = []
        for memory, states in ((self.keys, key_states), (self.values, value_states)):
            if states.dtype != memory.dtype:
                states = states.to(memory.dtype)
            memory.flatten(0, 1).index_copy_(0, layout.lines, states)
            views.append(memory[: layout.num_rows, : layout.num_columns].transpose(1, 2))
        return views[0], views[1]

    def move(self, sources: torch.Tensor, targets: torch.Tensor) -> None:
        for memory in (self.keys, self.values):
            flat = memory.flatten(0, 1)
            flat.index_copy_(0, targets, flat.index_select(0, sources))

    def moved(self, num_slots: int, capacity: int) -> list[torch.Tensor]:
        """Keys and values of the rows in other memory."""
        memories = []
        for old in (self.keys, self.values):
            new = old.new_zeros(num_slots, capacity, *old.shape[2:])
            for row in self.cache.rows:
                length = row.length + row.num_nodes
                new[row.slot, :length] = old[row.slot, :length]
            memories.append(new)
        return memories

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.cache.capacity, 0

    def get_seq_length(self) -> int:
        return max((row.length for row in self.cache.rows), default=0)

    def get_max_length(self) -> int:
        return -1


class SlotCache(Cache):
    """
    A cache of ragged rows. Active rows always occupy the first slots, so that attention reads one slice of memory and
    a finished row costs nothing: `remove` moves the last row into the gap.

    Args:
        num_slots (`int`): Slots to begin with; the cache grows when more rows are added.
        capacity (`int`): Columns per slot to begin with; `reserve` grows them.
    """

    layers: list[SlotLayer]  # type: ignore[assignment]

    def __init__(self, num_slots: int = 1, capacity: int = 256):
        super().__init__(layers=[])
        self.num_slots, self.capacity = num_slots, capacity
        self.rows: list[CacheRow] = []
        self.layout: StepLayout | None = None

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return self.layer(layer_idx).update(key_states, value_states)

    def layer(self, index: int) -> SlotLayer:
        """A layer's memory, which its first states allocate."""
        while len(self.layers) <= index:
            self.layers.append(SlotLayer(self))
        return self.layers[index]

    def locate(self, layout: StepLayout) -> None:
        """Says where each token of a step is written, in memory that has room for them and is as large until then."""
        layout.lines = torch.from_numpy(layout.slots * self.capacity + layout.columns)

    def add(self) -> CacheRow:
        """A new empty row."""
        if len(self.rows) == self.num_slots:
            self._resize(2 * self.num_slots, self.capacity)
        row = CacheRow(slot=len(self.rows))
        self.rows.append(row)
        return row

    def remove(self, row: CacheRow) -> None:
        """Gives up a row; the row in the last slot takes its place."""
        last = self.rows[-1]
        if last is not row:
            length = last.length + last.num_nodes
            for layer in self.layers:
                for memory in (layer.keys, layer.values):
                    memory[row.slot, :length] = memory[last.slot, :length]
            self.rows[row.slot] = last
            last.slot = row.slot
        self.rows.pop()

    def swap(self, row: CacheRow, other: CacheRow) -> None:
        """Exchanges two rows' slots, content included."""
        length = max(row.length + row.num_nodes, other.length + other.num_nodes)
        for layer in self.layers:
            for memory in (layer.keys, layer.values):
                saved = memory[row.slot, :length].clone()
                memory[row.slot, :length] = memory[other.slot, :length]
                memory[other.slot, :length] = saved
        self.rows[row.slot], self.rows[other.slot] = other, row
        row.slot, other.slot = other.slot, row.slot

    def compact(self, rows: Sequence[CacheRow]) -> None:
        """Moves the given rows, which are to run next, into the first slots."""
        wanted = set(rows)
        others = [row for row in self.rows[: len(rows)] if row not in wanted]
        for row in rows:
            if row.slot >= len(rows):
                self.swap(row, others.pop())

    def reserve(self, num_columns: int) -> None:
        """Makes room for rows of `num_columns` tokens; grows by half at least, so that copies stay rare."""
        if num_columns > self.capacity:
            self._resize(self.num_slots, max(num_columns, self.capacity + self.capacity // 2))

    def copy(self, source: CacheRow, target: CacheRow, length: int) -> None:
        """Copies the first `length` tokens of one row to another."""
        for layer in self.layers:
            for memory in (layer.keys, layer.values):
                memory[target.slot, :length] = memory[source.slot, :length]

    def resize(self, num_slots: int, capacity: int) -> None:
        """Larger or smaller memory; the rows must fit."""
        lengths = [row.length + row.num_nodes for row in self.rows]
        if len(lengths) > num_slots or max(lengths, default=0) > capacity:
            raise ValueError(
                f"{len(lengths)} rows of up to {max(lengths)} tokens do not fit into {num_slots} x {capacity}."
            )
        self._resize(num_slots, capacity)

    def _resize(self, num_slots: int, capacity: int) -> None:
        # All memory first: whatever is missing for the last layer must not leave the first ones larger.
        memories = [layer.moved(num_slots, capacity) if layer.is_initialized else None for layer in self.layers]
        for layer, memory in zip(self.layers, memories):
            if memory is not None:
                layer.keys, layer.values = memory
        self.num_slots, self.capacity = num_slots, capacity

    def commit(self, rows: Sequence[CacheRow], paths: Sequence[Sequence[int]]) -> None:
        """
        Keeps an accepted path of each row's tree in place: node `paths[i][k]` moves to the k-th column behind the
        committed tokens, and the row grows by the length of its path.
        """
        sources, targets = [], []
        for row, path in zip(rows, paths):
            for target, node in enumerate(path):
                if node != target:
                    sources.append(row.slot * self.capacity + row.length + node)
                    targets.append(row.slot * self.capacity + row.length + target)
            row.length, row.num_nodes = row.length + len(path), 0
        if sources:
            device = self.layers[0].keys.device
            index = to_device(np.array([sources, targets]), device)
            for layer in self.layers:
                layer.move(index[0], index[1])

    def export(
        self, rows: Sequence[CacheRow], columns: Sequence[torch.Tensor], total_length: int, cache: Cache
    ) -> Cache:
        """
        Writes the committed keys and values to one of transformers' own caches, which must be empty, as `len(rows)`
        padded rows of `total_length` tokens: token k of row i stands in column `columns[i][k]`, as in the padded batch
        that plain decoding works on.
        """
        for index, layer in enumerate(self.layers):
            states = []
            for memory in (layer.keys, layer.values):
                padded = memory.new_zeros(len(rows), memory.shape[2], total_length, memory.shape[3])
                for line, (row, targets) in enumerate(zip(rows, columns)):
                    length = min(row.length, len(targets))
                    padded[line, :, targets[:length]] = memory[row.slot, :length].transpose(0, 1)
                states.append(padded)
            cache.update(states[0], states[1], index)
        return cache

    def load(self, cache: DynamicCache, rows: Sequence[CacheRow], columns: Sequence[torch.Tensor]) -> None:
        """
        Fills empty rows from transformers' own cache: row i takes the columns that the bool mask `columns[i]`
        (`[cached_length]`) names. Sliding-window layers bring the end of the text only, which is all they look at.
        """
        self.reserve(max(int(mask.sum()) for mask in columns))
        for source in cache.layers:
            assert isinstance(source, DynamicLayer) and source.keys is not None and source.values is not None
            layer = SlotLayer(self)
            layer.lazy_initialization(source.keys, source.values)
            self.layers.append(layer)
            for line, (row, mask) in enumerate(zip(rows, columns)):
                missing = len(mask) - source.keys.shape[2]
                positions = mask.cumsum(0)[missing:][mask[missing:]] - 1
                for memory, states in ((layer.keys, source.keys), (layer.values, source.values)):
                    memory[row.slot, positions] = states[line][:, mask[missing:]].transpose(0, 1)
        for row, mask in zip(rows, columns):
            row.length = int(mask.sum())
