"""Positions, masks and packing of a step, against a twin that asks of every pair of tokens who sees whom."""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hf_smartspec import DraftTree
from hf_smartspec.target_model.layout.row_groups import arrange, padded_context
from hf_smartspec.target_model.layout.rows import CacheRow, RowInput
from hf_smartspec.target_model.layout.step_layout import build_layout

from ...strategies import path_to, trees


@dataclass
class Token:
    """One token of a step, as the twin sees it."""

    row: int
    column: int
    position: int
    token: int
    visible: set[int]  # columns of its slot, windows left aside


@st.composite
def steps(draw, max_rows: int = 4) -> list[RowInput]:
    """Rows in ascending slots, with gaps; feeds or drafts may be missing, not both; parts of trees may be cached."""
    slots = sorted(draw(st.sets(st.integers(0, 5), min_size=1, max_size=max_rows)))
    rows = []
    for slot in slots:
        tree = draw(trees(max_size=6))
        feed_length = draw(st.integers(0 if len(tree) else 1, 5))
        # A tree is continued without a feed only: its first part came with the feed.
        first_node = draw(st.integers(0, len(tree) - 1)) if len(tree) and feed_length == 0 else 0
        row = CacheRow(slot, length=draw(st.integers(1 if feed_length == 0 else 0, 7)))
        feed = np.array(draw(st.lists(st.integers(0, 3), min_size=feed_length, max_size=feed_length)), np.int64)
        rows.append(RowInput(row, feed, tree, first_node))
    return rows


@st.composite
def grouped_steps(draw) -> list[list[RowInput]]:
    """Runs of neighbouring rows as parts."""
    rows = draw(steps())
    cuts = sorted(draw(st.sets(st.integers(1, len(rows) - 1)))) if len(rows) > 1 else []
    return [rows[start:end] for start, end in pairwise([0, *cuts, len(rows)])]


def twin(rows: list[RowInput]) -> list[Token]:
    tokens = []
    for item in rows:
        slot, start = item.row.slot, item.row.length
        for index, token in enumerate(item.feed.tolist()):
            column = start + index
            tokens.append(Token(slot, column, column, token, set(range(column + 1))))
        root = start + len(item.feed)  # behind the last committed token
        for node in range(item.first_node, len(item.tree)):
            path = path_to(item.tree, node)
            visible = set(range(root)) | {root + ancestor for ancestor in path}
            tokens.append(Token(slot, root + node, root + len(path) - 1, int(item.tree.tokens[node]), visible))
    return tokens


def key_position(rows: list[RowInput], slot: int, column: int) -> int:
    item = next(item for item in rows if item.row.slot == slot)
    root = item.row.length + len(item.feed)
    return column if column < root else root + len(path_to(item.tree, column - root)) - 1


@given(grouped_steps())
def test_every_token_has_the_position_of_its_place_in_the_text(groups):
    layout = build_layout(groups)
    expected = twin([row for group in groups for row in group])
    assert layout.tokens[0].tolist() == [token.token for token in expected]
    assert layout.positions[0].tolist() == [token.position for token in expected]
    rows = {row.row.slot: row.row for group in groups for row in group}
    assert layout.firsts.tolist() == [rows[token.row].line for token in expected]
    assert layout.lines.tolist() == [rows[token.row].line + token.column for token in expected]
    assert layout.columns.tolist() == [token.column for token in expected]


@given(grouped_steps(), st.sampled_from([None, 1, 2, 3, 5, 100]), st.sampled_from([1, 2, 3]))
def test_tokens_see_the_committed_text_their_ancestors_and_nothing_else(groups, window, num_groups):
    layout = build_layout(groups)
    assert len(layout.parts) == len(groups)
    for rows, part in zip(groups, layout.parts):
        check_what_is_seen(rows, part, window, num_groups)


def dense_mask(part, window, num_groups):
    """The mask, also where there is none because all is seen."""
    mask = part.mask(window, num_groups, torch.float32)
    shape = part.num_rows, 1, part.width * num_groups, part.num_columns
    return torch.zeros(shape) if mask is None else mask


def check_what_is_seen(rows, part, window, num_groups):
    mask = dense_mask(part, window, num_groups)
    assert mask.shape == (part.num_rows, 1, part.width * num_groups, part.num_columns)
    assert set(mask.unique().tolist()) <= {0.0, -float("inf")}
    seen: dict[int, int] = {}
    for token in twin(rows):
        query = seen[token.row] = seen.get(token.row, -1) + 1  # index within the row
        expected = {
            column
            for column in token.visible
            if window is None or key_position(rows, token.row, column) > token.position - window
        }
        for group in range(num_groups):
            line = mask[token.row - rows[0].row.slot, 0, query * num_groups + group]
            assert set(torch.nonzero(line == 0).flatten().tolist()) == expected


@given(grouped_steps(), st.sampled_from([None, 1, 3]))
def test_no_query_sees_nothing_not_even_padding(groups, window):
    """A softmax over nothing is NaN, and NaN times a weight of zero is NaN."""
    for part in build_layout(groups).parts:
        assert (dense_mask(part, window, 1) == 0).any(dim=-1).all()


def test_rows_of_one_length_that_bring_one_token_each_need_no_mask():
    rows = [RowInput(CacheRow(slot, length=4), np.array([7])) for slot in range(2)]
    (part,) = build_layout([rows]).parts
    assert part.mask(None, 2, torch.float32) is None
    assert part.mask(3, 2, torch.float32) is not None, "a window hides what lies before it"


