"""The promise: the same tokens as plain `generate`, for every architecture, batch, source, tree and sampling."""

from itertools import product

import pytest
import torch

from .comparison import Tally, run_cases
from .covering import IS_EXHAUSTIVE, exhaustive
from .models import PACKED, RECURRENT, ROWWISE

# One test of the exhaustive run: ten greedy and ten sampled settings of one architecture, in six cases each.
SETTINGS_PER_BLOCK, NUM_BLOCKS = 10, 4
BLOCKS = [
    (architecture, dtype, block)
    for architecture, dtype, block in product(PACKED, ("float32", "float64"), range(NUM_BLOCKS))
    # Plain generate is wrong there: the mask of eager attention overflows in its float32 softmax, and padding is NaN.
    if (architecture, dtype) != ("gemma2", "float64")
] + [(architecture, "float32", 0) for architecture in (*RECURRENT, *ROWWISE)]
SKIPPED = pytest.param("", "", 0, marks=pytest.mark.skip(reason="takes an hour: set HF_SMARTSPEC_EXHAUSTIVE=1"))


def check(tally: Tally) -> None:
    assert not tally.faults, tally.faults
    if "draft" in tally.by_kind:  # not where the target's kind cannot draft
        assert tally.by_kind["draft"]["accepted"] > 0, "no draft was accepted"
    assert tally.by_kind["lookup"]["drafted"] > 0, "nothing was looked up"
    assert tally.by_kind["suffix"]["accepted"] > 0, "no suffix was continued"


@pytest.mark.skipif(IS_EXHAUSTIVE, reason="the exhaustive run contains it")
@pytest.mark.parametrize("architecture", [*PACKED, *RECURRENT])
def test_every_architecture_generates_the_plain_tokens(architecture, record_property):
    tally = run_cases(architecture, count=1, in_turns=True)
    tally.report(record_property)
    check(tally)


@pytest.mark.parametrize("architecture", ["llama", "gemma3_text", *exhaustive(["mistral"], ["gemma2"])])
def test_rows_attended_to_apart_generate_the_plain_tokens(architecture, monkeypatch):
    """A call of attention costs nothing: every difference in length makes a part."""
    monkeypatch.setattr("hf_smartspec.target_model.forward.ragged.call_columns", lambda *_: 0)
    tally = run_cases(architecture, count=2)
    assert not tally.faults, tally.faults
    assert tally.counts["accepted"] > 0


@pytest.mark.parametrize(("architecture", "dtype", "block"), BLOCKS if IS_EXHAUSTIVE else [SKIPPED])
def test_exhaustively(architecture, dtype, block, record_property):
    tally = run_cases(architecture, SETTINGS_PER_BLOCK, block * SETTINGS_PER_BLOCK, dtype=getattr(torch, dtype))
    tally.report(record_property)
    check(tally)
