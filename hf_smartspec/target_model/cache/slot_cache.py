"""The slot cache: static key/value memory for rows of different lengths, one slot per running request."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from transformers.cache_utils import Cache

from ...device import to_device
from ..layout.kernels.lines import move_lines
from ..layout.rows import CacheRow
from ..layout.shared_prefix import pieces_of
from ..layout.step_layout import StepLayout
from .slabs import Slabs, slot_size
from .slot_layer import SlotLayer, zeros


class SlotCache(Cache):
    """
    A cache of ragged rows. Each row has its own slot, as long as it needs, in one range of lines; rows with slots of
    one size are neighbours (`slabs`), so that attention reads them as one view of memory. A row that outgrows its slot
    moves alone. Only when no free range is long enough, all rows are laid out afresh: within the present memory, as
    long as they take up little of it or it may not grow, else in larger memory. A row may begin in another row's slot.

    Args:
        num_slots, capacity (`int`): Initial size, as a number of slots of `capacity` lines, which is also the slot size
            of rows of unknown length.
        most_lines (`int`, *optional*): Limit on the lines of all slots when rows are added. Memory does not outgrow it
            unless added rows do.
    """

    layers: list[SlotLayer]  # type: ignore[assignment]

    def __init__(self, num_slots: int = 1, capacity: int = 256, most_lines: int | None = None):
        super().__init__(layers=[])
        self.capacity, self.most_lines = capacity, most_lines
        self.slabs = Slabs(num_slots * capacity)
        self._spare: list[torch.Tensor] = []  # memory that layers may take, as long as its number of lines fits
        self._most_columns = 0  # the most that a row has had
        self.layout: StepLayout | None = None
        self.has_new_rows = True  # since the last forward
        self.num_moves = 0  # how often some layer got other memory, a new one too

    @property
    def rows(self) -> list[CacheRow]:
        """All rows, in the order of their lines."""
        return self.slabs.rows

    @property
    def num_lines(self) -> int:
        """Number of tokens whose keys and values fit into memory."""
        return self.slabs.num_lines

    @property
    def limit(self) -> int | None:
        """The lines that there may be at present: `most_lines`, less what else takes their memory."""
        return self.most_lines

    @property
    def num_taken(self) -> int:
        """Number of lines in all slots."""
        return sum(row.stride for row in self.rows)

    @property
    def bytes_per_line(self) -> int:
        """Bytes of one token's keys and values in all layers that have been written."""
        return sum(memory.element_size() * memory[0].numel() for memory in self._memories())

    @property
    def bytes_per_row(self) -> int:
        """Bytes of a row that runs, beside its keys and values."""
        return 0

    @property
    def num_state_bytes(self) -> int:
        """Bytes of memory beside keys and values."""
        return 0

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return self.layer(layer_idx).update(key_states, value_states)

    def layer(self, index: int) -> SlotLayer:
        """Return a layer's memory, which its first states allocate."""
        while len(self.layers) <= index:
            self.layers.append(SlotLayer(self))
        return self.layers[index]

    def places(self) -> list[tuple[int, torch.Size]]:
        """Return addresses and shapes of all memory of layers."""
        return [(memory.data_ptr(), memory.shape) for memory in self._memories()]

    # Memory of earlier and later calls

    def borrow(self, memories: list[torch.Tensor]) -> bool:
        """
        Take memories of zeros, `[lines, heads, head_dim]`, all of equally many lines, if these are enough; return
        whether they are.
        """
        is_enough = len(memories[0]) >= self.num_lines
        if is_enough:
            self._spare, self.slabs.num_lines = list(memories), len(memories[0])
        return is_enough

    def memory(self, like: torch.Tensor, *shape: int) -> torch.Tensor:
        """Return zeros `[lines, *shape]` in the dtype and on the device of `like`."""
        wanted = (self.num_lines, *shape), like.dtype, like.device
        for number, memory in enumerate(self._spare):
            if (memory.shape, memory.dtype, memory.device) == wanted:
                return self._spare.pop(number)
        return zeros(like, self.num_lines, *shape)

    def release(self) -> list[torch.Tensor]:
        """Empty the cache, and return its memory, zeroed where rows have lain, for a later `borrow`."""
        memories = self._memories()
        for memory in memories:
            for (start, capacity), end in self.slabs.touched.items():
                slots = memory[start:end].unflatten(0, (-1, capacity))
                slots[:, : self._most_columns].zero_()
        self.slabs, self._spare = Slabs(self.num_lines), []
        self.layers.clear()
        return memories

    def forget(self) -> None:
        """Delete all memory; forwards allocate it anew."""
        self.layers.clear()

    # Rows

    def add(self, num_tokens: int | None = None, prefix_row: CacheRow | None = None, prefix_len: int = 0) -> CacheRow:
        """
        Add a row, with a slot for `num_tokens`, if that number is known.

        Args:
            prefix_row (`CacheRow`, *optional*), prefix_len (`int`): A row whose first `prefix_len` tokens are also the
                new row's. They stay where they are, and the slot is for the tokens after them. A row that shares
                another's prefix cannot be a `prefix_row` itself.

        Raises:
            MemoryError: if the row does not fit beside the others within `most_lines`.
        """
        self.has_new_rows = True
        capacity = self.capacity if num_tokens is None else self.slot_size(num_tokens - prefix_len)
        if not self.has_room(capacity):
            raise MemoryError(f"{capacity} further lines do not fit beside {self.num_taken} within {self.limit}.")
        if prefix_row is not None:
            assert prefix_row.prefix_row is None and prefix_len <= prefix_row.length, "the row holds the whole prefix"
        row = CacheRow(0, prefix_len, line=0, stride=capacity, prefix_row=prefix_row, prefix_len=prefix_len)
        row.shared_read_len = prefix_len
        if not self.slabs.add(row, capacity):
            self._lay_out({row: capacity})
        if prefix_row is not None:
            prefix_row.num_sharers += 1
        return row

    def slot_size(self, num_tokens: int) -> int:
        """Return the lines of the slot that a row of `num_tokens` gets."""
        return slot_size(num_tokens, self.most_lines)

    def has_room(self, capacity: int) -> bool:
        """Return whether a slot of this size fits beside the others within `limit`."""
        return self.limit is None or self.num_taken + capacity <= self.limit

    def has_gap(self, capacity: int) -> bool:
        """Return whether a slot of this size is free without moving a row."""
        return any(size >= capacity for _, size in self.slabs.gaps())

    @property
    def may_grow(self) -> bool:
        """Return whether memory may grow."""
        return self.limit is None or self.num_lines < self.limit

    def remove(self, row: CacheRow) -> None:
        """Remove a row that no other row shares; another row of its size takes its slot."""
        assert not row.num_sharers, "others begin in its slot"
        self._leave(row)
        if row.prefix_row is not None:
            row.prefix_row.num_sharers -= 1

    def _leave(self, row: CacheRow) -> None:
        """Free the row's slot."""
        successor = self.slabs.successor(row)
        if successor is not row:
            self._copy_lines(successor.line, row.line, successor.num_held)
        self.slabs.remove(row, successor)

    def swap(self, row: CacheRow, other: CacheRow) -> None:
        """Exchange two rows' slots, which are equally long, with their contents."""
        assert row.stride == other.stride, "slots of one size"
        length = max(row.num_held, other.num_held)
        for memory in self._memories():
            first, second = memory[row.line : row.line + length], memory[other.line : other.line + length]
            saved = first.clone()
            first.copy_(second)
            second.copy_(saved)
        own, others = (self.slabs.of(row), row.slot), (self.slabs.of(other), other.slot)
        own[0].put(own[1], other)
        others[0].put(others[1], row)

    def compact(self, rows: Sequence[CacheRow]) -> None:
        """Move the given rows, which run next, into the first slots of as few slabs as there are sizes."""
        wanted = set(rows)
        for slots in self.slabs.by_size():
            num_running = sum(row in wanted for row in slots)
            others = [row for row in slots[:num_running] if row not in wanted]
            for row in slots[num_running:]:
                if row in wanted:
                    self.swap(row, others.pop())

    def reserve(self, rows: Sequence[CacheRow], num_tokens: Sequence[int]) -> None:
        """Make room for rows of `num_tokens` each; rows whose slots are too short move."""
        needs = [num - row.prefix_len for row, num in zip(rows, num_tokens)]
        self._most_columns = max([self._most_columns, *needs])
        outgrown = [(row, need) for row, need in zip(rows, needs) if need > row.stride]
        if outgrown:
            self._enlarge({row: max(need, self.slot_size(need)) for row, need in outgrown})

    def resize(self, row: CacheRow, capacity: int) -> None:
        """Give a row a slot of another size."""
        if row.stride != capacity:
            self._enlarge({row: capacity})

    def _enlarge(self, capacities: dict[CacheRow, int]) -> None:
        while capacities:
            row, capacity = next(iter(capacities.items()))
            place = CacheRow(0, line=0, stride=capacity)
            if not self.slabs.add(place, capacity):
                return self._lay_out(capacities)
            self._copy_lines(row.line, place.line, row.num_held)
            self._leave(row)
            self.slabs.of(place).put(place.slot, row)
            del capacities[row]
        return None

    def copy(self, source: CacheRow, target: CacheRow, length: int) -> None:
        """Copy the first `length` tokens of one row to another, which has those of its `prefix_row` already."""
        for first, end, line in pieces_of(source, target.prefix_len, length):
            self._copy_lines(line, target.line + first - target.prefix_len, end - first)

    def load_states(self, layer: int, windows: Any, states: Any, rows: Sequence[CacheRow]) -> None:
        """Let rows begin with the states of a recurrent layer, in caches that have them (`StateRows`)."""
        raise NotImplementedError("These rows have keys and values only.")

    def reusable(self, row: CacheRow, length: int) -> int:
        """Return how many of a row's first `length` tokens another row can begin with."""
        return length

    def _copy_lines(self, source: int, target: int, number: int) -> None:
        if number:
            for memory in self._memories():
                memory[target : target + number] = memory[source : source + number]

    # Memory

    def _memories(self) -> list[torch.Tensor]:
        return [memory for layer in self.layers for memory in layer.memories]

    def shrink(self, num_lines: int) -> None:
        """Give memory back, down to `num_lines`, or to the lines of all slots."""
        if num_lines < self.num_lines:
            self._lay_out({}, max(num_lines, self.num_taken))

    def _lay_out(self, capacities: dict[CacheRow, int], num_lines: int | None = None) -> None:
        """Lay out all rows afresh, some with slots of other sizes, or new to the cache."""
        capacities = {row: row.stride for row in self.rows} | capacities
        slabs = Slabs.laid_out(capacities, num_lines or self._enough(sum(capacities.values())))
        moves = [
            (row.line, slab.start + slot * slab.capacity, row.num_held)
            for slab in slabs.items
            for slot, row in enumerate(slab.rows)
        ]
        if slabs.num_lines == self.num_lines:
            slabs.touched = self.slabs.touched
        else:
            self._spare = []  # too small or too large for any layer
        self._move(moves, slabs.num_lines)
        self.slabs = slabs
        slabs.settle()

    def _enough(self, num_taken: int) -> int:
        """
        Return the number of lines for slots of `num_taken` lines in all, with room to spare, so that memory is rarely
        copied.
        """
        limit = self.limit
        most = self.num_lines if limit is None else min(self.num_lines, limit)
        is_full = limit is not None and self.num_lines >= limit
        if num_taken <= (most if is_full else 3 * most // 4):
            return self.num_lines
        roomy = self.num_lines + self.num_lines // 2
        return max(num_taken, roomy if limit is None else min(roomy, limit))

    def _move(self, moves: list[tuple[int, int, int]], num_lines: int) -> None:
        """
        Move lines (first one, new place, number), all at once, within the memory or to a larger or smaller one. All
        memory is allocated first, so that a failure at the last layer leaves the first ones unchanged.
        """
        memories = self._memories()
        if not memories:
            return
        is_new = num_lines != self.num_lines
        moves = [move for move in moves if is_new or move[0] != move[1]]
        others = [zeros(memory, num_lines, *memory.shape[1:]) for memory in memories] if is_new else memories
        if moves:
            first, place, count = np.array(moves).T
            within = np.concatenate([np.arange(number) for number in count])
            lines = np.repeat(first, count) + within, np.repeat(place, count) + within
            sources, targets = to_device(np.stack(lines), memories[0].device)
            kinds = {_kind(memory): memory for memory in memories}
            saved = {kind: memory.new_empty(len(within), *memory.shape[1:]) for kind, memory in kinds.items()}
            for memory, other in zip(memories, others):
                torch.index_select(memory, 0, sources, out=saved[_kind(memory)])
                other.index_copy_(0, targets, saved[_kind(memory)])
        if is_new:
            new = iter(others)
            for layer in self.layers:
                layer.hold(*[next(new) for _ in layer.memories])

    # Contents of rows

    def commit(self, rows: Sequence[CacheRow], paths: Sequence[Sequence[int]]) -> None:
        """
        Keep an accepted path of each row's tree in place: node `paths[i][k]` moves to the k-th column after the
        committed tokens, and the row grows by the length of its path.
        """
        sources, targets = [], []
        for row, path in zip(rows, paths):
            end = row.line + row.length - row.prefix_len
            for target, node in enumerate(path):
                if node != target:
                    sources.append(end + node)
                    targets.append(end + target)
            row.length, row.num_nodes = row.length + len(path), 0
        if not sources:
            return
        memories = self._memories()
        if not memories:
            return
        moves = np.array([sources, targets])
        if memories[0].is_cpu:
            addresses = np.array([address for layer in self.layers for address in layer.addresses])
            move_lines(addresses, np.array([size for layer in self.layers for size in layer.line_bytes]), moves)
        else:
            index = to_device(moves, memories[0].device)
            for memory in memories:
                memory.index_copy_(0, index[1], memory.index_select(0, index[0]))

    def export(
        self, rows: Sequence[CacheRow], columns: Sequence[torch.Tensor], total_length: int, cache: Cache
    ) -> Cache:
        """
        Write the committed keys and values to one of transformers' own caches, which must be empty, as `len(rows)`
        padded rows of `total_length` tokens: token k of row i goes to column `columns[i][k]`, as in the padded batch of
        `generate` without speculation.
        """
        for index, layer in enumerate(self.layers):
            if not layer.is_initialized:
                continue
            states = []
            for memory in layer.memories:
                padded = memory.new_zeros(len(rows), memory.shape[1], total_length, memory.shape[2])
                for number, (row, targets) in enumerate(zip(rows, columns)):
                    length = min(row.length, len(targets))
                    for first, end, line in pieces_of(row, 0, length):
                        padded[number, :, targets[first:end]] = memory[line : line + end - first].transpose(0, 1)
                states.append(padded)
            cache.update(states[0], states[1], index)
            if layer.has_index:
                self._export_index(states[2][:, 0], columns, cache, index)
        return cache

    def _export_index(self, keys: torch.Tensor, columns: Sequence[torch.Tensor], cache: Cache, index: int) -> None:
        """Write an indexer's keys `[rows, total_length, size]`, rotations included, to one of transformers' caches."""
        own: Any = cache.layers[index]
        own.update_indexer(keys[..., : self.layers[index].index_size].contiguous())
        if any(layer.has_index for layer in self.layers[:index]):
            return  # the first layer has the positions of all
        positions = torch.zeros(keys.shape[:2], dtype=torch.long, device=keys.device)
        for number, targets in enumerate(columns):
            positions[number, targets] = torch.arange(len(targets), device=keys.device)
        own.indexer_position_ids = positions.expand(3, -1, -1)


def _kind(memory: torch.Tensor) -> tuple[torch.Size, torch.dtype]:
    """Return the shape and dtype of a line; memories in which they agree can share one buffer."""
    return memory.shape[1:], memory.dtype
