"""Rows that begin in another's slot, against rows that hold their whole text."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_smartspec import DraftTree
from hf_smartspec.target_model.attention.shared_attention import _by_scores, attention_with_lse
from hf_smartspec.target_model.forward.packed import PackedForward
from hf_smartspec.target_model.layout.rows import CacheRow, RowInput
from hf_smartspec.target_model.layout.shared_prefix import may_share, set_shared_reads
from hf_smartspec.target_model.layout.step_layout import build_layout
from hf_smartspec.target_model.written import packed_forward

from ...covering import examples
from ...models import VOCAB_SIZE, new_model, shared_model
from ...strategies import path_to, trees

TEXT = np.random.default_rng(0).integers(3, VOCAB_SIZE, 60)
_SINKS = {"layer_types": ["full_attention"] * 2, "sliding_window": None}
# A decoder that is written out, its own forward, one that counts positions by itself, one whose attention has sinks.
MODELS = {
    "written out": (lambda: shared_model("llama", dtype=torch.float64), packed_forward, 1e-9),
    "llama": (lambda: shared_model("llama", dtype=torch.float64), PackedForward, 1e-9),
    "opt": (lambda: shared_model("opt", dtype=torch.float64), PackedForward, 1e-9),
    "gpt_oss": (lambda: new_model("gpt_oss", dtype=torch.float64, **_SINKS), PackedForward, 1e-9),
    "gpt_oss, compiled attention": (lambda: new_model("gpt_oss", head_dim=16, **_SINKS), PackedForward, 1e-5),
    "compiled attention": (lambda: new_model("llama", head_dim=16), packed_forward, 1e-5),  # float32
}


def filled(forward: PackedForward, length: int) -> CacheRow:
    """A row of the text's first tokens."""
    row = forward.add()
    forward.forward([RowInput(row, TEXT[:length])])
    return row


def logits_of(forward: PackedForward, rows: list[CacheRow], fed: list, drafts: list[DraftTree]) -> list[torch.Tensor]:
    inputs = [RowInput(row, np.array(feed), tree) for row, feed, tree in zip(rows, fed, drafts)]
    logits, firsts = forward.forward(inputs)
    return [logits[first : first + 1 + len(tree)] for first, tree in zip(firsts, drafts)]


@pytest.mark.parametrize("name", MODELS)
@settings(max_examples=examples(30), deadline=None)
@given(data=st.data())
def test_rows_that_share_compute_what_whole_rows_do(name, data):
    """Of one base or two, of which they share more or less, with prompts and trees; the bases run with them or not."""
    build, make, error = MODELS[name]
    model = build()
    with torch.no_grad():
        forward, plain = make(model), make(model)
        lengths = data.draw(st.lists(st.integers(5, 60), min_size=1, max_size=2), label="bases")
        bases = [filled(forward, length) for length in lengths]
        rows = data.draw(st.lists(st.sampled_from(bases), max_size=2, unique=True), label="bases that run")
        for base in data.draw(st.lists(st.sampled_from(bases), min_size=1, max_size=4), label="bases of the others"):
            rows.append(forward.cache.add(None, base, data.draw(st.integers(1, base.length), label="shared")))
        whole = [filled(plain, row.length) for row in rows]
        for _ in range(3):
            feeds = st.lists(st.integers(3, VOCAB_SIZE - 1), min_size=1, max_size=5)
            fed = [data.draw(feeds, label="feed") for _ in rows]
            drafts = [data.draw(trees(max_size=5, vocab_size=VOCAB_SIZE), label="draft") for _ in rows]
            pairs = zip(logits_of(forward, rows, fed, drafts), logits_of(plain, whole, fed, drafts))
            for own, expected in pairs:
                torch.testing.assert_close(own, expected, rtol=error, atol=error)
            paths = [path_to(tree, data.draw(st.integers(-1, len(tree) - 1))) for tree in drafts]
            forward.commit(rows, paths)
            plain.commit(whole, paths)


def test_what_is_shared_is_read_once():
    """By a base that runs with those who share it, too; by nobody twice."""
    base = CacheRow(0, 40, line=0, stride=128)
    rows = [base] + [
        CacheRow(slot, 35, line=128 + 64 * slot, stride=64, prefix_row=base, prefix_len=30) for slot in range(3)
    ]
    set_shared_reads(rows)
    layout = build_layout([[RowInput(row, np.array([7]))] for row in rows])
    (shared,) = layout.shared
    assert (shared.first_line, shared.num_columns, shared.tokens.tolist()) == (0, 30, [0, 1, 2, 3])
    assert [part.num_columns for part in layout.parts] == [11, 6, 6, 6]
    assert layout.positions.tolist() == [[40, 35, 35, 35]] and layout.lines[0] == 40
    set_shared_reads([base])
    layout = build_layout([[RowInput(base, np.array([7]))]])
    assert not layout.shared and layout.parts[0].num_columns == 41


@pytest.mark.parametrize(("dtype", "error"), [(torch.float32, 1e-5), (torch.bfloat16, 0.02)])
@pytest.mark.parametrize("num_queries", [1, 3])
def test_attention_and_its_log_sum_exp(dtype, error, num_queries):
    """Flash attention's, and that of the scores themselves, where that does not serve."""
    generator = torch.Generator().manual_seed(0)
    query, (key, value) = (
        torch.randn(2, 3, num_queries, 8, generator=generator).to(dtype),
        torch.randn(2, 2, 3, 6, 8, generator=generator).to(dtype),
    )
    mask = torch.zeros(2, 1, num_queries, 6, dtype=dtype)
    mask[1, :, 0, 2:] = -torch.inf
    for scaling in (None, 0.5):
        scores = query.double() @ key.double().transpose(2, 3) * (scaling or 8**-0.5) + mask
        expected = scores.softmax(-1) @ value.double(), scores.logsumexp(-1, keepdim=True)
        for attend in (attention_with_lse, _by_scores):
            results = attend(query, key, value, mask, scaling, 0.0)
            for result, right in zip(results, expected):
                assert result.shape == right.shape
                torch.testing.assert_close(result.double(), right, rtol=error, atol=error)


def test_models_that_may_share():
    shares = {"llama", "qwen2", "qwen3", "gpt2", "opt", "mixtral", "phi3"}
    copies = {"mistral", "gemma2", "gemma3_text", "olmo3", "cohere2", "qwen2+window"}
    found = {name: may_share(new_model(name).config) for name in shares | copies}
    assert found == dict.fromkeys(shares, True) | dict.fromkeys(copies, False)
