"""Formulas of Online Speculative Decoding against the numbers that it prints."""

import pytest

from benchmarks.learning.online.costs import ALPHAS, Size, bytes_read, costs, flops_ratio, paper_pairs, speedup
from hf_smartspec.goodput.papers.length import expected_length
from tests.models import new_model

GB = 1e9


def test_eq_1_gives_table_7():
    """Vicuna-7B and LLaMA-160M: k = 8, c = 0.13."""
    assert [speedup(alpha, 8, 0.13) for alpha in ALPHAS] == pytest.approx([0.98, 1.21, 1.57, 2.12, 3.00], abs=0.015)


def test_eq_6_gives_the_ratio_of_flops():
    """LLaMA-160M and Vicuna-7B, alpha 0.71, k = 5: 18.75."""
    a = float(expected_length(0.71, 5))
    assert a == pytest.approx(3, abs=0.01)
    assert flops_ratio(7e9, 160e6, 5, a) == pytest.approx(18.75, rel=0.005)


def test_table_5():
    """1792, 1320 and 573 GB for 128 tokens, with a of Eq. 1 for alpha 0.28 and 0.76 (1.4 and 3.4)."""
    assert [round(float(expected_length(alpha, 5)), 1) for alpha in (0.28, 0.76)] == [1.4, 3.4]
    assert bytes_read(14 * GB, 0, 128, 1) == 1792 * GB
    assert bytes_read(14 * GB, 0.32 * GB, 128, 1.4) / GB == pytest.approx(1320, abs=1)
    assert bytes_read(14 * GB, 0.32 * GB, 128, 3.4, 8) / GB == pytest.approx(573, abs=1)


def test_sizes_are_those_of_models():
    model = new_model("llama")
    size = Size.of(model.config)
    assert size.parameters == model.num_parameters()
    assert size.kv_numbers == 2 * 2 * 2 * 8  # keys and values, layers, heads, numbers of a head
    assert size.bytes_at(10) == 2 * (size.parameters + 10 * size.kv_numbers)


def test_the_papers_pair_by_its_config():
    """Section 5.3: one drafter takes 2 % of the target's memory, five about 10 %; table 8: length changes little."""
    row = costs(*map(Size.of, paper_pairs()["Vicuna-7B, LLaMA-160M"]))
    assert row["parameters"] == pytest.approx([7e9, 160e6], rel=0.05)
    assert row["share of one drafter"] == pytest.approx(0.02, abs=0.005)
    assert row["share of several"] == pytest.approx(0.10, abs=0.025)
    assert row["bytes read"]["online"] < row["bytes read"]["speculative"] < row["bytes read"]["original"]
    first, *_, last = row["speed-up by length"].values()
    assert last == pytest.approx(first, rel=0.02)
