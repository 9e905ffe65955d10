"""The cheapest split against all there are, and what a call costs on which device."""

from itertools import combinations, pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_smartspec.target import row_groups
from hf_smartspec.target.row_groups import TYPICAL_CALL, call_columns, split
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
    """More than are searched through: lengths that wander, jump, come again, or rise by more and more."""
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
def test_of_many_rows_the_split_costs_hardly_more_than_the_cheapest(rows, call):
    runs = split(*rows, call)
    ends = [run.stop for run in runs]
    assert [0, *ends] == [*(run.start for run in runs), len(rows[0])], "every row once, in order"
    cost = cost_of(*rows, ends, call)
    assert cost <= cost_of(*rows, [len(rows[0])], call) * (1 + 1e-9), "one run costs no less"
    assert cost <= 1.5 * cheapest(*rows, call)


@pytest.mark.parametrize("call", [TYPICAL_CALL, 1000, 16384])
def test_of_256_texts_the_split_costs_less_than_a_twentieth_more_than_the_cheapest(call):
    rng = np.random.default_rng(0)
    for columns in (rng.integers(1000, 2000, 256).tolist(), np.exp(rng.normal(6, 1, 256)).astype(int).tolist()):
        for widths in ([1] * 256, rng.choice([1, 5, 65], 256).tolist()):
            rows = range(256), columns, widths
            ends = [run.stop for run in split(*rows, call)]
            assert cost_of(*rows, ends, call) <= 1.05 * cheapest(*rows, call)


@pytest.mark.parametrize("lengths", ["equal", "rising", "alternating"])
def test_rows_are_joined_in_few_rounds(lengths, monkeypatch):
    columns = {
        "equal": [100] * 200 + [100_000] * 200,
        "rising": [place**2 for place in range(400)],
        "alternating": [100, 200] * 200,
    }[lengths]
    num_rounds = 0
    joined = row_groups._Blocks.joined

    def counting(blocks, call):
        nonlocal num_rounds
        num_rounds += 1
        return joined(blocks, call)

    monkeypatch.setattr(row_groups._Blocks, "joined", counting)
    split(range(400), columns, [1] * 400, 15_000)
    assert 1 < num_rounds < 20


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
