"""The slot cache against a twin that keeps every row's tokens in a Python list."""

from copy import deepcopy

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from transformers import DynamicCache, LlamaConfig

from hf_smartspec.target_model.cache.loading import load
from hf_smartspec.target_model.cache.slot_cache import SlotCache
from hf_smartspec.target_model.layout.rows import CacheRow, RowInput
from hf_smartspec.target_model.layout.shared_prefix import set_shared_reads
from hf_smartspec.target_model.layout.step_layout import build_layout

from ...covering import examples
from ...strategies import path_to, trees

HEADS, KEY_DIM, VALUE_DIM, LAYERS = 2, 3, 5, 2  # keys and values of unequal size, as in DeepSeek's attention


def lay_out(cache: SlotCache, rows: list[RowInput]) -> None:
    """Has the cache write what these rows bring."""
    cache.layout = build_layout([[row] for row in rows])


def held(memory: torch.Tensor, row: CacheRow, length: int) -> torch.Tensor:
    """The first tokens of a row, `[heads, length, head_dim]`: those of its `prefix_row`, and those in its own slot."""
    lines = [row.line + token - row.prefix_len for token in range(length)]
    if row.prefix_row is not None:
        lines[: row.prefix_len] = [row.prefix_row.line + token for token in range(min(row.prefix_len, length))]
    return memory[lines].transpose(0, 1)


def states(stamps: list[int], dim: int, layer: int) -> torch.Tensor:
    """States `[1, HEADS, N, dim]` in which every token, head and layer has a number of its own."""
    tokens = torch.tensor(stamps, dtype=torch.float64)[None, :, None]
    return (tokens + torch.arange(HEADS)[:, None, None] / 10 + layer / 100).expand(HEADS, -1, dim)[None]


