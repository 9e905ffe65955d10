"""Decoders as one compiled program: the numbers of the decoder that runs layer by layer, to the last bit."""

import copy
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from transformers.utils.logging import warning_once

import hf_smartspec
from hf_smartspec.cpu.few_tokens import has_kernels, most_tokens
from hf_smartspec.cpu.kernels.recur import scratch_size
from hf_smartspec.drafts.tree import DraftTree
from hf_smartspec.target_model.forward.packed import PackedForward
from hf_smartspec.target_model.layout.rows import RowInput
from hf_smartspec.target_model.written import compiled as compiled_module
from hf_smartspec.target_model.written import packed_forward, written_decoder
from hf_smartspec.target_model.written.recognition import make_plan

from ...covering import exhaustive
from ...models import GEMMA_4, RECURRENT, new_model
from .test_written import TREE, logits_of

pytestmark = pytest.mark.skipif(not has_kernels(torch.float32), reason="there is no compiled code for this CPU")

# Biases, norms of heads, of all heads together, after attention and MLP, shifted; windows, tied heads, layers without
# rotation, parts of heads rotated, scaled residuals; layer norms, also without weights, MLPs without gates, attention
# and MLPs side by side; rotations of neighbours, in float32, soft caps; learnt positions, transposed weights, queries
# and keys by head; delta rules, gates of heads, and short convolutions; experts, with one that is shared, with biases,
# beside MLPs; sinks; norms of values, sizes of heads by layer, inputs of layers, factors of outputs, layers that attend
# to keys and values of others or whose values are keys.
NAMES = "llama qwen2 qwen3 mistral gemma gemma3_text olmo2 smollm3 phi3 granite seed_oss exaone4".split()
NAMES += "stablelm starcoder2 phi cohere cohere2 glm4 ernie4_5 gemma2 gpt2 opt gpt_neox olmo".split()
NAMES += ["nemotron", "hunyuan_v1_dense", "phimoe", "apertus"]
NAMES += "qwen3_moe mixtral olmoe granitemoe qwen2_moe gpt_oss".split()
NAMES += GEMMA_4
NAMES += [name for name in ("qwen3_5_text", "qwen3_next", "lfm2", "lfm2_moe") if name in RECURRENT]
SHORT_WINDOWS = "mistral", "gemma3_text", "exaone4"  # shorter than trees may be deep: those are masked
# Options of those whose configs have no size of heads, or short windows by default.
_WIDE = "phi3 stablelm phi cohere cohere2 gpt_neox lfm2 lfm2_moe mixtral olmoe olmo nemotron phimoe apertus".split()
OWN = {name: {"hidden_size": 64} for name in _WIDE}
OWN |= {name: {"head_dim": 16, "sliding_window": 64} for name in ("gemma2", "starcoder2", "gpt_oss")}
OWN |= {name: {"head_dim": 16, "global_head_dim": 32, "sliding_window": 64} for name in GEMMA_4}
OWN |= {name: OWN[name] | {"hidden_size_per_layer_input": 16} for name in GEMMA_4 if "equal" not in name}
OWN["qwen3_next"] = {"head_dim": 16, "linear_key_head_dim": 16, "linear_value_head_dim": 32}
OWN["cohere2"] |= {"sliding_window": 64}
OWN |= {"gpt2": {"n_embd": 64}, "opt": {"hidden_size": 64, "word_embed_proj_dim": 64}}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}
YARN["original_max_position_embeddings"] = 32
# Options of these kinds.
OPTIONS = [
    ("gpt_neox", {"use_parallel_residual": False}),
    ("gpt_neox", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25}}),
    ("stablelm", {"use_parallel_residual": True}),
    ("phi", {"qk_layernorm": True}),
    ("gpt2", {"scale_attn_by_inverse_layer_idx": True, "reorder_and_upcast_attn": True}),
    ("gpt2", {"scale_attn_weights": False, "activation_function": "relu"}),
    ("opt", {"activation_function": "gelu", "enable_bias": False}),
    ("gemma2", {"attn_logit_softcapping": 3.0}),
    ("qwen3_moe", {"norm_topk_prob": True, "num_experts_per_tok": 4}),
    ("qwen3_moe", {"mlp_only_layers": [0]}),
    ("gpt_oss", {"initializer_range": 1.0, "swiglu_limit": 0.7, "swiglu_alpha": 0.9}),  # sinks and limits that count
    ("gpt_oss", {"rope_parameters": YARN, "num_experts_per_tok": 4}),
]
if "lfm2" in RECURRENT:
    OPTIONS.append(("lfm2", {"conv_bias": True, "conv_L_cache": 4}))
    OPTIONS.append(("qwen3_next", {"linear_num_key_heads": 1, "linear_value_head_dim": 16}))
