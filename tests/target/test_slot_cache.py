"""The slot cache against a twin that keeps every row's tokens in a Python list."""

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from transformers import DynamicCache, LlamaConfig

from hf_smartspec.target.layout import CacheRow, RowInput, build_layout
from hf_smartspec.target.slot_cache import SlotCache

from ..strategies import path_to, trees

HEADS, KEY_DIM, VALUE_DIM, LAYERS = 2, 3, 5, 2  # keys and values of unequal size, as in DeepSeek's attention


def lay_out(cache: SlotCache, rows: list[RowInput]) -> None:
    """Has the cache write what these rows bring."""
    cache.layout = build_layout([rows])
    cache.locate(cache.layout)


def states(stamps: list[int], dim: int, layer: int) -> torch.Tensor:
    """States `[1, HEADS, N, dim]` in which every token, head and layer has a number of its own."""
    tokens = torch.tensor(stamps, dtype=torch.float64)[None, :, None]
    return (tokens + torch.arange(HEADS)[:, None, None] / 10 + layer / 100).expand(HEADS, -1, dim)[None]


class SlotCacheAgainstLists(RuleBasedStateMachine):
    """Rows come, grow by feeds and trees, commit paths, change slots and go, in any order."""

    def __init__(self):
        super().__init__()
        self.cache = SlotCache(num_slots=1, capacity=4)  # small: both dimensions grow along the way
        self.texts: dict[CacheRow, list[int]] = {}  # committed tokens' stamps
        self.trees: dict[CacheRow, tuple] = {}  # trees under verification and their nodes' stamps
        self.stamp = 0

    def _stamps(self, count: int) -> list[int]:
        self.stamp += count
        return list(range(self.stamp - count + 1, self.stamp + 1))

    def _pick(self, data, candidates) -> CacheRow:
        return data.draw(st.sampled_from(sorted(candidates, key=lambda row: row.slot)), label="row")

    @rule()
    @precondition(lambda self: len(self.texts) < 6)
    def add(self):
        self.texts[self.cache.add()] = []

    @rule(data=st.data())
    @precondition(lambda self: self.texts)
    def remove(self, data):
        row = self._pick(data, self.texts)
        self.cache.remove(row)
        del self.texts[row]
        self.trees.pop(row, None)

    @rule(data=st.data())
    @precondition(lambda self: len(self.texts) > 1)
    def swap(self, data):
        self.cache.swap(self._pick(data, self.texts), self._pick(data, self.texts))

    @rule(data=st.data())
    @precondition(lambda self: set(self.texts) - set(self.trees))
    def step(self, data):
        """A packed forward of some of the rows that have no tree under verification."""
        idle = sorted(set(self.texts) - set(self.trees), key=lambda row: row.slot)
        chosen = data.draw(st.lists(st.sampled_from(idle), min_size=1, unique=True), label="rows")
        inputs, stamps = [], []
        for row in sorted(chosen, key=lambda row: row.slot):
            feed, tree = self._stamps(data.draw(st.integers(1, 4), label="feed")), data.draw(trees(max_size=5))
            nodes = self._stamps(len(tree))
            inputs.append(RowInput(row, np.array(feed), tree))
            stamps += feed + nodes
            self.texts[row] += feed
            self.trees[row] = (tree, nodes)
        self.cache.reserve(max(item.row.length + item.num_tokens for item in inputs))
        lay_out(self.cache, inputs)
        for layer in range(LAYERS):
            views = self.cache.update(states(stamps, KEY_DIM, layer), states(stamps, VALUE_DIM, layer), layer)
            for view, dim in zip(views, (KEY_DIM, VALUE_DIM)):
                for item in inputs:
                    expected = self.texts[item.row] + self.trees[item.row][1]
                    seen = view[item.row.slot, :, : len(expected)]
                    assert torch.equal(seen, states(expected, dim, layer)[0])
        for item in inputs:  # as the packed forward does afterwards
            item.row.length += len(item.feed)
            item.row.num_nodes = len(item.tree)

    @rule(data=st.data())
    @precondition(lambda self: self.trees)
    def commit(self, data):
        waiting = sorted(self.trees, key=lambda row: row.slot)
        rows = data.draw(st.lists(st.sampled_from(waiting), min_size=1, unique=True), label="rows")
        paths = []
        for row in rows:
            tree, nodes = self.trees.pop(row)
            end = data.draw(st.integers(-1, len(tree) - 1), label="end of the path")
            paths.append(path_to(tree, end))
            self.texts[row] += [nodes[node] for node in paths[-1]]
        self.cache.commit(rows, paths)

    @rule(columns=st.integers(1, 40))
    def reserve(self, columns):
        self.cache.reserve(columns)
        assert self.cache.capacity >= columns

    @invariant()
    def rows_hold_their_texts(self):
        assert sorted(row.slot for row in self.texts) == list(range(len(self.texts))), "active rows come first"
        assert [self.cache.rows[row.slot] for row in self.texts] == list(self.texts)
        for row, text in self.texts.items():
            assert row.length == len(text)
            expected = text + (self.trees[row][1] if row in self.trees else [])
            for index, layer in enumerate(self.cache.layers):
                for memory, dim in ((layer.keys, KEY_DIM), (layer.values, VALUE_DIM)):
                    lines = memory[row.slot, : len(expected)].transpose(0, 1)
                    assert torch.equal(lines, states(expected, dim, index)[0])


SlotCacheAgainstLists.TestCase.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)
test_rows_hold_their_texts_whatever_happens_to_the_others = SlotCacheAgainstLists.TestCase


def filled(lengths: list[int], capacity: int = 8) -> tuple[SlotCache, list[CacheRow]]:
    """A cache of rows of the given lengths; token k of row i carries the stamp 100 * (i + 1) + k."""
    cache = SlotCache(len(lengths), capacity)
    rows = [cache.add() for _ in lengths]
    cache.reserve(max(lengths))
    lay_out(cache, [RowInput(row, np.arange(n)) for row, n in zip(rows, lengths)])
    stamps = [100 * (i + 1) + k for i, n in enumerate(lengths) for k in range(n)]
    for layer in range(LAYERS):
        cache.update(states(stamps, KEY_DIM, layer), states(stamps, VALUE_DIM, layer), layer)
    for row, length in zip(rows, lengths):
        row.length = length
    return cache, rows


def test_reserve_grows_by_half_at_least_and_never_shrinks():
    cache = SlotCache(capacity=100)
    cache.reserve(101)
    assert cache.capacity == 150
    cache.reserve(10)
    assert cache.capacity == 150
    cache.reserve(1000)
    assert cache.capacity == 1000


def test_memory_behind_a_row_is_never_nan():
    """Masked columns are multiplied by zero, and zero times NaN is NaN."""
    cache, _ = filled([3, 5])
    cache.reserve(50)
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
    loaded.load(exported, copies, masks)
    assert [row.length for row in copies] == [2, 4]
    for layer, original in zip(loaded.layers, cache.layers):
        for row, copy in zip(rows, copies):
            held = slice(max(0, row.length - (window or 99) + 1), row.length)
            assert torch.equal(layer.keys[copy.slot, held], original.keys[row.slot, held])
            assert torch.equal(layer.values[copy.slot, held], original.values[row.slot, held])
