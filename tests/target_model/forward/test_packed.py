"""The packed forward against plain forwards of every single text that it computes at once."""

import numpy as np
import pytest
import torch
from packaging.version import Version
from transformers import PreTrainedModel

from hf_smartspec import DraftTree
from hf_smartspec.target_model.compat import TESTED_MODEL_TYPES, TRANSFORMERS
from hf_smartspec.target_model.forward import ragged
from hf_smartspec.target_model.forward.packed import PackedForward
from hf_smartspec.target_model.layout.rows import CacheRow, RowInput
from hf_smartspec.target_model.support.capabilities import can_pack

from ...covering import exhaustive
from ...models import PACKED, PLAIN, ROWWISE, VOCAB_SIZE, WINDOW, in_float64, new_model, shared_model
from ...sources import random_tree
from ...strategies import path_to

# Largest difference of two logits, as a share of their spread. Rounding makes about 5e-6 of it in float32 (and less
# than that in float64, where rotary embeddings and norms are in float32 still); one wrongly masked token makes 1e-1.
TOLERANCE = 1e-4

# Options that change how attention is computed: name -> (architecture, changed options).
VARIANTS = {
    "eager": ("llama", {"attn_implementation": "eager"}),
    "one key/value head": ("llama", {"num_key_value_heads": 1}),
    "no grouped heads": ("llama", {"num_key_value_heads": 4}),
    "scaled by layer": ("gpt2", {"scale_attn_by_inverse_layer_idx": True}),
    "unscaled": ("gpt2", {"scale_attn_weights": False}),
    "upcast": ("gpt2", {"reorder_and_upcast_attn": True}),
    "several heads": ("gpt_bigcode", {"multi_query": False}),
    "norm of queries": ("phi", {"qk_layernorm": True}),
    "norm of heads": ("stablelm", {"qk_layernorm": True}),
    "norm of cohere": ("cohere", {"use_qk_norm": True}),
    "parallel residual": ("stablelm", {"use_parallel_residual": True}),
    "clipped": ("olmo", {"clip_qkv": 0.5}),
    "multipliers": ("granite", {"attention_multiplier": 0.3, "residual_multiplier": 0.5, "logits_scaling": 2.0}),
    "yarn": (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e4,
                "factor": 4.0,
                "original_max_position_embeddings": 256,
            }
        },
    ),
    "linear rope": ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}}),
    "query scale": ("gemma2", {"query_pre_attn_scalar": 4}),
    "no soft cap": ("gemma2", {"attn_logit_softcapping": None}),
}

EXAMPLE_TREES = (
    DraftTree(np.array([5, 6, 7, 8, 9]), np.array([-1, -1, 0, 1, 2]), np.ones(5, np.float32)),
    DraftTree.chain([11, 12, 13]),
    DraftTree.empty(),
)


class Texts:
    """Rows of a packed forward together with their texts, and the plain logits that they must have."""

    def __init__(self, model: PreTrainedModel, **options):
        self.model, self.packed = model, PackedForward(model, **options)
        self.texts: dict[CacheRow, list[int]] = {}
        self.num_compared = 0

    def add(self) -> CacheRow:
        row = self.packed.add()
        self.texts[row] = []
        return row

    def remove(self, row: CacheRow) -> None:
        self.packed.remove(row)
        del self.texts[row]

    def step(self, rows, feeds, trees, paths) -> None:
        """One forward, compared at every node; then the given paths are committed."""
        logits, offsets = self.packed.forward([RowInput(*item) for item in zip(rows, feeds, trees)])
        for row, feed, tree, offset in zip(rows, feeds, trees, offsets):
            self.texts[row] += feed.tolist()
            for node in range(-1, len(tree)):
                continuation = tree.tokens[path_to(tree, node)].tolist()
                self.check(logits[offset + 1 + node], self.texts[row] + continuation)
        self.packed.commit(rows, paths)
        for row, tree, path in zip(rows, trees, paths):
            self.texts[row] += tree.tokens[path].tolist()

    def check(self, actual: torch.Tensor, text: list[int]) -> None:
        expected = self.model(input_ids=torch.tensor([text])).logits[0, -1]
        error = float((actual - expected).abs().max() / expected.std())
        assert error < TOLERANCE, f"logits differ by {error:.1e} of their spread behind {text}"
        self.num_compared += 1


def run_two_steps(model: PreTrainedModel, **options) -> None:
    """Three ragged rows with a tree, a chain and nothing; one leaves, the others go on."""
    rng = np.random.default_rng(0)
    state = Texts(model, **options)
    rows = [state.add() for _ in range(3)]
    prompts = [rng.integers(3, VOCAB_SIZE, size) for size in (9, 4, 12)]
    state.step(rows, prompts, EXAMPLE_TREES, [[1, 3], [0, 1], []])
    state.remove(rows[0])
    feeds = [np.array([20]), np.array([21, 22])]
    state.step(rows[1:], feeds, [EXAMPLE_TREES[0], EXAMPLE_TREES[0]], [[0, 2, 4], []])
    state.step(rows[1:], feeds[::-1], [EXAMPLE_TREES[1], EXAMPLE_TREES[2]], [[], []])
    assert state.num_compared == (1 + 5) + (1 + 3) + 1 + 2 * (1 + 5) + (1 + 3) + 1