class SlotCacheAgainstLists(RuleBasedStateMachine):
    """Rows come, grow by feeds and trees, commit paths, change slots and go, in any order."""

    def __init__(self):
        super().__init__()
        self.cache = SlotCache(num_slots=1, capacity=4)  # small: it grows along the way
        self.texts: dict[CacheRow, list[int]] = {}  # committed tokens' stamps
        self.trees: dict[CacheRow, tuple] = {}  # trees under verification and their nodes' stamps
        self.stamp = 0

    def _stamps(self, count: int) -> list[int]:
        self.stamp += count
        return list(range(self.stamp - count + 1, self.stamp + 1))

    def _pick(self, data, candidates) -> CacheRow:
        return data.draw(st.sampled_from(sorted(candidates, key=lambda row: row.line)), label="row")

    @rule(num_tokens=st.none() | st.integers(1, 200))
    @precondition(lambda self: len(self.texts) < 6)
    def add(self, num_tokens):
        row = self.cache.add(num_tokens)
        self.texts[row] = []
        assert row.stride >= (num_tokens or 4)

    @rule(data=st.data(), num_tokens=st.none() | st.integers(40, 200))
    @precondition(lambda self: len(self.texts) < 6 and any(self.texts.values()))
    def begin_alike(self, data, num_tokens):
        """A row that shares another's beginning, or has a copy of it, or shares some and has a copy of more."""
        base = self._pick(data, [row for row, text in self.texts.items() if text and row.prefix_row is None])
        text = self.texts[base]
        shared = data.draw(st.integers(0, len(text)), label="shared")
        alike = [row for row in self.texts if self.texts[row][:shared] == text[:shared] and self.texts[row]]
        source = self._pick(data, alike)
        length = data.draw(st.integers(shared, len(self.texts[source])), label="length")
        num_taken, num_tokens = self.cache.num_taken, num_tokens and max(num_tokens, length)
        row = self.cache.add(num_tokens, base, shared) if shared else self.cache.add(num_tokens)
        assert self.cache.num_taken - num_taken == row.stride >= (num_tokens or 0) - shared
        self.cache.reserve([row], [length])
        self.cache.copy(source, row, length)
        row.length, self.texts[row] = length, self.texts[source][:length]

    @rule(data=st.data())
    @precondition(lambda self: self.texts)
    def remove(self, data):
        """Rows that nobody shares; there is one, since bases have none themselves."""
        row = self._pick(data, [row for row in self.texts if all(other.prefix_row is not row for other in self.texts)])
        self.cache.remove(row)
        del self.texts[row]
        self.trees.pop(row, None)

    @rule(data=st.data())
    @precondition(lambda self: len(self.texts) > 1)
    def swap(self, data):
        row = self._pick(data, self.texts)
        self.cache.swap(row, self._pick(data, [other for other in self.texts if other.stride == row.stride]))

    @rule(data=st.data())
    @precondition(lambda self: self.texts)
    def compact(self, data):
        """Those that run next come first in their slabs."""
        running = data.draw(st.sets(st.sampled_from(sorted(self.texts, key=lambda row: row.line)), min_size=1))
        self.cache.compact(list(running))
        for slab in self.cache.slabs.items:
            is_running = [row in running for row in slab.rows]
            assert is_running == sorted(is_running, reverse=True)
        for size in {slab.capacity for slab in self.cache.slabs.items}:
            slabs = [slab.rows for slab in self.cache.slabs.items if slab.capacity == size]
            partly = [rows for rows in slabs if 0 < sum(row in running for row in rows) < len(rows)]
            assert len(partly) <= 1, "no slab begins to be used before another one is"

    @rule(data=st.data())
    @precondition(lambda self: set(self.texts) - set(self.trees))
    def step(self, data):
        """A packed forward of some of the rows that have no tree under verification."""
        idle = sorted(set(self.texts) - set(self.trees), key=lambda row: row.line)
        chosen = data.draw(st.lists(st.sampled_from(idle), min_size=1, unique=True), label="rows")
        inputs = []
        for row in sorted(chosen, key=lambda row: row.line):
            feed, tree = self._stamps(data.draw(st.integers(1, 4), label="feed")), data.draw(trees(max_size=5))
            nodes = self._stamps(len(tree))
            inputs.append(RowInput(row, np.array(feed), tree))
            self.texts[row] += feed
            self.trees[row] = (tree, nodes)
        self.cache.reserve(chosen, [row.length + 4 + 5 for row in chosen])
        set_shared_reads(chosen)
        inputs.sort(key=lambda item: item.row.line)
        stamps = [stamp for item in inputs for stamp in self._brought(item)]
        lay_out(self.cache, inputs)
        for layer in range(LAYERS):
            views = self.cache.update(states(stamps, KEY_DIM, layer), states(stamps, VALUE_DIM, layer), layer)
            for view, dim in zip(views, (KEY_DIM, VALUE_DIM)):
                for item in inputs:
                    expected = self.texts[item.row] + self.trees[item.row][1]
                    seen = held(view[0].transpose(0, 1), item.row, len(expected))
                    assert torch.equal(seen, states(expected, dim, layer)[0])
        for item in inputs:  # as the packed forward does afterwards
            item.row.length += len(item.feed)
            item.row.num_nodes = len(item.tree)

    def _brought(self, item: RowInput) -> list[int]:
        return self.texts[item.row][item.row.length :] + self.trees[item.row][1]

    @rule(data=st.data())
    @precondition(lambda self: self.trees)
    def commit(self, data):
        waiting = sorted(self.trees, key=lambda row: row.line)
        rows = data.draw(st.lists(st.sampled_from(waiting), min_size=1, unique=True), label="rows")
        paths = []
        for row in rows:
            tree, nodes = self.trees.pop(row)
            end = data.draw(st.integers(-1, len(tree) - 1), label="end of the path")
            paths.append(path_to(tree, end))
            self.texts[row] += [nodes[node] for node in paths[-1]]
        self.cache.commit(rows, paths)

    @rule(data=st.data(), num_tokens=st.integers(1, 40))
    @precondition(lambda self: self.texts)
    def reserve(self, data, num_tokens):
        row = self._pick(data, self.texts)
        before = row.stride
        self.cache.reserve([row], [num_tokens])
        num_own = num_tokens - row.prefix_len
        assert row.stride >= num_own and (row.stride == before or num_own > before)

    @rule(data=st.data(), more=st.integers(0, 40))
    @precondition(lambda self: self.texts)
    def resize(self, data, more):
        row = self._pick(data, self.texts)
        self.cache.resize(row, max(row.length - row.prefix_len + row.num_nodes, 1) + more)

    @rule(num_lines=st.integers(0, 200))
    @precondition(lambda self: self.texts)
    def shrink(self, num_lines):
        before = self.cache.num_lines
        self.cache.shrink(num_lines)
        assert self.cache.num_lines == min(before, max(num_lines, self.cache.num_taken))

    @invariant()
    def rows_hold_their_texts(self):
        assert set(self.cache.rows) == set(self.texts)
        for row, text in self.texts.items():
            assert row.length == len(text)
            expected = text + (self.trees[row][1] if row in self.trees else [])
            assert len(expected) - row.prefix_len <= row.stride
            assert row.num_sharers == sum(other.prefix_row is row for other in self.texts)
            for index, layer in enumerate(self.cache.layers):
                assert layer.addresses == tuple(memory.data_ptr() for memory in layer.memories)
                for memory, dim in ((layer.keys, KEY_DIM), (layer.values, VALUE_DIM)):
                    assert len(memory) == self.cache.num_lines
                    assert torch.equal(held(memory, row, len(expected)), states(expected, dim, index)[0])

    def teardown(self):
        """Whatever has happened, nothing is left for others to find."""
        memories = self.cache.release()
        assert not any(memory.any() for memory in memories) and not self.cache.rows and not self.cache.layers


