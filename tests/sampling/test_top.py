"""Arg max and top k, against torch's."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hf_smartspec.sampling.top import argmax, best_by_bounds, best_of, likeliest_tokens, top_tokens


@given(st.lists(st.lists(st.integers(-3, 3), min_size=5, max_size=5), min_size=1, max_size=4))
def test_argmax_takes_the_lowest_of_equal_tokens(lines):
    expected = [line.index(max(line)) for line in lines]
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        assert argmax(torch.tensor(lines, dtype=dtype)) == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_ties_and_scores_that_are_not_finite_are_ordered_as_by_torch(dtype):
    scores = torch.randn(8, 700, generator=torch.Generator().manual_seed(2)).round(decimals=1).to(dtype)
    scores[1], scores[1, 300], scores[1, 500] = -1, -0.0, 0.0
    scores[2], scores[3, 699] = -torch.inf, torch.inf
    scores[4, 350], scores[5, 20], scores[5, 600] = torch.nan, -torch.nan, torch.nan
    assert argmax(scores) == scores.argmax(dim=-1).tolist()
    assert torch.equal(top_tokens(scores, 6), scores.sort(dim=-1, descending=True, stable=True).indices[:, :6])


def test_argmax_rounds_to_float32_as_plain_decoding_does():
    assert argmax(torch.tensor([[1.0, 1.0 + 1e-12]], dtype=torch.float64)) == [0]


# --- The noise as a logits processor ---------------------------------------------------------------------------------


@pytest.mark.parametrize("vocab_size", [5, 100, 700, 1280])
@pytest.mark.parametrize("count", [1, 3])
def test_top_tokens_come_in_the_order_of_a_stable_sort(vocab_size, count):
    torch.manual_seed(vocab_size)
    scores = torch.randn(50, vocab_size)
    scores[torch.rand_like(scores) < 0.3] = -torch.inf
    scores[:, -1] = torch.randn(50)  # after the last whole block
    # `topk` may take any of equal scores, and some rows of five have fewer than three that are finite.
    expected = scores.sort(dim=-1, descending=True, stable=True).indices[:, :count]
    assert torch.equal(top_tokens(scores, count), expected)
    assert top_tokens(scores, 0).shape == (len(scores), 0)


@pytest.mark.parametrize("vocab_size", [2, 700])
@pytest.mark.parametrize("count", [1, 3])
def test_likeliest_tokens_come_with_their_probabilities(vocab_size, count):
    scores = torch.randn(4, vocab_size, generator=torch.Generator().manual_seed(count))
    expected = scores.softmax(dim=-1).topk(min(count, vocab_size))
    tokens, probs = likeliest_tokens(scores, count)
    assert torch.equal(tokens, expected.indices) and torch.equal(probs, expected.values)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab_size", [4, 700])
def test_the_best_of_the_first_lines_come_with_the_arg_max_of_all(vocab_size, dtype):
    scores = torch.randn(5, vocab_size, generator=torch.Generator().manual_seed(1)).to(dtype)
    best, expected = best_of(scores, 6, 3, True), scores[:3].topk(min(6, vocab_size))
    assert best.argmax == argmax(scores)
    torch.testing.assert_close(torch.from_numpy(best.shares), expected.values.float().softmax(dim=-1))
    assert torch.equal(scores[:3].gather(1, torch.from_numpy(best.tokens)), expected.values)
    assert best_of(scores, 6, 3, False).argmax == []


@given(
    seed=st.integers(0, 2**32 - 1),
    rows=st.integers(1, 3),
    vocab_size=st.integers(1, 90),
    chunk=st.integers(1, 40),
    count=st.integers(0, 12),
    looseness=st.sampled_from([0.0, 1.0, 9.0]),
)
def test_bounds_of_chunks_change_nothing(seed, rows, vocab_size, chunk, count, looseness):
    rng = np.random.default_rng(seed)
    scores = rng.integers(-3, 4, (rows, vocab_size)).astype(np.float32)  # with many ties
    starts = np.arange(0, vocab_size, chunk)
    bounds = np.maximum.reduceat(scores, starts, axis=1) + looseness * rng.random((rows, len(starts)), np.float32)
    tokens, shares = best_by_bounds(torch.from_numpy(scores), bounds, chunk, count, 2)
    expected = best_of(torch.from_numpy(scores), min(count, vocab_size), 2, with_argmax=False)
    assert tokens.tolist() == expected.tokens.tolist()
    assert np.allclose(shares, expected.shares, atol=1e-6)


@pytest.mark.parametrize("looseness", [0.0, 0.5, 99.0])  # few chunks, some, and all are read
@pytest.mark.parametrize("decimals", [0, 4])  # with many ties, and with few
def test_bounds_of_flat_scores_change_nothing(looseness, decimals):
    rng, chunk, count = np.random.default_rng(decimals), 256, 6
    scores = rng.normal(size=(5, 40 * chunk + 130)).round(decimals).astype(np.float32)
    scores[1], scores[2] = 1.0, np.sort(scores[2])
    scores[3] -= scores[3].max() + 1  # all below 0
    bounds = np.maximum.reduceat(scores, np.arange(0, scores.shape[1], chunk), axis=1) + np.float32(looseness)
    tokens, _ = best_by_bounds(torch.from_numpy(scores), bounds, chunk, count, 5)
    expected = torch.from_numpy(scores).sort(dim=-1, descending=True, stable=True).indices[:, :count]
    assert tokens.tolist() == expected.tolist()
