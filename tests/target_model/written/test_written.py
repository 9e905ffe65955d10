"""Decoders written out: the same logits from the model's own weights, and its own forward where that does more."""

import copy
import gc
import weakref

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM

from hf_smartspec.drafts.tree import DraftTree
from hf_smartspec.target_model.forward.packed import PackedForward
from hf_smartspec.target_model.layout.rows import RowInput
from hf_smartspec.target_model.written import packed_forward, written_decoder, written_decoders
from hf_smartspec.target_model.written.parts import Fused

from ...models import GEMMA_4, new_model, shared_model
from .deepseek import LATENT

WRITTEN = (
    "llama mistral qwen2 qwen3 qwen3_moe gemma gemma2 gemma3_text phi3 olmo olmo2 olmo3 mixtral granite granitemoe "
    "cohere cohere2 stablelm smollm3 phi starcoder2 glm glm4 helium qwen2_moe olmoe nemotron ernie4_5 seed_oss "
    "ministral hunyuan_v1_dense phimoe apertus exaone4 gpt2 opt gpt_neox gpt_oss"
).split()
WRITTEN += ["deepseek_v3"] if LATENT else []
WRITTEN += GEMMA_4
TREE = DraftTree(np.array([5, 9, 7, 11]), np.array([-1, 0, 0, 2]), np.ones(4, np.float32))


def logits_of(forward) -> torch.Tensor:
    """Ragged rows, behind one another a tree, a chain, and an accepted path."""
    rows, found = [forward.add() for _ in range(3)], []
    texts = [np.arange(3, 3 + length) for length in (21, 9, 1)]
    for trees in ((TREE, DraftTree.empty(), TREE), (DraftTree.chain([4, 8]), TREE, TREE)):
        items = [RowInput(row, text[row.length :], tree) for row, text, tree in zip(rows, texts, trees)]
        logits, offsets = forward.forward(items)
        found.append(torch.cat([logits[start : start + 1 + len(item.tree)] for item, start in zip(items, offsets)]))
        paths = [[0, 2] if tree is TREE else [] for tree in trees]
        forward.commit(rows, paths)
        texts = [np.concatenate([text, tree.tokens[path], [6]]) for text, tree, path in zip(texts, trees, paths)]
    return torch.cat(found)


def are_near(actual: torch.Tensor, expected: torch.Tensor) -> bool:
    """Return whether logits differ by no more than sums in another order do, whose error is relative to the largest."""
    return bool((actual - expected).abs().max() <= 1e-5 * max(expected.abs().max(), 1))


def is_written(model) -> bool:
    return written_decoder(model) is not None


@pytest.mark.parametrize("name", WRITTEN)
@torch.no_grad()
def test_logits_are_the_models_own(name):
    model = shared_model(name)
    assert is_written(model)
    assert are_near(logits_of(packed_forward(model)), logits_of(PackedForward(model)))


def hooked(module):
    module.register_forward_hook(lambda module, args, output: output * 2)


def renormalized(module):
    module.max_norm = 0.1


def scaled(module):
    module.forward = lambda tokens: nn.functional.embedding(tokens, module.weight) * 3


@pytest.mark.parametrize("change", [hooked, renormalized, scaled])
@torch.no_grad()
def test_embeddings_that_do_more_than_look_up_are_called(change):
    model = new_model("llama", tie_word_embeddings=False)
    decoder, tokens, positions = written_decoder(model), torch.tensor([[3, 50, 3]]), torch.arange(3)[None]
    before = decoder.embed(tokens, positions)
    assert torch.equal(before, model.model.embed_tokens(tokens)[0])
    change(model.model.embed_tokens)
    found = decoder.embed(tokens, positions)
    assert torch.equal(found, model.model.embed_tokens(tokens)[0]) and not torch.equal(found, before)


@torch.no_grad()
def test_half_precision_is_rounded_where_the_model_rounds():
    model = copy.deepcopy(shared_model("llama")).to(torch.bfloat16)
    assert is_written(model)
    expected, actual = logits_of(PackedForward(model)).float(), logits_of(packed_forward(model)).float()
    assert (actual - expected).abs().max() <= 0.02 * expected.std()


