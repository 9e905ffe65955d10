"""Attention to chosen keys and n-gram embeddings, along trees, against the model's own forward."""

import numpy as np
import pytest
import torch

from hf_smartspec.drafts.tree import DraftTree
from hf_smartspec.target_model.forward.packed import PackedForward
from hf_smartspec.target_model.layout.rows import RowInput
from hf_smartspec.target_model.recurrent import chosen

from ...models import RECURRENT, VOCAB_SIZE, new_model

pytestmark = pytest.mark.skipif("qwen4_exp_text" not in RECURRENT, reason="this release has no such model")
EOS = 2  # where windows of n-grams begin anew


@pytest.fixture(scope="module")
def model():
    return new_model("qwen4_exp_text")


@torch.no_grad()
def own_logits(model, text):
    return model(torch.tensor(text)[None]).logits[0]


def text_with_ends(length, seed):
    text = np.random.default_rng(seed).integers(3, VOCAB_SIZE, length)
    text[[4, 5, 17, 33, 35]] = EOS
    return text


def tree_beside(right):
    """Return a tree with the right tokens at odd nodes, each after a wrong sibling."""
    tokens = np.stack([(right + 1) % VOCAB_SIZE, right], axis=1).reshape(-1)
    parents = np.repeat(np.arange(-1, len(tokens) - 1, 2), 2)
    return DraftTree(tokens, parents, None)


def deep_model(**changes):
    layers = ["linear_attention", "full_attention", "full_attention"]
    return new_model("qwen4_exp_text", num_hidden_layers=3, layer_types=layers, **changes)


@pytest.mark.parametrize("piece", [1, 7, 64])
@pytest.mark.parametrize(
    "changes",
    [
        {"indexer_budget": 4, "indexer_compress_ratio": 2},
        {"indexer_budget": 9, "indexer_compress_ratio": 3, "indexer_head_dim": 16},  # 8 of them are rotated
        {"indexer_budget": 5, "indexer_compress_ratio": 1, "indexer_n_heads": 1},
        {"indexer_budget": 7, "indexer_compress_ratio": 7},
    ],
)
def test_rows_of_different_lengths_have_the_logits_of_the_model(changes, piece, monkeypatch):
    model = deep_model(**changes)
    if piece == 7:
        monkeypatch.setattr(chosen, "_MOST", 3000)  # a few queries at once
    texts = [text_with_ends(length, seed) for seed, length in enumerate((64, 36, 49))]
    expected = [own_logits(model, text) for text in texts]
    forward = PackedForward(model, prefill_chunk=piece)
    rows = [forward.add() for _ in texts]
    cuts = [30, 31, 15]  # committed before; the trees are as long as the texts, of 64 nodes at most
    forward.forward([RowInput(row, text[:cut], DraftTree.chain([])) for row, text, cut in zip(rows, texts, cuts)])
    forward.commit(rows, [()] * 3)
    sizes = [min(len(text) - cut - 1, 32) for text, cut in zip(texts, cuts)]
    trees = [tree_beside(text[cut + 1 : cut + 1 + size]) for text, cut, size in zip(texts, cuts, sizes)]
    inputs = [RowInput(row, text[cut : cut + 1], tree) for row, text, cut, tree in zip(rows, texts, cuts, trees)]
    logits, offsets = forward.forward(inputs)
    for own, offset, cut, size in zip(expected, offsets, cuts, sizes):
        lines = [offset, *range(offset + 2, offset + 2 + 2 * size, 2)]
        torch.testing.assert_close(logits[lines], own[cut : cut + size + 1], rtol=0, atol=1e-4)
    kept = [3, 0, 20]
    forward.commit(rows, [range(1, 2 * num, 2) for num in kept])
    ends = [cut + 1 + num for cut, num in zip(cuts, kept)]
    rest = [RowInput(row, text[end:], DraftTree.chain([])) for row, text, end in zip(rows, texts, ends)]
    logits, offsets = forward.forward(rest)
    for own, offset in zip(expected, offsets):
        torch.testing.assert_close(logits[offset], own[-1], rtol=0, atol=1e-4)


def test_texts_are_long_enough_for_a_choice(model):
    """Without the indexer's choice logits are others; and windows of n-grams begin anew."""
    text = text_with_ends(64, 0)
    expected = own_logits(model, text)
    other = new_model("qwen4_exp_text", indexer_budget=64)
    assert not torch.allclose(own_logits(other, text)[-1], expected[-1], atol=1e-2)
    changed = text.copy()
    changed[3] = 50  # before two ends
    embedding = next(module for module in model.modules() if hasattr(module, "ngram_embedding"))
    rows = [embedding(torch.tensor(item)[None], None)[0, 5:] for item in (text, changed)]
    assert torch.equal(*rows)
