"""Compiled attention against torch's with masks, in double precision, and as models use it."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import scaled_dot_product_attention

import hf_smartspec
from hf_smartspec import DraftTree
from hf_smartspec.cpu import attention
from hf_smartspec.cpu.attention import SeenLines, can_attend, few_token_attention, has_attention, runs_of
from hf_smartspec.cpu.kernels.attend import MOST_TOKENS, _to_prefetch
from hf_smartspec.target_model.attention import tree_attention as attention_module
from hf_smartspec.target_model.attention.seen_lines import lines_of
from hf_smartspec.target_model.attention.tree_attention import _masked_attention
from hf_smartspec.target_model.layout.row_groups import arrange
from hf_smartspec.target_model.layout.rows import CacheRow, RowInput
from hf_smartspec.target_model.layout.skip_prefix import skip_prefix
from hf_smartspec.target_model.layout.step_layout import build_layout

from ..models import new_model
from ..strategies import trees

pytestmark = pytest.mark.skipif(not has_attention(torch.float32), reason="there is no compiled attention for this CPU")

DTYPES = (torch.float32, torch.bfloat16)
_STRIDE, _LONG = 130, 180


def numbers(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def by_masks(queries, keys, values, lines, scale=None) -> torch.Tensor:
    """In double precision, of every token which lines it sees."""
    sees = torch.zeros(len(queries), len(keys), dtype=torch.bool)
    for token, (first, count) in enumerate(zip(lines.firsts.tolist(), lines.counts.tolist())):
        sees[token, first : first + count] = True
        if lines.nodes is not None:
            begin, *words = lines.nodes[:, token].tolist()
            for line in range(begin, first + count):
                sees[token, line] = bool(words[(line - begin) // 64] >> (line - begin) % 64 & 1)
    heads = [item.double().transpose(0, 1) for item in (queries, keys, values)]
    return scaled_dot_product_attention(*heads, attn_mask=sees, scale=scale, enable_gqa=True).transpose(0, 1)


def assert_close(found, expected, dtype):
    rounding = 2**-7 if dtype == torch.bfloat16 else 1e-5
    assert ((found.double() - expected).abs() <= rounding * (1 + expected.abs())).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [16, 64, 80, 112])
@pytest.mark.parametrize(("kv_heads", "groups"), [(1, 1), (2, 3), (3, 1), (2, 8)])
def test_results_are_those_of_torch(kv_heads, groups, size, dtype):
    """Rows of several lengths: of one line, less than a tile, more than a block."""
    counts = np.array([1, 2, 7, 33, 80, 81])
    rows = np.array([0, 1, 2, 3, 4, 4])
    lines = SeenLines(rows * _STRIDE, counts, runs_of(rows))
    keys, values = (numbers(5 * _STRIDE + shift, kv_heads, size).to(dtype)[shift:] for shift in (0, 1))
    queries = numbers(6, kv_heads * groups, size).to(dtype)
    for scale in (None, 0.3):
        found = few_token_attention(queries, keys, values, lines, scale)
        assert found.dtype == dtype
        assert_close(found, by_masks(queries, keys, values, lines, scale), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("kv_heads", "groups"), [(1, 1), (2, 3), (3, 8)])
def test_sinks_join_the_scores_and_have_no_value(kv_heads, groups, dtype):
    """Try low ones, high ones, and one that leaves nothing."""
    rows, heads = np.array([0, 1, 2, 2]), kv_heads * groups
    lines = SeenLines(rows * _STRIDE, np.array([1, 33, 80, 81]), runs_of(rows))
    keys, values = (numbers(3 * _STRIDE + shift, kv_heads, 32).to(dtype)[shift:] for shift in (0, 1))
    queries, sinks = numbers(4, heads, 32).to(dtype), torch.linspace(-9, 9, heads).to(dtype)
    sinks[-1] = 200.0
    assert can_attend(queries, keys, values, 0.3, sinks) and not can_attend(queries, keys, values, 0.3, sinks.double())
    found = few_token_attention(queries, keys, values, lines, 0.3, sinks)
    for token, (first, count) in enumerate(zip(lines.firsts.tolist(), lines.counts.tolist())):
        own = slice(first, first + count)
        key, value = (item[own].double().repeat_interleave(groups, dim=1) for item in (keys, values))
        scores = torch.cat([0.3 * torch.einsum("hd,lhd->hl", queries[token].double(), key), sinks[:, None]], dim=1)
        expected = torch.einsum("hl,lhd->hd", scores.softmax(-1)[:, :-1], value)
        assert_close(found[token], expected, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("kv_heads", "groups"), [(1, 1), (2, 3), (3, 8)])
def test_scores_are_squashed_within_soft_caps(kv_heads, groups, dtype):
    """Try scores far within the cap and beyond it, in trees, whose hidden nodes stay hidden."""
    tokens = 3
    lines = SeenLines(
        np.zeros(tokens, np.int64), np.array([80, 81, 82]), np.array([0, tokens]), np.array([[79] * 3, [1, 3, 5]])
    )
    keys, values = (numbers(_STRIDE + shift, kv_heads, 32).to(dtype)[shift:] for shift in (0, 1))
    queries = numbers(tokens, kv_heads * groups, 32).to(dtype)
    for scale, cap in ((0.3, 5.0), (4.0, 2.0), (0.01, 30.0)):
        found = few_token_attention(queries, keys, values, lines, scale, softcap=cap)
        for token, seen in enumerate(([79], [79, 80], [79, 81])):
            own = [*range(79), *seen]
            key, value = (item[own].double().repeat_interleave(groups, dim=1) for item in (keys, values))
            scores = torch.tanh(scale * torch.einsum("hd,lhd->hl", queries[token].double(), key) / cap) * cap
            assert_close(found[token], torch.einsum("hl,lhd->hd", scores.softmax(-1), value), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kv_heads", [1, 3])
def test_rows_that_share_a_prefix_get_the_bits_of_rows_that_share_nothing(kv_heads, dtype):
    """Wherever it lies, whatever its length; trees after it, too."""
    keys, values = (numbers(6 * _STRIDE + shift, kv_heads, 32).to(dtype)[shift:] for shift in (0, 1))
    queries, rows = numbers(9, 2 * kv_heads, 32).to(dtype), np.array([0, 1, 2, 2, 3, 3, 3, 3, 3])
    counts, bits = np.array([1, 40, 3, 4, 10, 11, 12, 13, 14]), np.array([-1] * 5 + [1, 0b11, 0b101, 0b1011])
    for length in (1, 31, 32, 33, 70, 0):
        prefixes = np.array([5 * _STRIDE, length])[:, None] * (rows != 1)  # one row shares nothing
        firsts = rows * _STRIDE
        nodes = np.stack([firsts + 10, bits])
        shared = SeenLines(firsts, counts, runs_of(rows), nodes, prefixes)
        own_keys, own_values = (torch.zeros(4 * 2 * _STRIDE, kv_heads, 32, dtype=dtype) for _ in range(2))
        for row, first in enumerate(range(0, 8 * _STRIDE, 2 * _STRIDE)):
            num = length * (row != 1)
            for own, memory in ((own_keys, keys), (own_values, values)):
                own[first : first + num] = memory[5 * _STRIDE : 5 * _STRIDE + num]
                own[first + num : first + num + _STRIDE] = memory[row * _STRIDE : (row + 1) * _STRIDE]
        nodes = np.stack([2 * firsts + prefixes[1] + 10, bits])
        alone = SeenLines(2 * firsts, counts + prefixes[1], runs_of(rows), nodes)
        found = few_token_attention(queries, keys, values, shared)
        assert torch.equal(found, few_token_attention(queries, own_keys, own_values, alone))


@given(st.lists(st.integers(1, 40), min_size=1, max_size=5))
def test_runs_of_a_row_are_few_and_equally_long(lengths):
    rows = np.repeat(np.arange(len(lengths)), lengths)
    runs = runs_of(rows)
    assert runs[0] == 0 and runs[-1] == len(rows)
    for row, length in enumerate(lengths):
        own = np.diff(runs)[rows[runs[:-1]] == row]
        assert own.sum() == length and len(own) == -(-length // MOST_TOKENS) and np.ptp(own) <= 1


@st.composite
def steps(draw) -> list[RowInput]:
    """Rows with a text, and a chain or tree, or the rest of one, behind it."""
    rows = []
    for slot in sorted(draw(st.sets(st.integers(0, 3), min_size=1, max_size=3))):
        tree = draw(trees(max_size=9))
        feed_length = draw(st.sampled_from([0, 1, 3, 70] if len(tree) else [1, 3, 70]))
        first_node = draw(st.integers(0, len(tree) - 1)) if not feed_length else 0
        row = CacheRow(slot, length=draw(st.integers(1, 40)), stride=_STRIDE)
        rows.append(RowInput(row, np.zeros(feed_length, np.int64), tree, first_node))
    return rows


@settings(deadline=None)
@given(steps(), st.sampled_from([None, 5, 40, 64]), st.integers(0, 2), st.sampled_from(DTYPES))
def test_a_steps_rows_see_what_masks_let_them_see(rows, window, num_skipped, dtype):
    """Those that know nothing of rows' first tokens, too."""
    whole = build_layout(arrange(rows, 100))
    layout, makes_sense = skip_prefix(whole, num_skipped), torch.from_numpy(whole.columns >= num_skipped)
    queries = numbers(layout.tokens.shape[1], 4, 16).to(dtype)
    keys, values = (numbers(4 * _STRIDE + shift, 2, 16).to(dtype)[shift:] for shift in (0, 1))
    with pytest.MonkeyPatch.context() as patch:
        expected = {}
        for is_on in (True, False):
            patch.setattr(attention_module, "can_attend", lambda *_, is_on=is_on: is_on)
            expected[is_on] = _masked_attention(queries, keys, values, layout, window, None)
    assert expected[True].isfinite().all()
    assert_close(expected[True][makes_sense], expected[False][makes_sense].double(), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", [(64,), (65, 3), (300, 70, 1)])
def test_a_node_of_a_large_tree_gets_the_bits_of_its_path_alone(sizes, dtype):
    """Whatever the number of words that the bits of a tree take, and of others beside it."""
    rng, stride, rows = np.random.default_rng(0), 400, []
    for slot, size in enumerate(sizes):
        parents = np.maximum(np.arange(-1, size - 1) - (rng.random(size) < 0.3) * rng.integers(0, 9, size), -1)
        tree = DraftTree(rng.integers(0, 9, size), parents, np.ones(size, np.float32))
        rows.append(RowInput(CacheRow(slot, length=30 + slot, stride=stride), np.zeros(1, np.int64), tree))
    layout = build_layout(arrange(rows, 100))
    lines = lines_of(layout, layout.parts, None)
    queries = numbers(sum(sizes) + len(sizes), 4, 16).to(dtype)
    keys, values = (numbers(len(sizes) * stride + shift, 2, 16).to(dtype)[shift:] for shift in (0, 1))
    found = few_token_attention(queries, keys, values, lines)
    assert_close(found, by_masks(queries, keys, values, lines), dtype)
    first = 0
    for slot, row in enumerate(rows):
        for node in range(0, len(row.tree), 7):
            path, above = [], node
            while above >= 0:
                path.append(above)
                above = int(row.tree.parents[above])
            own = [*range(31 + slot), *(31 + slot + above for above in reversed(path))]
            own_keys, own_values = (memory[[slot * stride + line for line in own]] for memory in (keys, values))
            alone = SeenLines(np.zeros(1, np.int64), np.array([len(own)]), np.array([0, 1]))
            expected = few_token_attention(queries[first + 1 + node][None], own_keys, own_values, alone)
            assert torch.equal(found[first + 1 + node][None], expected)
        first += 1 + len(row.tree)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("window", [None, 5, 40, 100])
def test_a_tokens_result_does_not_depend_on_the_others(window, groups, dtype):
    """Bit by bit: neither on who is computed with it, nor on lines that it does not see, nor on the threads."""
    layout = build_layout([[RowInput(CacheRow(0, length=160, stride=_LONG), np.zeros(14, np.int64))]])
    lines = lines_of(layout, layout.parts, window)
    assert np.diff(lines.runs).tolist() == [7, 7]
    queries = numbers(14, 2 * groups, 64).to(dtype)
    keys, values = (numbers(_LONG + shift, 2, 64).to(dtype)[shift:] for shift in (0, 1))
    together = few_token_attention(queries, keys, values, lines)
    for token in range(14):
        own = SeenLines(lines.firsts[token : token + 1], lines.counts[token : token + 1], np.array([0, 1]))
        seen = slice(own.firsts[0], own.firsts[0] + own.counts[0])
        alone = [torch.full_like(item, torch.nan) for item in (keys, values)]
        for item, whole in zip(alone, (keys, values)):
            item[seen] = whole[seen]
        assert torch.equal(few_token_attention(queries[token : token + 1], *alone, own)[0], together[token])
    for num in (1, 2, 3):
        torch.set_num_threads(num)
        assert torch.equal(few_token_attention(queries, keys, values, lines), together)


@pytest.mark.parametrize("groups", [1, 4])
@pytest.mark.parametrize(
    ("firsts", "counts"), [([0, 100], [20, 30]), ([100, 0], [30, 20]), ([0, 0, 200], [10, 150, 20]), ([0, 9], [9, 80])]
)
def test_tokens_of_a_run_may_see_no_line_in_common(firsts, counts, groups):
    lines = SeenLines(np.array(firsts), np.array(counts), np.array([0, len(firsts)]))
    queries, keys, values = numbers(len(firsts), 2 * groups, 32), numbers(220, 2, 32), numbers(221, 2, 32)[1:]
    found = few_token_attention(queries, keys, values, lines)
    assert_close(found, by_masks(queries, keys, values, lines), torch.float32)


def test_heads_are_divided_so_that_the_scores_of_prompts_stay_in_the_cache():
    tokens = np.arange(16)
    for num_lines, parts in ((500, 1), (3000, 4)):
        lines = SeenLines(np.zeros(16, np.int64), num_lines + tokens, runs_of(np.zeros(16, np.int64)))
        assert attention.division(lines, 12, 4, 64, 1)[0] == parts
    one = SeenLines(np.zeros(1, np.int64), np.array([30_000]), np.array([0, 1]))
    assert attention.division(one, 12, 4, 64, 1)[0] == 1


def test_what_is_no_number_stays_so_and_its_own():
    queries, keys, values = numbers(3, 2, 32), numbers(40, 2, 32), numbers(41, 2, 32)[1:]
    queries[1, 0, 3] = torch.nan
    lines = SeenLines(np.zeros(3, np.int64), np.array([38, 39, 40]), np.array([0, 3]))
    found = few_token_attention(queries, keys, values, lines)
    assert found[1, 0].isnan().all()
    assert found[[0, 2]].isfinite().all() and found[1, 1].isfinite().all()


def test_scores_far_apart_overflow_nowhere():
    queries, keys, values = 100 * numbers(2, 2, 32), 100 * numbers(40, 2, 32), numbers(41, 2, 32)[1:]
    lines = SeenLines(np.zeros(2, np.int64), np.array([39, 40]), np.array([0, 2]))
    assert_close(
        few_token_attention(queries, keys, values, lines), by_masks(queries, keys, values, lines), torch.float32
    )


@pytest.mark.parametrize(
    "change",
    [
        lambda q, k, v: (q.double(), k.double(), v.double()),
        lambda q, k, v: (q.bfloat16(), k, v),
        lambda q, k, v: (q[..., :24], k[..., :24].contiguous(), v[..., :24].contiguous()),
        lambda q, k, v: (q, k[..., :16], v[..., :16]),
        lambda q, k, v: (q, k[::2], v[::2]),
        lambda q, k, v: (q.to("meta"), k.to("meta"), v.to("meta")),
        lambda q, k, v: (q.clone().requires_grad_(), k, v),
        lambda q, k, v: (q, k.clone().requires_grad_(), v),
        lambda q, k, v: (q, k, v.clone().requires_grad_()),
        lambda q, k, v: (q[:, :3], k, v),
        lambda q, k, v: (q, k, v, 0.0),
    ],
    ids=(
        "float64, two dtypes, no whole vectors, smaller heads, gaps, elsewhere, gradient of queries, of keys, "
        "of values, heads that cannot be shared, no scale"
    ).split(", "),
)
def test_anything_else_is_torchs(change):
    q, k, v = numbers(3, 4, 32), numbers(10, 2, 32), numbers(10, 2, 32)
    assert can_attend(q, k, v) and can_attend(q.bfloat16(), k.bfloat16(), v.bfloat16())
    assert not can_attend(*change(q, k, v))


@pytest.mark.parametrize("architecture", ["llama", "qwen3", "mistral", "gemma2", "gemma3_text"])
@pytest.mark.parametrize("assistant", ["none", "auto"])
def test_models_attend_by_it(architecture, assistant, monkeypatch):
    """With sliding windows, too: outputs are those of plain decoding."""
    calls, attend = [], attention.few_token_attention
    monkeypatch.setattr(attention_module, "few_token_attention", lambda *given: (calls.append(1), attend(*given))[1])
    model = new_model(architecture, head_dim=16)
    ids = torch.arange(3, 12).repeat(2, 4)
    arguments = {"max_new_tokens": 24, "do_sample": False}
    with hf_smartspec.enabled(model):
        found = model.generate(ids, **arguments, assistant=assistant)
    assert len(calls) > 10
    assert torch.equal(model.generate(ids, **arguments), found)


def fail(*_):
    raise RuntimeError("no such instruction")


def a_little_wrong(queries, *_):
    return 1.001 * numbers(*queries.shape)


@pytest.mark.parametrize(("name", "replacement"), [("run_operator", fail), ("few_token_attention", a_little_wrong)])
def test_where_there_is_no_right_code_torch_serves(monkeypatch, name, replacement):
    has_attention.cache_clear()
    try:
        monkeypatch.setattr(attention, name, replacement)
        assert not can_attend(numbers(3, 4, 32), numbers(10, 2, 32), numbers(10, 2, 32))
    finally:
        has_attention.cache_clear()


@given(st.integers(1, 400), st.sampled_from([32, 64]), st.integers(0, 50))
def test_blocks_prefetch_their_later_lines_and_then_the_first_of_what_follows(num, step, first):
    last, then, found = first + num, 10_000 * 48, []
    for block in range(first, last, step):
        distance = _to_prefetch.py_func((first, last, first, last), 48, block, step, then)
        assert distance % 48 == 0
        found += [line + distance // 48 for line in range(block, min(block + step, last))]
    own = [line for line in found if line < 10_000]
    assert own == [*range(last - len(own), last)]
    assert found[len(own) :] == [*range(10_000, 10_000 + num - len(own))]
    assert num - 2 * step <= len(own) <= max(num - step - 1, 0), "later by more than a block, and by two at most"
