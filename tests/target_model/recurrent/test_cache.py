"""States of rows: after commits along trees they are those of plain forwards over the same texts."""

import copy

import numpy as np
import pytest
import torch

from hf_smartspec.cpu.recurrence import has_recurrence
from hf_smartspec.drafts.tree import DraftTree
from hf_smartspec.target_model.compat import new_cache
from hf_smartspec.target_model.forward.packed import PackedForward
from hf_smartspec.target_model.layout.rows import CacheRow, RowInput
from hf_smartspec.target_model.recurrent import state_rows
from hf_smartspec.target_model.recurrent.kept import KeptStates
from hf_smartspec.target_model.written import packed_forward, written_decoder

from ...models import RECURRENT, UNPADDED, VOCAB_SIZE, new_model, shared_model

pytestmark = pytest.mark.skipif(not RECURRENT, reason="this release's layers with states are not known")


def random_tree(rng, size):
    parents = [int(rng.integers(max(node - 4, -1), node)) for node in range(size)]
    return DraftTree(rng.integers(3, VOCAB_SIZE, size), np.array(parents, np.int64), np.ones(size, np.float32))


def path_to(tree, node):
    path = []
    while node >= 0:
        path.append(node)
        node = int(tree.parents[node])
    return path[::-1]


def check_logits(found, expected):
    assert (found - expected).abs().max() <= 1e-4 * expected.abs().max()


def check_state(found, expected):
    assert (found - expected).abs().max() <= 1e-5 * expected.abs().max().clamp(min=1)


def check_states(model, forward, row, text):
    """The row's states, exported to transformers' cache, are those of a forward over the text."""
    if model.config.model_type == "recurrent_gemma":
        return check_states_in_modules(model, forward, row, text)
    expected, found = new_cache(model), new_cache(model)
    model(torch.from_numpy(text)[None], cache=expected)
    forward.cache.export([row], [torch.arange(len(text))], len(text), found)
    for theirs, ours in zip(getattr(expected, "linear_cache", []), getattr(found, "linear_cache", []), strict=True):
        if isinstance(theirs, torch.Tensor):
            check_state(ours, theirs)
    for theirs, ours in zip(expected.layers, found.layers):
        for number, state in getattr(theirs, "conv_states", {}).items():
            if state is not None:
                check_state(ours.conv_states[number][..., 1:], state[..., 1:])
        for number, state in getattr(theirs, "recurrent_states", {}).items():
            if state is not None:
                check_state(ours.recurrent_states[number], state)


def check_states_in_modules(model, forward, row, text):
    model(torch.from_numpy(text)[None])
    cache = forward.cache
    cache._settle([row])
    for (block, _), memory in cache._states.items():
        check_state(memory[cache._entries[row]][:, 0], block.rg_lru.recurrent_states[0])
        check_state(cache._windows[block, 0][cache._entries[row]], block.conv1d_state[0].T)


_GROWING = "qwen3_5_text", "kimi_linear", "bamba", "jamba", "minimax", "recurrent_gemma", "lfm2"
WRITTEN = [(name, packed_forward) for name in ("qwen3_5_text", "qwen3_5_moe_text", "lfm2", "bamba", "nemotron_h")]


@torch.no_grad()
@pytest.mark.parametrize(
    ("architecture", "build"), [*[(name, PackedForward) for name in [*RECURRENT, *UNPADDED]], *WRITTEN]
)
def test_logits_of_trees_and_states_after_commits(architecture, build):
    """
    Rows that come and go, prompts in pieces over several chunks, trees of up to 64 nodes, branches that win, and drafts
    that fail.
    """
    model, rng = shared_model(architecture), np.random.default_rng(0)
    forward = build(model, prefill_chunk=48)
    forward.cache.chunk = 7
    forward.cache.is_prompt = lambda: torch.tensor([True])  # as for the forward over a whole text below
    texts = {forward.add(): rng.integers(3, VOCAB_SIZE, length) for length in (61, 1, 8)}
    for round_ in range(5):
        if round_ == 2:
            gone = next(iter(texts))
            forward.remove(gone)
            del texts[gone]
        if round_ == 3:
            texts[forward.add()] = rng.integers(3, VOCAB_SIZE, 20)
        trees = [random_tree(rng, int(size)) for size in rng.integers(0, 65, len(texts))]
        inputs = [RowInput(row, text[row.length :], tree) for (row, text), tree in zip(texts.items(), trees)]
        logits, offsets = forward.forward(inputs)
        paths = []
        for item, tree, offset in zip(inputs, trees, offsets):
            size = len(tree.tokens)
            node = int(rng.integers(-1, size)) if round_ else size - 1
            path = path_to(tree, node)
            text = np.concatenate([texts[item.row], tree.tokens[path]])
            expected = model(torch.from_numpy(text)[None]).logits[0, -1]
            check_logits(logits[offset + 1 + node], expected)
            texts[item.row] = np.append(text, rng.integers(3, VOCAB_SIZE))
            paths.append(path)
        forward.commit([item.row for item in inputs], paths)
        for row, text in texts.items():
            if row.length:
                check_states(model, forward, row, text[:-1])