DTYPES = (torch.float32, torch.bfloat16)


def model_of(name: str, dtype: torch.dtype = torch.float32, **options):
    options = OWN.get(name, {"head_dim": 16}) | options
    return new_model(name, **options).to(dtype)


def by_layers(model):
    """The same model, run layer by layer."""
    forward = packed_forward(model)
    written_decoder(model).__dict__["_compiled"] = None
    return forward


def check_program(model, programs) -> None:
    """Check that every bit of a program is that of the layers, whose logits are the model's own in float32."""
    own = logits_of(PackedForward(model))
    other, forward = copy.deepcopy(model), tried(model)
    programs.clear()
    found = logits_of(forward)
    assert len(programs) == 2 and torch.equal(found, logits_of(by_layers(other)))
    if model.dtype == torch.float32:
        assert (found - own).abs().max() <= 1e-5 * max(own.abs().max(), 1)


def tried(model):
    """A forward of the model whose program has been compared with the layers."""
    forward = packed_forward(model)
    row = forward.add()
    forward.forward([RowInput(row, np.arange(3, 5))])
    forward.remove(row)
    assert written_decoder(model)._is_tried
    return forward


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", NAMES)
def test_every_bit_is_that_of_the_layers(name, dtype, programs):
    """Ragged rows, trees, chains, and an accepted path."""
    model = model_of(name, dtype)
    other = copy.deepcopy(model)
    forward = tried(model)
    programs.clear()
    found = logits_of(forward)
    assert len(programs) == (0 if name in SHORT_WINDOWS else 2)
    assert torch.equal(found, logits_of(by_layers(other)))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("name", "options"), OPTIONS)
def test_every_bit_of_further_kinds_is_that_of_the_layers(name, options, dtype, programs):
    """Whose layers are also the models' own, in float32."""
    model = model_of(name, dtype, **options)
    check_program(model, programs)


@pytest.mark.parametrize("dtype", DTYPES)
def test_any_number_of_tokens(dtype, programs):
    """Alone, few, more than a tile has, more than stay in the cache, so that long rows are read in parts."""
    model = model_of("llama", dtype, intermediate_size=2096)
    forward, other = tried(model), by_layers(copy.deepcopy(model))
    programs.clear()
    for num in (1, 2, 5, 7, 8, 13, 40, 64):
        rows = forward.add(), other.add()
        found, expected = (
            item.forward([RowInput(row, np.arange(3, 3 + num))])[0] for item, row in zip((forward, other), rows)
        )
        assert torch.equal(found, expected)
    assert programs == [num for num in (1, 2, 5, 7, 8, 13, 40, 64) if num <= most_tokens(dtype)]


@pytest.mark.parametrize("layers", [{0}, {1, 2}, {-1}, {-1, 0, 2}])
@pytest.mark.parametrize("name", ["llama", *GEMMA_4[1:2]])
def test_hidden_states_are_those_of_the_layers(name, layers):
    model = model_of(name)
    forward, other = tried(model), by_layers(copy.deepcopy(model))
    found = []
    for item in (forward, other):
        row = item.add()
        with item.taps.taking(layers) as fed:
            logits, _ = item.forward([RowInput(row, np.arange(3, 12), DraftTree.chain(np.arange(4, 7)))])
        found.append((logits, fed[row].pieces[0].states))
    (logits, states), (expected_logits, expected) = found
    assert torch.equal(logits, expected_logits) and states.keys() == expected.keys() == layers
    assert all(torch.equal(states[layer], expected[layer]) for layer in layers)


@pytest.mark.parametrize("layers", [set(), {0, 1}, {2}, {-1}])
def test_the_last_layer_computes_no_more_than_is_asked_for(layers):
    """Compute keys and values alone of tokens whose logits and last states nobody asks for."""
    forward = tried(model_of("llama"))
    row, run = forward.add(), RowInput(forward.add(), np.arange(3, 12), DraftTree.chain(np.arange(4, 7)))
    with forward.taps.taking(layers):
        forward.forward([RowInput(row, np.arange(2, 7)), run])
    compiled = written_decoder(forward.model)._compiled
    (program,) = [
        item for (item,) in compiled._free.values() if (item.written.layers, item.written.room) == (layers, 32)
    ]
    counts = [program.token_counts[number] for number in program.written.multiplied]
    num_short = 1 if layers & {2, -1} else 4  # the head, and a layer's attention output, inputs and output of its MLP
    assert counts == [17] * (len(counts) - num_short) + [5] * num_short


@pytest.mark.parametrize("number", [2, *exhaustive([1], [3])])
def test_any_number_of_threads(number):
    model = model_of("qwen3", torch.bfloat16)
    expected = logits_of(by_layers(copy.deepcopy(model)))
    torch.set_num_threads(number)
    assert torch.equal(logits_of(tried(model)), expected)