@given(grouped_steps())
def test_padding_and_packing_are_inverse(groups):
    layout = build_layout(groups)
    ends = [part.tokens.stop for part in layout.parts]
    assert [part.tokens.start for part in layout.parts] == [0, *ends[:-1]] and ends[-1] == len(layout.firsts)
    for part in layout.parts:
        slots = (layout.firsts[part.tokens] - part.first_line) // part.stride
        if part.gather is None:
            assert part.scatter is None
            assert len(slots) == part.num_rows * part.width, "nothing is left out without an index"
            continue
        packed = torch.arange(len(slots)) + 1000
        padded = packed[part.gather]
        assert padded[part.scatter].tolist() == packed.tolist()
        slots_of_padded = torch.arange(part.num_rows).repeat_interleave(part.width)
        assert slots_of_padded[part.scatter].tolist() == slots.tolist()


def rows_of(widths, lengths) -> list[RowInput]:
    return [RowInput(CacheRow(slot, length), np.arange(num)) for slot, (num, length) in enumerate(zip(widths, lengths))]


def slots_of(groups) -> list[list[int]]:
    return [[item.row.slot for item in group] for group in groups]


def test_long_prompts_among_decoding_rows_are_parts_of_their_own():
    """Otherwise every row would be padded to the prompt's length."""
    rows = rows_of([1, 1, 200, 3, 1, 33, 2], [500] * 7)
    assert slots_of(arrange(rows[::-1], 170)) == [[0, 1], [2], [3, 4], [5], [6]]
    short = rows_of([1, 12, 2], [0] * 3)
    assert arrange(short, 170) == [short], "there is little to save"
    assert arrange(rows[2:3], 0) == [rows[2:3]]
    prompts = rows_of([199, 200, 200], [0] * 3)
    assert slots_of(arrange(prompts, 170)) == [[0, 1, 2]]


def test_short_contexts_are_not_padded_to_long_ones():
    rows = rows_of([1] * 6, [900, 880, 60, 80, 70, 500])
    assert slots_of(arrange(rows, 170)) == [[0, 1], [2, 3, 4], [5]]
    assert slots_of(arrange(rows, 10**6)) == [[0, 1, 2, 3, 4, 5]], "calls may cost more than any padding"
    waiting = [rows[0], rows[2], rows[4]]
    assert slots_of(arrange(waiting, 170)) == [[0], [2, 4]], "a slot in between is padding"
    cached_tree = RowInput(CacheRow(1, 60), np.empty(0, np.int64), DraftTree.chain(range(100)), first_node=99)
    assert slots_of(arrange([RowInput(CacheRow(0, 300), np.arange(1)), cached_tree], 141)) == [[0, 1]]
    assert slots_of(arrange([RowInput(CacheRow(0, 300), np.arange(1)), cached_tree], 140)) == [[0], [1]]


@given(steps(), st.integers(0, 20))
def test_parts_hold_every_row_once_in_the_order_of_slots(rows, call):
    groups = arrange(rows[::-1], call)
    assert all(groups)
    assert [item for group in groups for item in group] == rows
    for group, part in zip(groups, build_layout(groups).parts):
        assert part.first_line == group[0].row.line
        assert part.num_rows - 1 == group[-1].row.slot - group[0].row.slot


def test_rows_of_different_slabs_are_never_one_part():
    """Their slots are not equally long."""
    places = [(0, 0, 64), (1, 64, 64), (0, 128, 64), (0, 200, 96), (1, 296, 96)]
    rows = [RowInput(CacheRow(slot, 20, line=line, stride=size), np.arange(1)) for slot, line, size in places]
    groups = arrange(rows[::-1], 10**6)
    assert groups == [rows[:2], rows[2:3], rows[3:]]
    assert padded_context([item.row for item in rows], 1000) == 5 * 20 + 2 * 1000
    memory = torch.arange(400.0)[:, None, None].expand(-1, 2, 3).contiguous()
    for group, part in zip(groups, build_layout(groups).parts):
        view = part.view(memory)
        assert view.shape == (len(group), 2, 21, 3)
        for item, own in zip(group, view):
            assert torch.equal(own, memory[item.row.line : item.row.line + 21].transpose(0, 1))


@given(steps(), st.integers(0, 20))
def test_context_is_that_of_the_parts(rows, call):
    rows = [RowInput(item.row, np.arange(1)) for item in rows]
    parts = build_layout(arrange(rows, call)).parts
    expected = sum(part.num_rows * (part.num_columns - 1) for part in parts) + call * (len(parts) - 1)
    assert padded_context([item.row for item in rows], call) == expected
    assert padded_context([], call) == 0


@given(grouped_steps())
def test_no_two_tokens_are_written_to_one_place(groups):
    layout = build_layout(groups)
    places = layout.lines.tolist()
    assert len(set(places)) == len(places)
    for part in layout.parts:
        assert layout.columns[part.tokens].max() < part.num_columns


def test_a_window_wider_than_the_text_is_none():
    layout = build_layout([[RowInput(CacheRow(0), np.arange(4))]]).parts[0]
    assert layout.mask(4, 1, torch.float32) is layout.mask(None, 1, torch.float32)
    assert layout.mask(3, 1, torch.float32) is not layout.mask(None, 1, torch.float32)


def test_window_counts_tokens_of_the_text_not_columns_of_the_cache():
    """The third of three siblings stands three columns behind the root, and one position."""
    tree = DraftTree(np.array([5, 6, 7]), np.array([-1, -1, -1]), np.ones(3, np.float32))
    layout = build_layout([[RowInput(CacheRow(0), np.arange(3), tree)]]).parts[0]
    visible = layout.mask(2, 1, torch.float32)[0, 0, -1] == 0
    assert visible.tolist() == [False, False, True, False, False, True]  # itself and the last token of the text


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_mask_has_the_dtype_of_the_queries(dtype):
    layout = build_layout([[RowInput(CacheRow(0), np.arange(4))]]).parts[0]
    assert layout.mask(None, 1, dtype).dtype == dtype
