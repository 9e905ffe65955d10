"""Rows of a slot cache that have states beside keys and values."""

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch

from ...cpu.recurrence import Key
from ..cache.slot_cache import SlotCache
from ..cache.slot_layer import zeros
from ..layout.rows import CacheRow
from .kept import KeptStates, States
from .step import RecurrentStep


class StateRows(SlotCache):
    """
    A `SlotCache` whose rows have states, too: the last inputs of causal convolutions, `[width - 1, channels]`, and the
    matrices of linear recurrences, `[heads, dk, dv]` in float32. A state is that of the row's committed tokens. It
    cannot be taken back, but states of shorter texts can be kept (`keep`, and `CacheRow.marks`): rows are cut to these,
    and other rows begin with them.

    Args:
        num_slots, capacity, most_lines (`int`): See `SlotCache`.

    Attributes:
        most_rows (`int`, *optional*): Bound on the rows that run, for which states are allocated.
        lines_per_state (`int`): Lines whose memory a kept state takes, within `most_lines`.
        memory_id (`object`): Replaced by a new object when the memory of states moves, or is freed.
    """

    most_rows: int | None = None
    lines_per_state = 0

    def __init__(self, num_slots: int = 1, capacity: int = 256, most_lines: int | None = None):
        super().__init__(num_slots, capacity, most_lines)
        self._entries: dict[CacheRow, int] = {}  # of rows that run
        self.kept = KeptStates()
        self._num_entries = num_slots
        self._hold({}, {})

    @abstractmethod
    def _settle(self, rows: Sequence[CacheRow]) -> None:
        """Bring the states of rows to the end of their committed tokens."""

    @abstractmethod
    def _close(self, row: CacheRow) -> RecurrentStep | None:
        """Take a row out of its step, if any, and return this."""

    # Rows

    def add(self, *args: Any, **kwargs: Any) -> CacheRow:
        row = super().add(*args, **kwargs)
        assert row.prefix_row is None, "a state is not shared"
        try:
            self.restore(row, 0)
        except BaseException:  # for lack of memory: no request would own the row
            self.remove(row)
            raise
        return row

    def remove(self, row: CacheRow) -> None:
        super().remove(row)
        self.rest(row)
        self.kept.cut(row)

    def rest(self, row: CacheRow) -> None:
        """End a row's run until it is restored. Of its states, only the kept ones stay."""
        self._close(row)
        self._entries.pop(row, None)

    def restore(self, row: CacheRow, length: int) -> int:
        """Take a row back to its last kept state of at most `length` tokens, or to nothing; return its length there."""
        if row in self._entries and 0 < row.length <= length:
            return row.length
        self._close(row)
        length = self.reusable(row, length)
        self.kept.cut(row, length)
        if row not in self._entries:
            taken = set(self._entries.values())
            self._entries[row] = next(entry for entry in range(len(taken) + 1) if entry not in taken)
            while len(taken) >= self._num_entries:
                self._grow()
        self._load(row, self.kept.at(row, length) or [0.0] * len(self._all()))
        return length

    def copy(self, source: CacheRow, target: CacheRow, length: int) -> None:
        """Begin a row with the first `length` tokens of another, which has kept its states there."""
        super().copy(source, target, length)
        self.kept.inherit(target, source, length)
        found = self.restore(target, length)
        assert found == length, "states are kept there"

    def release(self) -> list[torch.Tensor]:
        self._hold({}, {})
        self._entries = {}
        self.kept.clear()
        return super().release()

    def forget(self) -> None:
        super().forget()
        self._hold({}, {})
        self.kept.clear()

    # States of shorter texts

    @property
    def limit(self) -> int | None:
        if self.most_lines is None or not self.lines_per_state:
            return self.most_lines
        return self.most_lines - self.lines_per_state * len(self.kept)

    @property
    def may_keep(self) -> bool:
        """Return whether there is room for one more kept state."""
        return self.limit is None or self.num_lines + self.lines_per_state <= self.limit

    def reusable(self, row: CacheRow, length: int) -> int:
        return self.kept.last(row, length)

    def keep(self, row: CacheRow) -> None:
        """Keep a copy of a row's states, if there is room for it. No draft is under verification."""
        self._settle([row])
        self._keep(row, row.length, lambda: self._copied(row))

    def _keep(self, row: CacheRow, length: int, states: Callable[[], States]) -> None:
        if self.kept.at(row, length) is None and self.may_keep:
            with suppress(MemoryError, RuntimeError):  # less memory is free than allowed; torch raises the latter
                self.kept.add(row, length, states())

    def _copied(self, row: CacheRow) -> States:
        return [memory[self._entries[row]].clone() for memory in self._all()]

    def _load(self, row: CacheRow, states: Sequence[torch.Tensor | float]) -> None:
        for memory, own in zip(self._all(), states):
            memory[self._entries[row]] = own

    def load_states(
        self,
        layer: int,
        windows: Mapping[int, torch.Tensor | None],
        states: Mapping[int, torch.Tensor | None],
        rows: Sequence[CacheRow],
    ) -> None:
        """
        Let rows begin with the states of one of transformers' caches.

        Args:
            layer (`int`): Index of the layer.
            windows (mapping of `int` to `torch.Tensor` of shape `[R, channels, width]`), states (mapping of `int` to
                `torch.Tensor` of shape `[R, heads, dk, dv]`): Inputs of convolutions, the first of which is not read,
                and matrices of recurrences, by their numbers.
        """
        entries = [self._entries[row] for row in rows]
        for number, inputs in windows.items():
            if inputs is not None:
                last = inputs.mT[:, 1:]
                self.windows((layer, number), last, last.shape[1] + 1, last.shape[2])[entries] = last
        for number, state in states.items():
            if state is not None:
                self.states((layer, number), state.float(), *state.shape[1:])[entries] = state.float()

    # Memory, which the first inputs of layers allocate

    def _hold(self, windows: dict[Key, torch.Tensor], states: dict[Key, torch.Tensor]) -> None:
        self._windows = windows  # `[entries, width - 1, channels]`
        self._states = states  # `[entries, heads, dk, dv]`; of diagonal ones `[entries, channels, n]`
        self.memory_id = object()

    def windows(self, key: Key, like: torch.Tensor, width: int, channels: int) -> torch.Tensor:
        """Return the last inputs of a convolution, `[entries, width - 1, channels]`."""
        if key not in self._windows:
            self._windows[key] = zeros(like, self._num_entries, width - 1, channels)
        return self._windows[key]

    def states(self, key: Key, like: torch.Tensor, *shape: int) -> torch.Tensor:
        """Return the states of a recurrence, `[entries, *shape]`."""
        if key not in self._states:
            self._states[key] = zeros(like, self._num_entries, *shape)
        return self._states[key]

    def _grow(self) -> None:
        """Make room for more rows. All memory is allocated before any of it is used, so that a failure changes none."""
        num = 2 * self._num_entries
        if self.most_rows is not None:
            num = max(min(num, self.most_rows), len(self._entries))
        both = self._windows, self._states
        grown = [{key: zeros(memory, num, *memory.shape[1:]) for key, memory in memories.items()} for memories in both]
        for memories, larger in zip(both, grown):
            for key, memory in memories.items():
                larger[key][: len(memory)] = memory
        self._num_entries = num
        self._hold(*grown)

    @property
    def bytes_per_state(self) -> int:
        """Bytes of one row's states in all layers that have been run."""
        return sum(memory.element_size() * memory[0].numel() for memory in self._all())

    def _all(self) -> list[torch.Tensor]:
        return [*self._windows.values(), *self._states.values()]