@pytest.mark.skipif("qwen3_5_text" not in RECURRENT, reason="this release's layers with states are not known")
def test_each_thread_that_stores_states_has_memory_of_its_own():
    """Also of models so small that one thread runs them."""
    torch.set_num_threads(2)
    forward = tried(model_of("qwen3_5_text"))
    forward.forward([RowInput(forward.add(), np.arange(3, 8), TREE)])
    short, (*_, states) = forward.cache.step.short, forward.cache._states.values()
    assert short.operators and short.num_threads == 2
    assert len(short.held[-1]) == 2 * scratch_size(short.parents.shape[1], short.most_states, *states.shape[2:])


@pytest.mark.parametrize("name", SHORT_WINDOWS)
def test_chains_in_windows(name, programs):
    model = model_of(name)
    forward, other, found = tried(model), by_layers(copy.deepcopy(model)), []
    programs.clear()
    for item in (forward, other):
        row = item.add()
        logits = [item.forward([RowInput(row, np.arange(3, 23), DraftTree.chain([4, 8]))])[0]]
        item.commit([row], [[0]])
        found.append(torch.cat([*logits, item.forward([RowInput(row, np.arange(5, 6))])[0]]))
    assert programs == [22, 1]
    assert torch.equal(*found)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_that_share_a_prefix(dtype, programs):
    """Their bits are those of rows that share nothing."""
    model = model_of("llama", dtype)
    forward, text = tried(model), np.arange(3, 43)
    base, alone = forward.add(), forward.add()
    logits, (_, expected) = forward.forward([RowInput(base, text), RowInput(alone, np.append(text, [9, 11]))])
    expected = logits[expected]
    sharers = [forward.add() for _ in range(2)]
    for row in sharers:
        row.prefix_row, row.prefix_len, row.length = base, len(text), len(text)
    programs.clear()
    logits, offsets = forward.forward([RowInput(row, np.array([9, 11])) for row in sharers])
    assert len(logits) == 2 and all(torch.equal(logits[start], expected) for start in offsets)
    items = [RowInput(row, np.array([13]), TREE) for row in (*sharers, alone)]
    logits, offsets = forward.forward(items)
    assert programs == [4, 15]
    first, second, expected = (logits[start : start + 5] for start in offsets)
    assert torch.equal(first, expected) and torch.equal(second, expected)


def test_several_callers_at_the_same_time():
    model = model_of("llama")
    forwards = [tried(model) for _ in range(4)]
    expected = logits_of(by_layers(copy.deepcopy(model)))
    with ThreadPoolExecutor(4) as pool:
        assert all(torch.equal(found, expected) for found in pool.map(logits_of, forwards))


def test_weights_changed_in_place_are_read_anew():
    model = model_of("llama")
    forward = tried(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.1)
    assert torch.equal(logits_of(forward), logits_of(by_layers(copy.deepcopy(model))))


def can_compile(model) -> bool:
    plan, _ = make_plan(model)
    for maps in plan.laid_out:
        maps.lay_out()
    return compiled_module.can_compile(plan)


def test_weights_of_other_dtypes_and_single_biases_are_left_to_the_layers():
    """Compiled code would read other numbers, or beyond the memory."""
    for change in (
        lambda model: model.model.norm.to(torch.bfloat16),
        lambda model: model.model.layers[1].input_layernorm.to(torch.bfloat16),
        lambda model: setattr(model.model.layers[0].self_attn.o_proj, "bias", torch.nn.Parameter(torch.ones(1))),
        lambda model: setattr(model.lm_head, "weight", torch.nn.Parameter(model.lm_head.weight.data.bfloat16())),
    ):
        model = model_of("llama").requires_grad_(False)
        assert can_compile(model)
        change(model)
        assert not can_compile(model)


def test_a_smaller_head_at_the_same_address_is_seen():
    model = model_of("llama")
    tried(model)
    with torch.no_grad():
        model.lm_head.weight.data = model.lm_head.weight.data[:50]
    forward = packed_forward(model)
    assert forward.forward([RowInput(forward.add(), np.arange(3, 5))])[0].shape == (1, 50)


def grown(cache):
    cache.add(10 * cache.num_lines)


def shrunk(cache):
    cache.remove(cache.add(10 * cache.num_lines))
    cache.shrink(cache.num_taken)


def dropped(cache):
    cache.layers.clear()


def replaced(cache):
    cache.layers = []


def borrowed(cache):
    memories = [torch.zeros_like(memory) for layer in cache.layers for memory in layer.memories]
    cache.layers.clear()
    assert cache.borrow(memories)