SlotCacheAgainstLists.TestCase.settings = settings(max_examples=examples(40), stateful_step_count=25, deadline=None)
test_rows_hold_their_texts_whatever_happens_to_the_others = SlotCacheAgainstLists.TestCase


def filled(lengths: list[int], capacity: int = 8) -> tuple[SlotCache, list[CacheRow]]:
    """A cache of rows of the given lengths; token k of row i carries the stamp 100 * (i + 1) + k."""
    cache = SlotCache(len(lengths), capacity)
    rows = [cache.add() for _ in lengths]
    cache.reserve(rows, lengths)
    lay_out(cache, [RowInput(row, np.arange(n)) for row, n in zip(rows, lengths)])
    stamps = [100 * (i + 1) + k for i, n in enumerate(lengths) for k in range(n)]
    for layer in range(LAYERS):
        cache.update(states(stamps, KEY_DIM, layer), states(stamps, VALUE_DIM, layer), layer)
    for row, length in zip(rows, lengths):
        row.length = length
    return cache, rows


def test_a_row_that_outgrows_its_slot_moves_alone():
    cache, rows = filled([30, 7, 20], capacity=100)
    layer = cache.layers[0]
    address = layer.keys.data_ptr()
    cache.remove(rows.pop())
    cache.reserve(rows, [30, 96])
    assert [row.stride for row in rows] == [100, 100]
    copied = []
    copy = cache._copy_lines
    cache._copy_lines = lambda *args: copied.append(args[2]) or copy(*args)
    first = rows[0].line
    cache.resize(rows[1], 64)
    assert copied == [7] and rows[0].line == first
    assert layer.keys.data_ptr() == address
    assert torch.equal(held(layer.keys, rows[1], 7), states(list(range(200, 207)), KEY_DIM, 0)[0])


def test_copies_move_their_own_lines():
    cache, _ = filled([5])
    other = deepcopy(cache)
    before, after = cache.layers[0].keys.clone(), cache.layers[0].keys.clone()
    (row,) = other.rows
    row.length = 3
    after[row.line + 3] = before[row.line + 4]
    other.commit([row], [[1]])
    assert torch.equal(cache.layers[0].keys, before) and torch.equal(other.layers[0].keys, after)


def test_memory_grows_by_half_at_least():
    """Copies of everything stay rare."""
    cache, sizes = SlotCache(num_slots=1, capacity=64), []
    for _ in range(100):
        cache.add(64)
        sizes.append(cache.num_lines)
    assert sizes[-1] <= 1.5 * 6400 and len(set(sizes)) <= 14


def test_memory_that_cannot_be_had_leaves_rows_where_they_are(monkeypatch):
    cache, rows = filled([3, 5])
    places = [(row.line, row.stride) for row in rows]
    zeros, num_left = torch.zeros, [LAYERS + 1]

    def failing(*args, **kwargs):
        num_left[0] -= 1
        if not num_left[0]:
            raise torch.OutOfMemoryError
        return zeros(*args, **kwargs)

    monkeypatch.setattr(torch, "zeros", failing)
    with pytest.raises(torch.OutOfMemoryError):
        cache.reserve(rows, [4, 100])
    num_left[0] = 1
    with pytest.raises(torch.OutOfMemoryError):
        cache.add(1000)
    monkeypatch.undo()
    assert cache.rows == rows and [(row.line, row.stride) for row in rows] == places
    for number, row in enumerate(rows):
        for index, layer in enumerate(cache.layers):
            stamps = [100 * (number + 1) + k for k in range(row.length)]
            assert torch.equal(held(layer.values, row, row.length), states(stamps, VALUE_DIM, index)[0])


def test_memory_that_may_not_grow_is_laid_out_afresh():
    """Whatever lengths came and went before, slots fit as long as the sum of them does."""
    cache = SlotCache(1, 64, most_lines=64 * 10)
    rows = [cache.add(64) for _ in range(10)]
    with pytest.raises(MemoryError):
        cache.add(1)
    for row in rows[::2]:
        cache.remove(row)
    with pytest.raises(MemoryError):
        cache.add(321)
    assert cache.add(256).stride == 256 and cache.add(1).stride == 64
    assert cache.num_lines == 64 * 10 == cache.num_taken