@torch.no_grad()
@pytest.mark.parametrize(
    ("architecture", "build"),
    [*[(name, PackedForward) for name in _GROWING], *WRITTEN],
)
def test_drafts_that_grow_by_several_forwards(architecture, build):
    """Levels of different widths, rows that end early, and paths that end in every level, as draft models run."""
    model, rng = shared_model(architecture), np.random.default_rng(1)
    forward = build(model)
    forward.cache.is_prompt = lambda: torch.tensor([True])  # as for the forward over a whole text below
    forward.cache.chunk = 6
    texts = {forward.add(): rng.integers(3, VOCAB_SIZE, length) for length in (9, 3, 14)}
    for round_ in range(4):
        trees = {row: random_tree(rng, int(rng.integers(4, 11))) for row in texts}
        known = dict.fromkeys(texts, 0)
        for level in range(3):
            running = [row for number, row in enumerate(texts) if level < 2 or number != round_ % 3]
            inputs = []
            for row in running:
                tree, first = trees[row], known[row]
                # A draft model's first level has no nodes yet; a row without a draft runs beside others.
                has_nodes = level or round_ % 2
                if round_ == 3 and row is next(iter(texts)):
                    has_nodes = False
                end = min(first + (int(rng.integers(1, 5)) if has_nodes else 0), len(tree.tokens))
                if end == first and level:
                    continue
                part = DraftTree(tree.tokens[:end], tree.parents[:end], tree.probs[:end])
                inputs.append(RowInput(row, texts[row][row.length :] if not level else texts[row][:0], part, first))
                known[row] = end
            if not inputs:
                break
            logits, offsets = forward.forward(inputs)
            for item, offset in zip(inputs, offsets):
                node = len(item.tree.tokens) - 1
                text = np.concatenate([texts[item.row], trees[item.row].tokens[path_to(trees[item.row], node)]])
                expected = model(torch.from_numpy(text)[None]).logits[0, -1]
                line = offset + item.num_nodes - (0 if len(item.feed) else 1)
                check_logits(logits[line], expected)
        paths = [path_to(trees[row], int(rng.integers(-1, known[row]))) for row in texts]
        forward.commit(list(texts), paths)
        for row, path in zip(texts, paths):
            texts[row] = np.append(np.concatenate([texts[row], trees[row].tokens[path]]), rng.integers(3, VOCAB_SIZE))
            check_states(model, forward, row, texts[row][:-1])


@torch.no_grad()
def test_a_draft_that_grows_in_bfloat16_is_that_of_one_forward():
    """Compare logits, the states after the draft, and what follows, up to rounding."""
    model, rng = shared_model("qwen3_5_text", dtype=torch.bfloat16), np.random.default_rng(0)
    text, tree, found = rng.integers(3, VOCAB_SIZE, 9), random_tree(rng, 6), []
    parts = [DraftTree(tree.tokens[:end], tree.parents[:end], tree.probs[:end]) for end in (2, 6)]
    for firsts in ((0, 2), (0,)):
        forward = packed_forward(model)
        row = forward.add()
        logits = [
            forward.forward([RowInput(row, text[row.length :] if not first else text[:0], part, first)])[0]
            for first, part in zip(firsts, parts[-len(firsts) :])
        ]
        forward.commit([row], [path_to(tree, 5)])
        after = forward.forward([RowInput(row, text[:1])])[0]
        memories = [*forward.cache._windows.values(), *forward.cache._states.values()]
        found.append([torch.cat(logits), after, *memories])
    for grown, whole in zip(*found):
        torch.testing.assert_close(grown.float(), whole.float(), rtol=0.05, atol=0.05)


