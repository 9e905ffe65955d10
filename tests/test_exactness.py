"""The promise: the same tokens as plain `generate`, for every architecture, batch, source, tree and sampling."""

from itertools import product

import pytest
import torch

from hf_smartspec.prepare.route import way_of

from .cases import SAMPLING, Case, Setting, prompts_of
from .comparison import Tally, compare, run_cases
from .covering import IS_EXHAUSTIVE, exhaustive, part_of
from .models import PACKED, RECURRENT, ROWWISE, UNPADDED

# One test of the exhaustive run: ten greedy and ten sampled settings of one architecture, in six cases each.
SETTINGS_PER_BLOCK, NUM_BLOCKS = 10, 4
BLOCKS = [
    (architecture, dtype, block)
    for architecture, dtype, block in product(PACKED, ("float32", "float64"), range(NUM_BLOCKS))
    # Plain generate is wrong there: the mask of eager attention overflows in its float32 softmax, and padding is NaN.
    if (architecture, dtype) != ("gemma2", "float64")
] + [(architecture, "float32", 0) for architecture in (*RECURRENT, *ROWWISE)]
LIKE_OTHERS = {"lfm2_moe", "bailing_hybrid"}  # LFM2 with Mixtral's experts, and Kimi Linear with a bound on decays
SKIPPED = pytest.param("", "", 0, marks=pytest.mark.skip(reason="takes an hour: set HF_SMARTSPEC_EXHAUSTIVE=1"))


def check(tally: Tally) -> None:
    assert not tally.faults, tally.faults
    if "draft" in tally.by_kind:  # not where the target's kind cannot draft
        assert tally.by_kind["draft"]["accepted"] > 0, "no draft was accepted"
    assert tally.by_kind["lookup"]["drafted"] > 0, "nothing was looked up"
    assert tally.by_kind["suffix"]["accepted"] > 0, "no suffix was continued"


@pytest.mark.skipif(IS_EXHAUSTIVE, reason="the exhaustive run contains it")
@pytest.mark.parametrize("architecture", [*PACKED, *part_of(list(RECURRENT), *(RECURRENT.keys() - LIKE_OTHERS))])
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


@pytest.mark.parametrize(
    "architecture",
    part_of([*RECURRENT, *UNPADDED], *[name for name in ("olmo_hybrid", "mamba2") if name in RECURRENT], *UNPADDED),
)
def test_trees_of_64_nodes_over_states_and_prompts_in_odd_pieces(architecture):
    """The right nodes lie anywhere in the trees of a row by itself, and of eight rows that sample, mostly ragged."""
    several = [7] * 8 if architecture in UNPADDED else [7, 2, 9, 1, 14, 5, 3, 8]
    tally = Tally()
    for lengths, sampling, piece in (([7], None, 2), (several, SAMPLING[4], 3)):
        prompts = tuple(map(tuple, prompts_of(lengths)))
        limits = {"max_new_tokens": 52}, None, sampling, {}, 5
        setting = Setting(f"{architecture}/wide/{len(lengths)}", architecture, torch.float32, prompts, *limits)
        assert way_of(setting.model) == ("packed", None)
        compare(Case(setting, "oracle", True, 64, True), setting.reference(), tally, prefill_chunk_size=piece)
    assert not tally.faults, tally.faults
    assert tally.counts["drafted"] > 9 * 64 and tally.counts["accepted"] > 9 * 40, tally.counts


@pytest.mark.parametrize(("architecture", "dtype", "block"), BLOCKS if IS_EXHAUSTIVE else [SKIPPED])
def test_exhaustively(architecture, dtype, block, record_property):
    tally = run_cases(architecture, SETTINGS_PER_BLOCK, block * SETTINGS_PER_BLOCK, dtype=getattr(torch, dtype))
    tally.report(record_property)
    check(tally)