@pytest.mark.parametrize("change", [grown, shrunk, dropped, replaced, borrowed])
def test_keys_and_values_that_move_are_found(change, programs):
    """Whatever replaces memory between two forwards: the next one writes to the new one, as the layers do."""
    model = model_of("llama")
    forward, other = tried(model), by_layers(copy.deepcopy(model))
    memories, programs[:] = [], []
    for item in (forward, other):
        row = item.add()
        item.forward([RowInput(row, np.arange(3, 12))])
        before = {memory.data_ptr(): memory for layer in item.cache.layers for memory in layer.memories}
        copies = [memory.clone() for memory in before.values()]
        change(item.cache)
        item.forward([RowInput(row, np.array([7]))])
        memories.append([memory for layer in item.cache.layers for memory in layer.memories])
        assert not before.keys() & {memory.data_ptr() for memory in memories[-1]}
        assert all(map(torch.equal, before.values(), copies)), "freed memory is not written to"
    assert all(map(torch.equal, *memories)) and len(programs) == 2


@pytest.mark.skipif("qwen3_5_text" not in RECURRENT, reason="this release's layers with states are not known")
@pytest.mark.parametrize("change", ["grown", "forgotten"])
def test_states_that_move_are_found(change, programs):
    model = model_of("qwen3_5_text")
    forward, other = tried(model), by_layers(copy.deepcopy(model))
    logits, programs[:] = [], []
    for item in (forward, other):
        row = item.add()
        item.forward([RowInput(row, np.arange(3, 12))])
        before = [*item.cache._windows.values(), *item.cache._states.values()]
        copies = [memory.clone() for memory in before]
        if change == "grown":
            rows = [item.add() for _ in range(4)]
            logits.append(item.forward([RowInput(own, np.array([7])) for own in (*rows, row)])[0])
        else:
            item.cache.forget()
            item.cut(row, 0)
            logits.append(item.forward([RowInput(row, np.arange(4, 13))])[0])
        after = [*item.cache._windows.values(), *item.cache._states.values()]
        assert not {memory.data_ptr() for memory in before} & {memory.data_ptr() for memory in after}
        assert all(map(torch.equal, before, copies)), "freed memory is not written to"
    assert torch.equal(*logits) and len(programs) == 2


def test_weights_that_move_are_found():
    model = model_of("llama")
    forward = tried(model)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.mlp.down_proj.weight.data = layer.mlp.down_proj.weight.data * 1.5
    assert torch.equal(logits_of(forward), logits_of(by_layers(copy.deepcopy(model))))


@pytest.mark.parametrize("name", ["nemotron", "phimoe", "olmo"])
def test_other_decoders_run_layer_by_layer(name, programs):
    """Try experts that are chosen otherwise, and other norms."""
    logits_of(packed_forward(new_model(name)))
    assert not programs


def test_a_program_with_other_results_is_not_used(monkeypatch, caplog):
    model = model_of("llama")
    expected = logits_of(by_layers(copy.deepcopy(model)))
    run = compiled_module.CompiledDecoder.run

    def other(self, given, *rest):
        logits = run(self, given, *rest)
        for layer in given.cache.layers:  # what it writes is wrong, too
            layer.keys.mul_(2), layer.values.fill_(torch.nan)
        return logits * 1.0001

    monkeypatch.setattr(compiled_module.CompiledDecoder, "run", other)
    warning_once.cache_clear()  # other tests may have caused the same warning
    forward = packed_forward(model)
    assert torch.equal(logits_of(forward), expected) and written_decoder(model)._compiled is None
    assert "layer by layer" in caplog.text


@pytest.mark.parametrize("dtype", DTYPES)
def test_draft_models_run_as_programs(dtype, monkeypatch):
    depths, run = [], compiled_module.CompiledDecoder.run
    monkeypatch.setattr(
        compiled_module.CompiledDecoder,
        "run",
        lambda self, *given: (depths.append(len(self.plan.layers)), run(self, *given))[1],
    )
    model, draft = model_of("llama", dtype, num_hidden_layers=3), model_of("llama", dtype, num_hidden_layers=1)
    with hf_smartspec.enabled(model):
        model.generate(torch.arange(3, 12)[None], max_new_tokens=12, do_sample=False, assistant=draft)
    assert depths.count(1) > depths.count(3) > 0


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("assistant", ["none", "auto"])
def test_tokens_are_those_of_plain_decoding(assistant, batch, programs):
    model, ids = model_of("llama"), torch.arange(3, 12).repeat(batch, 4)
    arguments = {"max_new_tokens": 24, "do_sample": False}
    with hf_smartspec.enabled(model):
        found = model.generate(ids, **arguments, assistant=assistant)
    assert programs and max(programs) <= most_tokens(torch.float32)
    assert torch.equal(model.generate(ids, **arguments), found)