@torch.no_grad()
def test_pieces_of_prompts_in_bfloat16_are_as_near_to_float32_as_the_models_own_forward():
    """Run whole pieces, whose convolutions are compiled, and the rest of each prompt."""
    model, rng = new_model("qwen3_5_text").bfloat16(), np.random.default_rng(0)
    texts, found = [rng.integers(3, VOCAB_SIZE, length) for length in (40, 15, 3)], []
    wide = copy.deepcopy(model).float()
    for forward in (PackedForward(wide), PackedForward(model), packed_forward(model)):
        forward.cache.chunk = 7
        rows = [forward.add() for _ in texts]
        logits = [forward.forward([RowInput(*item) for item in zip(rows, texts)])[0]]
        logits.append(forward.forward([RowInput(row, text[:1]) for row, text in zip(rows, texts)])[0])
        found.append(torch.cat(logits).float())
    exact, own, written = found
    assert written_decoder(model) is not None and (written - exact).norm() < 1.2 * (own - exact).norm()


@pytest.mark.parametrize("name", ["A_log", "dt_bias", "norm.weight", "conv1d.weight"])
def test_weights_of_several_dtypes_are_left_to_the_models_own_forward(name):
    model = new_model("qwen3_5_text").bfloat16()
    layer = next(layer.linear_attn for layer in model.model.layers if hasattr(layer, "linear_attn"))
    parameter = layer.get_parameter(name)
    parameter.data = parameter.data.float()
    packed_forward(model)
    assert written_decoder(model) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_written_out_ones_are_not_refused(dtype):
    for (name, build), is_one_call in zip(WRITTEN, (True, False, True, True, False)):
        model = shared_model(name, dtype=dtype)
        build(model)
        decoder = written_decoder(model)
        assert decoder is not None
        if has_recurrence():
            assert (decoder._compiled is not None) == is_one_call, "heads of other sizes"


@pytest.mark.skipif(not has_recurrence(), reason="no compiled code for this CPU")
def test_torchs_default_dtype_does_not_matter_for_compiled_layers():
    plan = written_decoder(shared_model("qwen3_5_text")).plan
    try:
        torch.set_default_dtype(torch.bfloat16)
        assert all(layer.recurrence.can_compile(torch.float32) for layer in plan.layers if layer.recurrence)
    finally:
        torch.set_default_dtype(torch.float32)


@torch.no_grad()
@pytest.mark.parametrize("architecture", ["qwen3_5_text", "kimi_linear", "bamba", "lfm2"])
def test_rows_begin_with_kept_states_and_are_cut_to_them(architecture):
    """States are kept in the middle of a text, and before the last token of a feed, whatever follows it in the step."""
    model, rng = shared_model(architecture), np.random.default_rng(2)
    text = rng.integers(3, VOCAB_SIZE, 40)
    forward = PackedForward(model)
    forward.cache.chunk = 6
    row, beside = forward.add(), forward.add()
    row.marks = 19, 26, 28, 30  # the second one comes after a whole piece
    for end in (9, 20, 27, 29, 31):
        tree = random_tree(rng, 0 if end in (20, 29) else 5)
        inputs = [RowInput(beside, text[beside.length : end]), RowInput(row, text[row.length : end], tree)]
        forward.forward(inputs)
        forward.commit([beside, row], [[], path_to(tree, 4) if end == 31 else []])
        if end == 9:
            forward.cache.keep(row)
    for length, known in ((9, 9), (18, 9), (19, 19), (27, 26), (29, 28), (31, 30)):
        other = forward.add()
        assert forward.cache.reusable(row, length) == known
        forward.cache.copy(row, other, known)
        other.length = known
        check_states(model, forward, other, text[:known])
        forward.forward([RowInput(other, text[known:])])
        check_states(model, forward, other, text)
        forward.cut(other, length)
        assert other.length == known, "a state cannot be taken back any further"
        check_states(model, forward, other, text[:known])
        forward.cache.rest(other)
        forward.cut(other, known)
        check_states(model, forward, other, text[:known])
        forward.remove(other)
    forward.cut(row, 8)
    assert row.length == 0 and not len(forward.cache.kept)
    forward.forward([RowInput(row, text)])
    check_states(model, forward, row, text)