@pytest.mark.parametrize("architecture", PACKED)
def test_packed_logits_are_the_plain_ones(architecture):
    run_two_steps(shared_model(architecture))


@pytest.mark.parametrize("name", VARIANTS)
def test_packed_logits_under_other_options(name):
    architecture, changes = VARIANTS[name]
    model = new_model(architecture, **changes)
    assert can_pack(model)
    run_two_steps(model)


@pytest.mark.parametrize("architecture", ["llama", "mistral", "gemma2", "gpt2", "qwen2_moe+window"])
@pytest.mark.parametrize("chunk", [1, 3, 7])
def test_long_feeds_are_run_in_pieces(architecture, chunk):
    run_two_steps(shared_model(architecture), prefill_chunk=chunk, capacity=1)


def test_pieces_are_as_long_as_their_own_masks_allow(monkeypatch):
    """Whatever rows are beside them, in the step or in memory."""
    forward, planned = PackedForward(shared_model("llama"), num_rows=8, capacity=256), []
    monkeypatch.setattr(ragged, "_MASK_SIZE", 64 * forward._groups * 200)
    plan = forward.plan
    monkeypatch.setattr(
        forward, "plan", lambda inputs: planned.append([len(item.feed) for item in inputs]) or plan(inputs)
    )
    rows = [forward.add() for _ in range(8)]
    forward.forward([RowInput(rows[0], np.array([5])), RowInput(rows[-1], np.arange(200) % VOCAB_SIZE)])
    assert planned == [[64], [64], [64], [1, 8]]


@pytest.mark.parametrize("architecture", ["llama", "gemma3_text", *exhaustive(["mistral"])])
def test_random_rows_and_trees_over_many_steps(architecture):
    """Rows come and go, texts outgrow the window and the slots that they begin with many times over."""
    rng = np.random.default_rng(1)
    state = Texts(shared_model(architecture), num_rows=1, capacity=2, prefill_chunk=5)
    for _ in range(25):
        rows = list(state.texts)
        if len(rows) < 4 and (not rows or rng.random() < 0.4):
            rows.append(state.add())
        elif len(rows) > 1 and rng.random() < 0.2:
            state.remove(rows.pop(int(rng.integers(len(rows)))))
        chosen = [row for row in rows if rng.random() < 0.7] or rows[:1]
        feeds = [rng.integers(0, VOCAB_SIZE, rng.integers(1, 9)) for _ in chosen]
        trees = [random_tree(rng, int(rng.integers(0, 6))) for _ in chosen]
        paths = [path_to(tree, int(rng.integers(-1, len(tree)))) for tree in trees]
        rng.shuffle(chosen)  # the caller's order of rows need not be that of their slots
        state.step(chosen, feeds, trees, paths)
    assert max(map(len, state.texts.values())) > 4 * WINDOW
    assert len({row.stride for row in state.texts}) > 1 and state.packed.cache.num_lines > 4 * 64


@pytest.mark.parametrize("architecture", ["llama", "mistral", "gemma2", "gemma3_text"])
def test_parts_change_no_logits(architecture, monkeypatch):
    """Very ragged rows, one of them left out, with trees, chains and a long prompt: apart, and padded together."""
    rng = np.random.default_rng(2)
    lengths = [3, 90, 40, 7, 60, 8, 30]
    trees = [*EXAMPLE_TREES, DraftTree.empty(), *EXAMPLE_TREES]
    prompts = [rng.integers(3, VOCAB_SIZE, length) for length in lengths]
    feeds = [rng.integers(3, VOCAB_SIZE, num) for num in (1, 1, 2, 50, 1, 3, 1)]
    results = {}
    for call in (0, 10**9):
        monkeypatch.setattr("hf_smartspec.target_model.forward.ragged.call_columns", lambda *_, call=call: call)
        packed = PackedForward(shared_model(architecture))
        rows = [packed.add() for _ in lengths]
        packed.forward([RowInput(row, prompt) for row, prompt in zip(rows, prompts)])
        inputs = [RowInput(*item) for item in zip(rows, feeds, trees)]
        del inputs[5]
        logits, offsets = packed.forward(inputs)
        assert packed.cache.layout is not None
        assert len(packed.cache.layout.parts) == (6 if call == 0 else 1)
        results[call] = torch.cat([logits[start : start + len(x.tree) + 1] for x, start in zip(inputs, offsets)])
    torch.testing.assert_close(results[0], results[10**9], atol=1e-5 * float(results[0].std()), rtol=1e-5)