class _Counter(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.calls = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.calls += 1
        return function(*args, **(kwargs or {}))


def test_calls_of_a_layer_are_little_more_than_half_as_many():
    """In inference mode both, in which no call is taken apart before it is counted."""
    counts = []
    for num_layers in (1, 3):
        model = new_model("llama", num_hidden_layers=num_layers)
        forwards = PackedForward(model), packed_forward(model)
        with torch.inference_mode():
            counts.append([_num_calls(forward) for forward in forwards])
    own, written = (after - before for before, after in zip(*counts))
    assert 0 < written <= 0.55 * own
    assert all(written < own for own, written in counts)


def _num_calls(forward: PackedForward) -> int:
    """Of torch, for one token."""
    row = forward.add()
    forward.forward([RowInput(row, np.arange(5))])
    with _Counter() as counter:
        forward.forward([RowInput(row, np.arange(1))])
    return counter.calls


@torch.no_grad()
def test_fused_weights_are_held_once_and_changes_in_place_are_seen():
    model = new_model("llama", dtype=torch.float64)
    size = sum(parameter.numel() for parameter in model.parameters())
    assert is_written(model)
    storages = {item.untyped_storage().data_ptr(): item.untyped_storage().nbytes() for item in model.parameters()}
    assert sum(storages.values()) == 8 * size
    for parameter in model.parameters():
        parameter.mul_(1.1)
    assert torch.allclose(logits_of(packed_forward(model)), logits_of(PackedForward(model)), rtol=0.0, atol=1e-9)
    assert is_written(model)


@torch.no_grad()
def test_fused_weights_are_saved_copied_and_loaded_as_ever(tmp_path):
    model = new_model("llama")
    assert is_written(model)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    clone = copy.deepcopy(model)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    for other in (loaded, clone):
        assert all(torch.equal(value, state[name]) for name, value in other.state_dict().items())
        assert is_written(other)
    expected = logits_of(packed_forward(model))
    clone.model.layers[0].self_attn.q_proj.weight.zero_()
    assert torch.equal(logits_of(packed_forward(model)), expected)
    model.load_state_dict(clone.state_dict())
    assert not torch.equal(logits_of(packed_forward(model)), expected)


@torch.no_grad()
def test_models_that_move_are_recognised_anew():
    model = new_model("llama")
    first = written_decoder(model)
    model.to(torch.float64)
    second = written_decoder(model)
    assert second is not None and second is not first
    expected = logits_of(PackedForward(model))
    assert expected.dtype == torch.float64
    assert torch.allclose(logits_of(packed_forward(model)), expected)


@torch.no_grad()
def test_hooks_are_called_while_they_are_there():
    model, seen = new_model("llama"), []
    assert is_written(model)
    handle = model.model.layers[0].self_attn.q_proj.register_forward_hook(lambda *args: seen.append(1))
    assert not is_written(model)
    logits_of(packed_forward(model))
    assert seen
    handle.remove()
    assert is_written(model)


@torch.no_grad()
def test_hooks_that_transformers_leaves_behind_sleep():
    model = new_model("llama")
    model(torch.tensor([[3, 4]]), output_hidden_states=True)
    assert model.model.layers[0]._forward_hooks
    assert is_written(model)


@torch.no_grad()
def test_a_replaced_forward_is_called():
    model = new_model("llama")
    assert is_written(model)
    mlp = model.model.layers[1].mlp
    mlp.forward = torch.zeros_like
    assert not is_written(model)
    del mlp.forward
    assert is_written(model)
    mlp.forward = mlp.forward  # what patches leave behind that have been taken back
    assert is_written(model)


class _Adapted(nn.Module):
    def __init__(self, base: nn.Linear):
        super().__init__()
        self.base, self.scale = base, 1.0

    def forward(self, x):
        return self.base(x) * self.scale


@torch.no_grad()
def test_replaced_linear_maps_are_called_as_they_are():
    model = new_model("llama")
    assert is_written(model)
    before = logits_of(packed_forward(model))
    attention = model.model.layers[0].self_attn
    attention.q_proj = _Adapted(attention.q_proj).eval()
    assert is_written(model)
    assert torch.allclose(logits_of(packed_forward(model)), before, atol=1e-5)
    attention.q_proj.scale = 3.0  # an adapter that is switched
    after = logits_of(packed_forward(model))
    assert torch.allclose(after, logits_of(PackedForward(model)), atol=1e-5)
    assert not torch.allclose(after, before, atol=1e-3)


@torch.no_grad()
def test_dropout_in_training_is_the_models_own():
    model = new_model("phi3")
    assert is_written(model)
    model.train()
    assert is_written(model)  # nothing is dropped
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.5
    assert not is_written(model)
    model.eval()
    assert is_written(model)
    model.model.layers[0].train()
    assert not is_written(model)


def _swap_layers(model):
    layers = model.model.layers
    layers[0], layers[1] = layers[1], layers[0]


def _drop_layer(model):
    del model.model.layers[-1]
    model.config.num_hidden_layers -= 1


CHANGES = {
    "hook on an activation": lambda model: model.model.layers[0].mlp.act_fn.register_forward_hook(lambda *x: x[2] * 2),
    "another activation": lambda model: setattr(model.model.layers[0].mlp.act_fn, "forward", torch.tanh),
    "layers change places": _swap_layers,
    "a layer less": _drop_layer,
    "eps": lambda model: setattr(model.model.norm, "variance_epsilon", 0.5),
    "scaling": lambda model: setattr(model.model.layers[1].self_attn, "scaling", 3.0),
    "transposed": lambda model: setattr(
        model.model.layers[0].self_attn.o_proj.weight, "data", model.model.layers[0].self_attn.o_proj.weight.data.t()
    ),
    "class": lambda model: setattr(model.model.layers[0].mlp, "__class__", _Doubled),
}


class _Doubled(type(shared_model("llama").model.layers[0].mlp)):  # type: ignore[misc]
    def forward(self, x):
        return 2 * super().forward(x)


@pytest.mark.parametrize("change", CHANGES)
@torch.no_grad()
def test_changes_are_seen(change):
    model = new_model("llama", dtype=torch.float64)  # in which products may add up in any order
    before = logits_of(packed_forward(model))
    CHANGES[change](model)
    actual, expected = logits_of(packed_forward(model)), logits_of(PackedForward(model))
    assert not torch.allclose(expected, before, atol=1e-3), "nothing has changed"
    assert torch.allclose(actual, expected, rtol=0.0, atol=1e-9)


@torch.no_grad()
def test_forwards_that_do_something_unknown_are_called():
    """OLMo clips values: a few tokens do not show that."""
    assert not is_written(new_model("olmo", clip_qkv=6.0))
    assert is_written(new_model("olmo"))


def test_memory_is_given_back_when_a_model_moves():
    model = new_model("llama")
    assert is_written(model)
    old = weakref.ref(model.model.layers[0].mlp.gate_proj.weight.untyped_storage())
    model.to(torch.float64)
    gc.collect()
    assert old() is None


@torch.no_grad()
def test_a_model_that_computes_something_else_is_left_to_its_own_forward():
    class Odd(type(shared_model("llama"))):  # type: ignore[misc]
        def forward(self, *args, **kwargs):
            output = super().forward(*args, **kwargs)
            output.logits = output.logits.roll(1, -1)
            return output

    model = Odd(shared_model("llama").config).eval()
    assert not is_written(model)
    assert torch.equal(logits_of(packed_forward(model)), logits_of(PackedForward(model)))


def test_unknown_structures_are_left_to_their_own_forward():
    assert not is_written(shared_model("gpt_bigcode"))


def test_they_can_be_switched_off():
    model = shared_model("llama")
    with written_decoders(False):
        assert not is_written(model)
    assert is_written(model)


def test_models_are_not_kept_alive():
    model = new_model("llama")
    assert is_written(model)
    model.model.layers[0].owner = [model]
    handle = model.register_forward_hook(lambda *args, model=model: None)
    reference = weakref.ref(model)
    del model, handle
    gc.collect()
    assert reference() is None


@torch.no_grad()
def test_hidden_states_are_those_of_hooks():
    model = shared_model("llama")
    found = []
    for forward in (PackedForward(model), packed_forward(model)):
        row = forward.add()
        with forward.taps.taking([-1, 0, 1, 2]) as fed:
            forward.forward([RowInput(row, np.arange(5), TREE)])
            found.append(fed[row].pieces[0].states)
    own, written = found
    assert set(own) == set(written) == {-1, 0, 1, 2}
    for layer, states in own.items():
        assert torch.allclose(states, written[layer], atol=1e-5)


def test_fused_maps_have_biases():
    maps = [nn.Linear(4, 3), nn.Linear(4, 2)]
    x = torch.randn(5, 4)
    expected = torch.cat([item(x) for item in maps], dim=1)
    assert torch.allclose(Fused(maps)(x), expected, atol=1e-6)