def test_of_many_kept_states_those_stay_that_save_most():
    kept, row, other = KeptStates(), CacheRow(0), CacheRow(1)
    for length in (100, 110, 300, 400, 500, 600, 700, 800):
        kept.add(row, length, [])
    assert [kept.last(row, length) for length in (99, 100, 299, 900)] == [0, 100, 110, 800]
    kept.add(row, 805, [])
    assert kept.last(row, 299) == 100 and kept.last(row, 900) == 805, (
        "only ten tokens are run again without that at 110"
    )
    kept.inherit(other, row, 500)
    assert kept.last(other, 900) == 500 and len(kept) == 8, "shared ones count once"
    kept.cut(row, 99)
    assert not kept.last(row, 900) and len(kept) == 4
    kept.cut(other)
    assert not len(kept) and not kept._rows


def test_drafts_that_grew_apart_are_refused():
    """A tail goes on from those of one earlier step."""
    model, text = shared_model("qwen3_next"), np.arange(5, 15)
    forward = PackedForward(model)
    rows = [forward.add(), forward.add()]
    tree = DraftTree.chain([3, 4])
    first = DraftTree(tree.tokens[:1], tree.parents[:1], tree.probs[:1])
    with torch.no_grad():
        for row in rows:
            forward.forward([RowInput(row, text, first)])
        with pytest.raises(NotImplementedError, match="grow together"):
            forward.forward([RowInput(row, text[:0], tree, 1) for row in rows])


@torch.no_grad()
@pytest.mark.parametrize(("kept", "length"), [((), 0), ((4,), 4), ((4, 12), 12)])
def test_rows_of_a_failed_forward_begin_at_kept_states(kept, length, monkeypatch):
    """Its first layers have run the tokens, and the last ones have not; pieces of prompts are in the states at once."""
    model, text = new_model("qwen3_next"), np.arange(5, 45)
    forward = PackedForward(model)
    forward.cache.chunk = 7
    rows = [forward.add(), forward.add()]
    for end in (4, 12):
        forward.forward([RowInput(row, text[row.length : end]) for row in rows])
        if end in kept:
            forward.cache.keep(rows[0])
    with monkeypatch.context() as patch, pytest.raises(TypeError):
        patch.setattr(model.model.norm, "forward", None)
        forward.forward([RowInput(rows[0], text[12:], random_tree(np.random.default_rng(0), 5))])
    assert [row.length for row in rows] == [length, 12] and not rows[0].num_nodes
    assert len(forward.cache.kept) == len(kept)
    forward.forward([RowInput(row, text[row.length :]) for row in rows])
    for row in rows:
        check_states(model, forward, row, text)


@torch.no_grad()
def test_states_may_be_written_to_outside_inference_mode():
    model, text = shared_model("qwen3_next"), np.arange(5, 25)
    forward = PackedForward(model)
    with torch.inference_mode():
        row, _ = forward.add(), forward.add()
        forward.forward([RowInput(row, text[:9])])
    forward.forward([RowInput(row, text[9:])])
    check_states(model, forward, row, text)


@torch.no_grad()
def test_a_row_without_memory_for_its_states_is_not_added(monkeypatch):
    model, text = shared_model("qwen3_next"), np.arange(5, 25)
    forward = PackedForward(model)
    row = forward.add()
    forward.forward([RowInput(row, text)])
    with monkeypatch.context() as patch, pytest.raises(TypeError):
        patch.setattr(state_rows, "zeros", None)
        forward.add()
    assert forward.cache.rows == [row]
    other = forward.add()
    forward.forward([RowInput(other, text)])
    for item in (row, other):
        check_states(model, forward, item, text)


@torch.no_grad()
def test_convolutions_of_one_token_have_no_windows():
    model, text = new_model("lfm3", conv_L_cache=1), np.arange(3, 40)
    forward = packed_forward(model)
    row = forward.add()
    logits, _ = forward.forward([RowInput(row, text)])
    check_logits(logits[-1], model(torch.from_numpy(text)[None]).logits[0, -1])
    logits, _ = forward.forward([RowInput(row, text[:1], random_tree(np.random.default_rng(0), 5))])
    check_logits(logits[0], model(torch.from_numpy(np.append(text, text[0]))[None]).logits[0, -1])
