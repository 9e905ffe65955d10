"""Slots of several sizes in one range of lines."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_smartspec.target_model.cache.slabs import Slabs, slot_size
from hf_smartspec.target_model.layout.rows import CacheRow

SIZES = (64, 96, 128, 192)


def check(slabs: Slabs, capacities: dict[CacheRow, int]) -> None:
    """Every row has a slot of its size, no two overlap, and those of a slab are neighbours."""
    assert sorted(map(id, slabs.rows)) == sorted(map(id, capacities))
    places = []
    for slab in slabs.items:
        assert slab.rows, "empty slabs are free memory"
        for slot, row in enumerate(slab.rows):
            assert slabs.of(row) is slab and row.origin == slab.start
            assert (row.slot, row.stride) == (slot, capacities[row])
            places.append((row.line, row.line + row.stride))
    assert [row.line for row in slabs.rows] == sorted(row.line for row in slabs.rows)
    ends = [0, *itertools.chain(*places), slabs.num_lines]
    assert ends == sorted(ends), "slots overlap"
    assert sum(size for _, size in slabs.gaps()) == slabs.num_lines - sum(capacities.values())


@given(st.data(), st.integers(64, 3000))
def test_slots_never_overlap_and_no_free_range_is_overlooked(data, num_lines):
    slabs, capacities = Slabs(num_lines), {}
    for _ in range(data.draw(st.integers(1, 25))):
        if capacities and data.draw(st.booleans()):
            row = data.draw(st.sampled_from(slabs.rows))
            successor = slabs.successor(row)
            assert successor.stride == row.stride
            slabs.remove(row, successor)
            del capacities[row]
        else:
            row, size = CacheRow(0), data.draw(st.sampled_from(SIZES))
            longest = max(free for _, free in slabs.gaps())
            assert slabs.add(row, size) == (size <= longest)
            if size <= longest:
                capacities[row] = size
        check(slabs, capacities)


@given(st.lists(st.sampled_from(SIZES)), st.integers(0, 1000))
def test_what_fits_in_sum_fits_when_laid_out(sizes, spare):
    capacities = {CacheRow(0): size for size in sizes}
    slabs = Slabs.laid_out(capacities, sum(sizes) + spare)
    slabs.settle()
    check(slabs, capacities)
    assert len(slabs.items) == len(set(sizes))


def test_rows_of_a_size_are_neighbours_whatever_comes_in_between():
    """Each slab is a call of attention."""
    slabs = Slabs(64 * 64)
    for number in range(16):
        assert slabs.add(CacheRow(0), (64, 128)[number % 2])
    assert [slab.capacity for slab in slabs.items] == [64, 128]
    assert [len(slab.rows) for slab in slabs.items] == [8, 8]


def test_slabs_of_a_size_become_one_as_rows_go():
    """The row that moves into a gap is one of the smallest slab."""
    slabs = Slabs(640)
    rows = [CacheRow(0) for _ in range(9)]
    for row, size in zip(rows, (64, 64, 256, 64, 64, 64, 64)):
        assert slabs.add(row, size)
    assert [len(slab.rows) for slab in slabs.items] == [2, 1, 4]
    row = slabs.items[2].rows[0]
    successor = slabs.successor(row)
    assert successor in slabs.items[0].rows
    slabs.remove(row, successor)
    row = slabs.items[2].rows[1]
    slabs.remove(row, slabs.successor(row))
    assert [len(slab.rows) for slab in slabs.items] == [1, 4]


def test_slots_before_a_slab_join_it():
    slabs = Slabs(640)
    first, second, third = (CacheRow(0) for _ in range(3))
    assert slabs.add(first, 256) and slabs.add(second, 384)
    slabs.remove(first, first)
    assert slabs.add(third, 64) and slabs.items[0].start == 0
    slabs.remove(third, third)
    assert slabs.add(third, 384) is False
    slabs.remove(second, second)
    assert slabs.add(second, 512) and slabs.add(third, 128) and slabs.items[1].start == 512
    slabs.remove(second, second)
    assert slabs.add(first, 128) and first.line == 384 and third.line == 512
    assert [len(slab.rows) for slab in slabs.items] == [2] and third.slot == 1


@pytest.mark.parametrize(("num_tokens", "size"), [(1, 64), (64, 64), (65, 96), (97, 128), (1000, 1024), (1025, 1456)])
def test_sizes_of_slots(num_tokens, size):
    assert slot_size(num_tokens) == size


def test_slots_are_hardly_longer_than_needed_and_of_few_sizes():
    lengths = range(64, 10_000)
    sizes = [slot_size(length) for length in lengths]
    ratios = [size / length for size, length in zip(sizes, lengths)]
    assert sizes == sorted(sizes) and len(set(sizes)) <= 16
    assert min(ratios) >= 1 and max(ratios) <= 1.5 and sum(ratios) / len(ratios) <= 1.22
