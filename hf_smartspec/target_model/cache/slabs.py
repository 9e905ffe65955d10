"""
Where the rows of a cache lie: in slabs of neighbouring slots of one size, within one range of lines. Plain arithmetic;
what lies there is moved by `slot_cache`.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from ..layout.rows import CacheRow

_LEAST, _STEP = 64, 16
_MOST_TOUCHED = 256


def slot_size(num_tokens: int, most: int | None = None) -> int:
    """
    Lines of the smallest slot for so many tokens, no more than `most`. There are two sizes to every doubling, so that
    rows of like lengths share a slab, and a slot is on average 1.2 times as long as what it is for, 1.5 times at most.
    """
    power = max(_LEAST, 1 << (num_tokens - 1).bit_length())
    smaller = -(-int(power * 0.5**0.5) // _STEP) * _STEP
    size = smaller if smaller >= _LEAST and num_tokens <= smaller else power
    return size if most is None else min(size, most)


@dataclass(eq=False)
class Slab:
    """Neighbouring slots of `capacity` lines each, from line `start` on, every one with a row."""

    start: int
    capacity: int
    rows: list[CacheRow]

    @property
    def end(self) -> int:
        return self.start + self.capacity * len(self.rows)

    def put(self, slot: int, row: CacheRow) -> None:
        """Says to a row that it lies here."""
        self.rows[slot] = row
        row.slot, row.line, row.stride = slot, self.start + slot * self.capacity, self.capacity

    def settle(self) -> None:
        """Says so to all of its rows."""
        for slot, row in enumerate(self.rows):
            self.put(slot, row)


class Slabs:
    """
    The slabs of a cache of so many lines. They do not overlap, none has an empty slot, and what lies between them is
    free.

    Attributes:
        items (list of `Slab`): In the order of their lines.
        touched (dict): Where rows have lain: the end of what has been a slab, by its start and capacity.
    """

    def __init__(self, num_lines: int):
        self.num_lines = num_lines
        self.items: list[Slab] = []
        self.touched: dict[tuple[int, int], int] = {}

    @property
    def rows(self) -> list[CacheRow]:
        return [row for slab in self.items for row in slab.rows]

    def by_size(self) -> list[list[CacheRow]]:
        """For each size of slots, the rows of all slabs of it, those of the largest slab first."""
        found: dict[int, list[CacheRow]] = {}
        for slab in sorted(self.items, key=lambda slab: -len(slab.rows)):
            found.setdefault(slab.capacity, []).extend(slab.rows)
        return list(found.values())

    def of(self, row: CacheRow) -> Slab:
        return next(slab for slab in self.items if slab.start <= row.line < slab.end)

    def gaps(self) -> Iterator[tuple[int, int]]:
        """First line and size of what is free, before the first slab and behind every one."""
        starts = [0, *[slab.end for slab in self.items]]
        ends = [*[slab.start for slab in self.items], self.num_lines]
        return ((start, end - start) for start, end in zip(starts, ends))

    def add(self, row: CacheRow, capacity: int) -> bool:
        """Finds a slot for a row, beside others of this size if it can; False if none is free."""
        sizes = [size for _, size in self.gaps()]
        alike = [number for number, slab in enumerate(self.items) if slab.capacity == capacity]
        behind = [self.items[number] for number in alike if sizes[number + 1] >= capacity]
        before = [self.items[number] for number in alike if sizes[number] >= capacity]
        if behind or not before:
            slab = max(behind, key=lambda slab: len(slab.rows), default=None) or self._new_slab(capacity)
            if slab is None:
                return False
            slab.rows.append(row)
            slab.put(len(slab.rows) - 1, row)
            self._touch(slab)
            return True
        slab = max(before, key=lambda slab: len(slab.rows))
        slab.start -= capacity
        slab.rows.insert(0, row)
        slab.settle()
        self._touch(slab)
        return True

    def _touch(self, slab: Slab) -> None:
        if len(self.touched) > _MOST_TOUCHED:
            self.touched = {(0, 1): self.num_lines}  # everything, line by line
        key = slab.start, slab.capacity
        self.touched[key] = max(self.touched.get(key, 0), slab.end)

    def _new_slab(self, capacity: int) -> Slab | None:
        """In the largest gap: at its beginning, but with as much room for the slab before it as for its own rows."""
        start, size = max(self.gaps(), key=lambda gap: gap[1])
        if size < capacity:
            return None
        shift = (size // capacity - 1) // 2 if start else 0
        slab = Slab(start + shift * capacity, capacity, [])
        self.items = sorted([*self.items, slab], key=lambda slab: slab.start)
        return slab

    def successor(self, row: CacheRow) -> CacheRow:
        """
        The row that moves where this one goes, so that no slot is empty: the last of the smallest slab of this size,
        of which there will be one less some time. The row itself, if nobody has to move.
        """
        own = self.of(row)
        smallest = min((slab for slab in self.items if slab.capacity == own.capacity), key=lambda slab: len(slab.rows))
        return (own if len(own.rows) == len(smallest.rows) else smallest).rows[-1]

    def remove(self, row: CacheRow, successor: CacheRow) -> None:
        """Gives up a row's slot; the successor gets it."""
        own, last = self.of(row), self.of(successor)
        last.rows.pop()
        if successor is not row:
            own.put(row.slot, successor)
        if not last.rows:
            self.items.remove(last)

    @classmethod
    def laid_out(cls, capacities: Mapping[CacheRow, int], num_lines: int) -> "Slabs":
        """
        Rows with slots of these sizes, one slab for every size, each with as much free behind it as any other. The rows
        do not know of it yet: see `settle`.
        """
        slabs, start = cls(num_lines), 0
        sizes = sorted(set(capacities.values()))
        share = (num_lines - sum(capacities.values())) // max(len(sizes), 1)
        for size in sizes:
            slab = Slab(start, size, [row for row, capacity in capacities.items() if capacity == size])
            slabs.items.append(slab)
            start = slab.end + share
        return slabs

    def settle(self) -> None:
        """Says to all rows where they lie now."""
        for slab in self.items:
            slab.settle()
            self._touch(slab)