def test_rows_of_a_cache_that_is_bound_have_no_longer_slots_than_there_are_lines():
    cache = SlotCache(1, 64, most_lines=300)
    assert cache.add(257).stride == 300 and cache.num_lines == 300


def test_a_row_that_grows_has_no_longer_slot_than_there_are_lines():
    cache = SlotCache(1, 64, most_lines=100)
    row = cache.add(20)
    cache.reserve([row], [97])
    assert row.stride == cache.num_lines == 100


def test_memory_that_was_lent_and_is_too_small_is_not_held():
    cache, _ = filled([30, 7], capacity=64)
    other = SlotCache(1, 64)
    other.borrow(cache.release())
    assert other._spare
    row = other.add()
    other.reserve([row], [400])
    assert not other._spare


def test_memory_that_is_borrowed_is_used_if_it_is_enough():
    cache, _ = filled([30, 7, 20], capacity=100)
    memories = cache.release()
    assert len(memories) == 2 * LAYERS and len(memories[0]) == 300
    for num_slots, capacity, is_enough in ((2, 50, True), (3, 100, True), (4, 100, False)):
        other = SlotCache(num_slots, capacity)
        other.borrow(memories)
        rows = [other.add() for _ in range(num_slots)]
        lay_out(other, [RowInput(row, np.arange(5)) for row in rows])
        for layer in range(LAYERS):
            stamps = list(range(5 * num_slots))
            other.update(states(stamps, KEY_DIM, layer), states(stamps, VALUE_DIM, layer), layer)
        used = [memory.data_ptr() for layer in other.layers for memory in layer.memories]
        assert (used == [memory.data_ptr() for memory in memories]) == is_enough
        assert other.num_lines == (300 if is_enough else 400)
        for row in rows:
            row.length = 5
        other.reserve(rows, [5] * num_slots)
        assert all(not memory.any() for memory in other.release())


def test_memory_behind_a_row_is_never_nan():
    """Masked columns are multiplied by zero, and zero times NaN is NaN."""
    cache, rows = filled([3, 5])
    cache.reserve(rows, [50, 50])
    cache.add()
    assert all(torch.isfinite(memory).all() for layer in cache.layers for memory in (layer.keys, layer.values))


def test_export_puts_tokens_where_the_padded_batch_has_them():
    cache, rows = filled([2, 4])
    config = LlamaConfig(num_hidden_layers=LAYERS)
    columns = [torch.tensor([2, 3, 4]), torch.tensor([0, 1, 2, 3, 4])]  # two columns of padding before the first row
    exported = cache.export(rows, columns, 5, DynamicCache(config=config))
    assert exported.get_seq_length() == 5
    for index, layer in enumerate(exported.layers):
        assert torch.equal(layer.keys[0, :, 2:4], states([100, 101], KEY_DIM, index)[0])
        assert torch.equal(layer.values[1, :, :4], states([200, 201, 202, 203], VALUE_DIM, index)[0])
        assert (layer.keys[0, :, :2] == 0).all() and (layer.keys[1, :, 4] == 0).all()


def test_export_cuts_rows_that_are_longer_than_the_batch():
    cache, rows = filled([4])
    exported = cache.export(rows, [torch.arange(3)], 3, DynamicCache())
    assert torch.equal(exported.layers[0].keys[0], states([100, 101, 102], KEY_DIM, 0)[0])


@pytest.mark.parametrize("window", [None, 3])
def test_load_takes_what_export_gave(window):
    """With a window, transformers' cache holds the end of the text only; the rest is never looked at again."""
    cache, rows = filled([2, 4])
    windowed = {} if window is None else {"sliding_window": window, "layer_types": ["sliding_attention"] * LAYERS}
    config = LlamaConfig(num_hidden_layers=LAYERS, **windowed)
    masks = [torch.tensor([False, False, True, True]), torch.tensor([True] * 4)]
    columns = [mask.nonzero().squeeze(1) for mask in masks]
    exported = cache.export(rows, columns, 4, DynamicCache(config=config))
    assert exported.layers[0].keys.shape[2] == (4 if window is None else window - 1)

    loaded = SlotCache(num_slots=2, capacity=1)
    copies = [loaded.add(), loaded.add()]
    load(exported, loaded, copies, masks)
    assert [row.length for row in copies] == [2, 4]
    for layer, original in zip(loaded.layers, cache.layers):
        for row, copy in zip(rows, copies):
            seen = slice(max(0, row.length - (window or 99) + 1), row.length)
            for memory, other in zip(layer.memories, original.memories):
                expected = held(other, row, row.length)[:, seen]
                assert torch.equal(held(memory, copy, row.length)[:, seen], expected)
