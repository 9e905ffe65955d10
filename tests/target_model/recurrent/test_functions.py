"""Functions of modelling files, and methods of layers, that packed forwards replace: for themselves alone."""

import contextvars
import inspect
from functools import wraps

import numpy as np
import pytest
import torch

from hf_smartspec.target_model.compat import TESTED_MODEL_TYPES
from hf_smartspec.target_model.forward.packed import PackedForward
from hf_smartspec.target_model.layout.rows import RowInput
from hf_smartspec.target_model.recurrent import functions
from hf_smartspec.target_model.recurrent.cache import StateCache
from hf_smartspec.target_model.recurrent.functions import recurrent_layers

from ...models import RECURRENT, shared_model

pytestmark = pytest.mark.skipif(not RECURRENT, reason="this release's layers with states are not known")


def test_layers_that_call_functions_of_their_own_are_unknown():
    class Layer(torch.nn.Module):
        def forward(self, inputs, cache):
            return self.causal_conv1d_fn(cache.update_conv_state(inputs, 0))

    assert recurrent_layers(Layer()) is None, "only a file's own functions can be replaced"


def test_plain_models_are_not_searched_for_recurrent_layers(monkeypatch):
    model = shared_model("llama")
    with monkeypatch.context() as patch:
        patch.setattr(functions, "TESTED_MODEL_TYPES", ())
        assert recurrent_layers(model) is None
    assert not TESTED_MODEL_TYPES & {shared_model(name).config.model_type for name in RECURRENT}
    monkeypatch.setattr(functions, "modules_of", None)
    assert recurrent_layers(model) is None
    with pytest.raises(TypeError):
        recurrent_layers(shared_model("lfm2"))  # not stateful by its class


@torch.no_grad()
def test_linear_layers_multiply_few_tokens_as_written_out_ones_do(monkeypatch):
    model, sizes = shared_model("bamba"), []
    product = functions.product
    monkeypatch.setattr(functions, "product", lambda x, *rest: (sizes.append(len(x)), product(x, *rest))[1])
    forward, text = PackedForward(model), np.arange(5, 8)
    forward.forward([RowInput(forward.add(), text)])
    assert sizes and set(sizes) <= {1, 3}
    sizes.clear()
    model(torch.from_numpy(text)[None])
    assert not sizes, "of packed forwards only"


@torch.no_grad()
@pytest.mark.parametrize("architecture", ["qwen3_next", "minimax"])  # functions are replaced, and methods
def test_other_forwards_of_the_model_run_meanwhile(architecture):
    """A plain forward within a packed step's context, as of another thread, computes as always."""
    model, ids = shared_model(architecture), torch.arange(5, 25)[None]
    expected = model(ids).logits
    layers, cache = recurrent_layers(model), StateCache()
    functions = {key: vars(key[0])[key[1]] for key in layers._replaced}
    with layers.step(cache), layers.step(cache):
        assert torch.equal(contextvars.Context().run(model, ids).logits, expected)
    assert functions == {key: vars(key[0])[key[1]] for key in layers._replaced}, "restored"


def with_kernel(layers, monkeypatch):
    """Give the modelling file of some layers a package's kernel; return its place, the kernel, and its calls."""
    file, name = place = next(place for place in layers._replaced if place[1] == "torch_chunk_gated_delta_rule")
    written, calls = inspect.unwrap(vars(file)[name]), []

    @wraps(written)
    def kernel(*args, **kwargs):
        calls.append(args)
        return written(*args, **kwargs)

    monkeypatch.setattr(file, name, kernel)
    return place, kernel, calls


def test_a_probe_and_a_packed_forward_of_two_threads_leave_each_other_alone(monkeypatch):
    """They begin and end in any order; another context stands for the other thread."""
    layers = recurrent_layers(shared_model("qwen3_next"))
    (file, name), kernel, _ = with_kernel(layers, monkeypatch)
    for first, second in ((layers.step(None), layers.as_written()), (layers.as_written(), layers.step(None))):
        other = contextvars.Context()
        first.__enter__()
        redirected = vars(file)[name]
        other.run(second.__enter__)
        assert vars(file)[name] is redirected, "serves both"
        first.__exit__(None, None, None)
        assert vars(file)[name] is redirected, "the second goes on"
        other.run(second.__exit__, None, None, None)
        assert vars(file)[name] is kernel


def test_functions_run_as_written_in_place_of_kernels(monkeypatch):
    layers = recurrent_layers(shared_model("qwen3_next"))
    (file, name), _, calls = with_kernel(layers, monkeypatch)
    (q, k, v), rate = torch.randn(3, 1, 4, 2, 8), torch.rand(1, 4, 2)
    with layers.as_written():
        vars(file)[name](q, k, v, g=-rate, beta=rate)
    assert not calls
    vars(file)[name](q, k, v, g=-rate, beta=rate)
    assert len(calls) == 1


@torch.no_grad()
def test_states_that_layers_keep_in_themselves_are_left_alone(monkeypatch):
    """A plain forward, as of another thread, may be using them."""
    model = shared_model("recurrent_gemma")
    own = [module for module in model.modules() if hasattr(module, "recurrent_states")]
    written, set_ = [], torch.nn.Module.__setattr__

    def watched(module, name, value):
        written.append(module)
        set_(module, name, value)

    monkeypatch.setattr(type(own[0]), "__setattr__", watched)
    forward = PackedForward(model)
    forward.forward([RowInput(forward.add(), np.arange(5, 25))])
    assert written and not any(module is layer for module in written for layer in own)
