"""
Places of a cache's rows: slabs of neighbouring slots of one size, within one range of lines. Plain arithmetic;
`slot_cache` moves the contents.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from ..layout.rows import CacheRow

_LEAST, _STEP = 64, 16  # lines
_MOST_TOUCHED = 256  # entries


def slot_size(num_tokens: int, most: int | None = None) -> int:
    """
    Return the lines of the smallest slot for `num_tokens`, at most `most`. There are two sizes to every doubling, so
    that rows of similar lengths share a slab; a slot is on average 1.2 times as long as needed, 1.5 times at most.
    """
    power = max(_LEAST, 1 << (num_tokens - 1).bit_length())
    smaller = -(-int(power * 0.5**0.5) // _STEP) * _STEP
    size = smaller if smaller >= _LEAST and num_tokens <= smaller else power
    return size if most is None else min(size, most)


@dataclass(eq=False)
class Slab:
    """Neighbouring slots of `capacity` lines each, from line `start` on, each with a row."""

    start: int
    capacity: int
    rows: list[CacheRow]

    @property
    def end(self) -> int:
        return self.start + self.capacity * len(self.rows)

    def put(self, slot: int, row: CacheRow) -> None:
        """Put a row into a slot, and set its place."""
        self.rows[slot] = row
        row.slot, row.line, row.stride = slot, self.start + slot * self.capacity, self.capacity

    def settle(self) -> None:
        """Set the places of all rows."""
        for slot, row in enumerate(self.rows):
            self.put(slot, row)


class Slabs:
    """
    Slabs of a cache of `num_lines` lines. They do not overlap, none has an empty slot, and the lines between them are
    free.

    Attributes:
        items (list of `Slab`): Slabs in the order of their lines.
        touched (dict): Where rows have lain: the largest end of a slab, by its start and capacity.
    """

    def __init__(self, num_lines: int):
        self.num_lines = num_lines
        self.items: list[Slab] = []
        self.touched: dict[tuple[int, int], int] = {}

    @property
    def rows(self) -> list[CacheRow]:
        return [row for slab in self.items for row in slab.rows]

    def by_size(self) -> list[list[CacheRow]]:
        """Return the rows of each size of slots, those of its largest slab first."""
        found: dict[int, list[CacheRow]] = {}
        for slab in sorted(self.items, key=lambda slab: -len(slab.rows)):
            found.setdefault(slab.capacity, []).extend(slab.rows)
        return list(found.values())

    def of(self, row: CacheRow) -> Slab:
        return next(slab for slab in self.items if slab.start <= row.line < slab.end)

    def gaps(self) -> Iterator[tuple[int, int]]:
        """Return first line and size of every free range: before the first slab, and after each slab."""
        starts = [0, *[slab.end for slab in self.items]]
        ends = [*[slab.start for slab in self.items], self.num_lines]
        return ((start, end - start) for start, end in zip(starts, ends))

    def add(self, row: CacheRow, capacity: int) -> bool:
        """Find a slot for a row, beside others of this size if possible; return False if none is free."""
        sizes = [size for _, size in self.gaps()]
        alike = [number for number, slab in enumerate(self.items) if slab.capacity == capacity]
        after = [self.items[number] for number in alike if sizes[number + 1] >= capacity]
        before = [self.items[number] for number in alike if sizes[number] >= capacity]
        if after or not before:
            slab = max(after, key=lambda slab: len(slab.rows), default=None) or self._new_slab(capacity)
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
            self.touched = {(0, 1): self.num_lines}  # all lines, in slots of one
        key = slab.start, slab.capacity
        self.touched[key] = max(self.touched.get(key, 0), slab.end)

    def _new_slab(self, capacity: int) -> Slab | None:
        """
        Begin a slab in the largest gap: at its start, but with as much room for the slab before it as for the new one.
        """
        start, size = max(self.gaps(), key=lambda gap: gap[1])
        if size < capacity:
            return None
        shift = (size // capacity - 1) // 2 if start else 0
        slab = Slab(start + shift * capacity, capacity, [])
        self.items = sorted([*self.items, slab], key=lambda slab: slab.start)
        return slab

    def successor(self, row: CacheRow) -> CacheRow:
        """
        Return the row that takes this one's slot, so that no slot is empty: the last of the smallest slab of this size,
        so that slabs become fewer in time. It may be the row itself.
        """
        own = self.of(row)
        smallest = min((slab for slab in self.items if slab.capacity == own.capacity), key=lambda slab: len(slab.rows))
        return (own if len(own.rows) == len(smallest.rows) else smallest).rows[-1]

    def remove(self, row: CacheRow, successor: CacheRow) -> None:
        """Free a row's slot, which the successor takes."""
        own, last = self.of(row), self.of(successor)
        last.rows.pop()
        if successor is not row:
            own.put(row.slot, successor)
        if not last.rows:
            self.items.remove(last)

    @classmethod
    def laid_out(cls, capacities: Mapping[CacheRow, int], num_lines: int) -> "Slabs":
        """
        Lay out rows with slots of these sizes, one slab for every size, each with equally many free lines after it. The
        rows' own places change only in `settle`.
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
        """Set the places of all rows."""
        for slab in self.items:
            slab.settle()
            self._touch(slab)
