"""The cheapest split against all there are, and what a call costs on which device."""

from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_smartspec.target_model.layout.row_groups import TYPICAL_CALL, call_columns, split
from tests.models import PACKED, shared_model


@st.composite
def rows(draw, max_rows: int = 8) -> tuple[list[int], list[int], list[int]]:
    """Slots, columns and widths."""
    slots = sorted(draw(st.sets(st.integers(0, 12), min_size=1, max_size=max_rows)))
    widths = [draw(st.sampled_from([1, 1, 1, 2, 6, 200])) for _ in slots]
    return slots, [width + draw(st.integers(0, 1000)) for width in widths], widths


def cost_of(slots, columns, widths, ends, call) -> float:
    total = 0.0
    for start, end in pairwise([0, *ends]):
        num_slots = slots[end - 1] - slots[start] + 1
        total += call + num_slots * max(columns[start:end]) * (0.9 + 0.1 * max(widths[start:end]))
    return total


@given(rows(), st.sampled_from([0, 1, 50, TYPICAL_CALL, 3000, 10**7]))
def test_no_other_split_costs_less(rows, call):
    num = len(rows[0])
    runs = split(*rows, call)
    assert [0, *(run.stop for run in runs)] == [*(run.start for run in runs), num], "every row once, in order"
    cuts = [cut for size in range(num) for cut in combinations(range(1, num), size)]
    cheapest = min(cost_of(*rows, [*cut, num], call) for cut in cuts)
    assert cost_of(*rows, [run.stop for run in runs], call) == pytest.approx(cheapest)


@given(st.integers(1, 40), st.integers(1, 1000), st.integers(1, 50), st.integers(0, 1000))
def test_equal_rows_are_one_run(num, columns, width, call):
    assert split(range(num), [columns] * num, [width] * num, call) == [slice(0, num)]


def cheapest(slots, columns, widths, call) -> float:
    """By dynamic programming over all splits."""
    best = [0.0]
    for end in range(1, len(slots) + 1):
        longest = widest = 0
        totals = []
        for start in range(end - 1, -1, -1):
            longest, widest = max(longest, columns[start]), max(widest, widths[start])
            num_slots = slots[end - 1] - slots[start] + 1
            totals.append(best[start] + call + num_slots * longest * (0.9 + 0.1 * widest))
        best.append(min(totals))
    return best[-1]


@st.composite
def many_rows(draw) -> tuple[list[int], list[int], list[int]]:
    """Lengths that wander, jump, come again, or rise by more and more."""
    num = draw(st.integers(33, 80))
    kinds = draw(st.lists(st.sampled_from(["any", "few", "same", "rising"]), min_size=1, max_size=4))
    columns: list[int] = []
    while len(columns) < num:
        kind, base = kinds[len(columns) % len(kinds)], draw(st.integers(1, 2000))
        size = draw(st.integers(1, 40))
        if kind == "any":
            columns += draw(st.lists(st.integers(1, 4000), min_size=size, max_size=size))
        elif kind == "few":
            columns += draw(st.lists(st.sampled_from([base, 3000]), min_size=size, max_size=size))
        else:
            columns += [base + (step**2 if kind == "rising" else 0) for step in range(size)]
    widths = draw(st.lists(st.sampled_from([1, 1, 1, 5, 65]), min_size=num, max_size=num))
    slots = sorted(draw(st.sets(st.integers(0, num + 8), min_size=num, max_size=num)))
    return slots, columns[:num], widths


@given(many_rows(), st.sampled_from([0, 1, 50, TYPICAL_CALL, 3000, 16384, 10**7]))
def test_of_many_rows_no_other_split_costs_less_either(rows, call):
    runs = split(*rows, call)
    ends = [run.stop for run in runs]
    assert [0, *ends] == [*(run.start for run in runs), len(rows[0])], "every row once, in order"
    assert cost_of(*rows, ends, call) == pytest.approx(cheapest(*rows, call))


def test_many_rows_are_cut_where_lengths_change():
    columns = [100] * 60 + [900] * 40 + [300] * 50
    runs = split(range(150), columns, [1] * 150, TYPICAL_CALL)
    assert [(run.start, run.stop) for run in runs] == [(0, 60), (60, 100), (100, 150)]


def test_a_call_is_worth_more_columns_where_these_are_small_and_where_kernels_are_launched():
    config = shared_model("llama").config  # 2 key/value heads of 8 dimensions
    assert call_columns(config, "cpu") == 2**17 / (2 * 2 * 8)
    config = shared_model("gpt2").config  # no `num_key_value_heads`, nor `head_dim`: 4 heads of 8 dimensions
    assert call_columns(config, "cpu") == 2**17 / (2 * 4 * 8)
    assert call_columns(config, "cuda") > 100 * call_columns(config, "cpu")


@pytest.mark.parametrize("architecture", PACKED)
def test_every_architecture_tells_the_size_of_its_columns(architecture):
    assert 1000 < call_columns(shared_model(architecture).config, "cpu") < 10_000
