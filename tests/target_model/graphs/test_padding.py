"""Layouts of rounded sizes: the same logits, of few shapes."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hf_smartspec import DraftTree
from hf_smartspec.target_model.attention import varlen
from hf_smartspec.target_model.forward.packed import PackedForward
from hf_smartspec.target_model.graphs.padding import MOST_TOKENS, rounded
from hf_smartspec.target_model.graphs.shapes import shape_of
from hf_smartspec.target_model.layout.rows import RowInput
from hf_smartspec.target_model.written import packed_forward

from ...covering import exhaustive
from ...models import VOCAB_SIZE, shared_model
from ...sources import random_tree
from ..attention.test_varlen import calls  # noqa: F401


@given(st.integers(0, 10**6))
def test_rounded_sizes_are_a_quarter_more_at_most(number):
    size = rounded(number)
    assert number <= size <= number + max(number // 4, 3) and rounded(size) == size
    assert number > 4 or size == number


def test_few_sizes_are_rounded():
    assert len({rounded(number) for number in range(1, MOST_TOKENS + 1)}) == 28


def random_steps(forward, rng, num_steps=12):
    """Logits of steps over rows that come, go and outgrow their slots, with trees, chains or nothing."""
    logits, rows = [], []
    for _ in range(num_steps):
        if len(rows) < 4 and (not rows or rng.random() < 0.5):
            rows.append(forward.add())
        elif len(rows) > 1 and rng.random() < 0.3:
            forward.remove(rows.pop(int(rng.integers(len(rows)))))
        chosen = [row for row in rows if rng.random() < 0.7] or rows[:1]
        feeds = [rng.integers(0, VOCAB_SIZE, rng.choice([1, 1, 2, 30])) for _ in chosen]
        drafts = [DraftTree.chain(rng.integers(0, VOCAB_SIZE, 3)), DraftTree.empty(), random_tree(rng, 6)]
        trees = [drafts[int(rng.integers(3))] for _ in chosen]
        found, offsets = forward.forward([RowInput(*item) for item in zip(chosen, feeds, trees)])
        assert len(found) == sum(len(tree) + 1 for tree in trees)
        logits += [found[start : start + len(tree) + 1].clone() for start, tree in zip(offsets, trees)]
        forward.commit(chosen, [[]] * len(chosen))
    return torch.cat(logits)


def compare(architecture, monkeypatch, recorders):
    model, results = shared_model(architecture), []
    for is_on in (True, False):
        monkeypatch.setenv("HF_SMARTSPEC_GRAPHS", str(int(is_on)))
        forward = packed_forward(model)
        assert (forward.recordings is not None) == is_on
        results.append(random_steps(forward, np.random.default_rng(3), 40))
    torch.testing.assert_close(*results, atol=2e-5 * float(results[0].std()), rtol=1e-4)


@pytest.mark.parametrize(
    "architecture", ["llama", "gemma3_text", "gpt2", *exhaustive(["mistral"], ["gemma2"], ["bigcode"], ["mixtral"])]
)
def test_what_is_added_changes_no_logits(architecture, monkeypatch, recorders):
    """Of models that have no written-out decoder, too."""
    compare(architecture.replace("bigcode", "gpt_bigcode"), monkeypatch, recorders)


@pytest.mark.parametrize("architecture", ["llama", "gemma3_text", *exhaustive(["mistral"])])
def test_what_is_added_changes_no_logits_without_masks(architecture, monkeypatch, recorders, calls):  # noqa: F811
    compare(architecture, monkeypatch, recorders)
    assert calls["compiled"] > 20


def test_chains_of_like_lengths_have_one_shape(recorders, calls):  # noqa: F811
    """Whatever the lengths of their texts, and the slabs that these lie in."""
    forward = packed_forward(shared_model("llama"))
    rows = [forward.add(length) for length in (40, 70, 200)]
    forward.forward([RowInput(row, np.arange(length) % VOCAB_SIZE) for row, length in zip(rows, (33, 34, 120))])
    shapes = []
    for lengths in ((3, 3, 3), (3, 3, 2), (2, 2, 3), (4, 2, 3)):
        chains = [DraftTree.chain(np.arange(length)) for length in lengths]
        planned = forward.plan([RowInput(row, np.array([5]), chain) for row, chain in zip(rows, chains)])
        shapes.append(shape_of(planned.layout))
    assert shapes[0] == shapes[1] == shapes[2] != shapes[3], "one row has more queries"
    assert len({len(forward.plan([RowInput(row, np.array([5]))]).layout.parts) for row in rows}) == 1


def test_one_token_of_many_rows_needs_no_masks(recorders, calls):  # noqa: F811
    """Flash attention takes grouped heads for queries there: every row has one, those of padding, too."""
    forward, plain = packed_forward(shared_model("llama")), PackedForward(shared_model("llama"))
    for runs in (forward, plain):
        rows = [runs.add() for _ in range(9)]
        for _ in range(3):
            logits, _ = runs.forward([RowInput(row, np.array([5 + number])) for number, row in enumerate(rows)])
        if runs is forward:
            found = logits
            spans = runs.cache.layout.spans
    torch.testing.assert_close(found[: len(logits)], logits, atol=1e-5, rtol=1e-4)
    assert spans.most_queries == 1 and spans.rows.shape[1] - 1 == rounded(9) == 12
    assert calls["compiled"] > 8 and all(varlen._is_right.values())


def test_padding_makes_no_prompt_a_step_of_few_queries(recorders, calls):  # noqa: F811
    """Every token of padding is a row of its own."""
    forward = packed_forward(shared_model("llama"))
    rows = [forward.add() for _ in range(9)]
    prompt, token = np.zeros(41, np.int64), np.zeros(1, np.int64)
    alone = forward.plan([RowInput(rows[0], prompt)]).layout
    beside = forward.plan([RowInput(rows[0], prompt), *[RowInput(row, token) for row in rows[1:]]]).layout
    assert alone.is_padded and beside.is_padded and alone.spans.rows.shape[1] > 2
    assert not alone.spans.has_few_queries and beside.spans.has_few_queries


def test_large_steps_stay_as_they_are(recorders):
    forward = packed_forward(shared_model("llama"))
    planned = forward.plan([RowInput(forward.add(), np.zeros(MOST_TOKENS + 1, np.int64))])
    assert not planned.layout.is_padded and planned.layout.tokens.shape == (1, MOST_TOKENS + 1)