@pytest.mark.parametrize("architecture", ["llama", "mistral", "gemma2"])
def test_ragged_rows_apart_have_the_plain_logits(architecture, monkeypatch):
    monkeypatch.setattr("hf_smartspec.target_model.forward.ragged.call_columns", lambda *_: 0)
    run_two_steps(shared_model(architecture))
    run_two_steps(shared_model(architecture), prefill_chunk=3)


def test_rows_keep_their_memory_when_they_change_slots_under_a_tree():
    """The engine moves rows whose drafts are still under verification (custom processors in a batch)."""
    model = shared_model("llama")
    state = Texts(model)
    first, second, third = (state.add() for _ in range(3))
    prompts = [np.array([3, 4, 5]), np.array([6, 7]), np.array([8])]
    tree = EXAMPLE_TREES[0]
    state.packed.forward([RowInput(row, prompt, tree) for row, prompt in zip((first, second, third), prompts)])
    state.packed.cache.swap(first, second)
    state.packed.remove(second)  # in whose place the last row moves
    state.packed.commit([first, third], [[1, 3], [0, 2]])
    for row, text in ((first, [3, 4, 5, 6, 8]), (third, [8, 5, 7])):
        logits, offsets = state.packed.forward([RowInput(row, np.array([20]))])
        state.check(logits[offsets[0]], [*text, 20])


def test_a_tree_can_be_grown_level_by_level():
    """Draft models run further nodes of a tree whose first nodes are in the cache; no feed comes with them."""
    for architecture in ("llama", "mistral"):
        state = Texts(shared_model(architecture))
        row, tree = state.add(), EXAMPLE_TREES[0]
        prompt = [3, 4, 5, 6, 7, 8, 9]
        state.packed.forward([RowInput(row, np.array(prompt))])
        for first, last in ((0, 2), (2, 4), (4, 5)):
            part = tree.keep(np.arange(5) < last)
            logits, offsets = state.packed.forward([RowInput(row, np.empty(0, np.int64), part, first)])
            for line, node in enumerate(range(first, last)):
                state.check(logits[offsets[0] + line], prompt + tree.tokens[path_to(tree, node)].tolist())


@pytest.mark.parametrize("softcap", [0.5, 5.0, 50.0])
def test_soft_caps_with_large_logits(softcap):
    """Scaled-up projections drive scores far beyond the cap, where leaving it out changes everything."""
    model = new_model("gemma2", attn_logit_softcapping=softcap, final_logit_softcapping=3.0)
    for name, parameter in model.named_parameters():
        if "q_proj" in name or "k_proj" in name:
            parameter.mul_(8)
    # In float64, since scores in the hundreds leave float32 few digits for what follows.
    run_two_steps(in_float64(model))
    text = torch.arange(3, 15)[None]
    capped = model(input_ids=text).logits
    for layer in model.model.layers:
        layer.self_attn.attn_logit_softcapping = 1e6
    assert (capped - model(input_ids=text).logits).abs().max() > 1000 * TOLERANCE, "the cap must matter"


def test_windows_matter_in_these_tests():
    """The same weights with a wider window give other logits: the comparisons above would see a missing window."""
    text = torch.arange(3, 15)[None]
    for architecture in ("mistral", "gemma2", "gemma3_text", "qwen2_moe+window", "smollm3+window"):
        narrow, wide = new_model(architecture), new_model(architecture, sliding_window=500)
        assert (narrow(input_ids=text).logits - wide(input_ids=text).logits).abs().max() > 0.1


@pytest.mark.parametrize("architecture", [name for name in PACKED if "+" not in name])
def test_architectures_that_are_packed(architecture):
    assert can_pack(shared_model(architecture))


def test_listed_model_types_are_those_under_test():
    assert {shared_model(name).config.model_type for name in PACKED} >= TESTED_MODEL_TYPES


@pytest.mark.parametrize("architecture", [*ROWWISE, *PLAIN])
def test_architectures_that_must_not_be_packed(architecture):
    follows_interface = Version("5.24") <= TRANSFORMERS and architecture in ("gptj", "codegen")
    assert can_pack(shared_model(architecture)) == follows_interface


@pytest.mark.parametrize("chunk_size", [WINDOW, 8192])
def test_attention_in_chunks_is_not_packed_however_long_they_are(chunk_size):
    assert not can_pack(new_model("llama4_text", attention_chunk_size=chunk_size))


def test_probing_leaves_the_model_as_it_was():
    model = new_model("deepseek_v3").train()
    implementation = model.config._attn_implementation
    assert can_pack(model)
    assert model.training and model.config._attn_implementation == implementation
    assert all(parameter.grad is None for parameter in model.parameters())
