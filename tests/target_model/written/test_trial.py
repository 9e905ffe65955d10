"""Trials: a written-out decoder that rounds elsewhere is taken, one whose arithmetic is wrong in one layer is not."""

import copy
import weakref
from threading import Event, RLock, Thread

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM

from hf_smartspec.cpu.kernels.norms import SHIFTED
from hf_smartspec.cpu.quantized import KINDS, quantize
from hf_smartspec.target_model.logits import LogitScaling
from hf_smartspec.target_model.written import registry, trial, written_decoder
from hf_smartspec.target_model.written.decoder import WrittenDecoder
from hf_smartspec.target_model.written.norms import Norm
from hf_smartspec.target_model.written.plan import UnknownStructureError
from hf_smartspec.target_model.written.recognition import make_plan
from hf_smartspec.target_model.written.trial import check

from ...covering import exhaustive, part_of
from ...models import new_model, shared_model
from ...serving.helpers import TIMEOUT
from .test_written import WRITTEN

HALF = torch.bfloat16, torch.float16
DTYPES = *HALF, torch.float32


def with_outliers(model):
    """The model with what real weights have: a few channels of the residual that are hundreds of times the others."""
    for layer in model.model.layers:
        layer.mlp.down_proj.weight[3] *= 100
        layer.self_attn.o_proj.weight[7] *= 30
    return model


class _OfBase:
    """Rotary embeddings of another base."""

    def __init__(self, rotation, base: float):
        self.rotation, self.base = rotation, base

    def tables(self, cos, sin):
        return self.rotation.tables(cos, sin)

    def rotate(self, x, num_heads, tables):
        cos, _ = tables
        half = cos.shape[-1] // 2
        angle = cos[:, 0, 0].float().arccos()  # of the first dimension: the position, up to a turn
        angles = angle[:, None] * self.base ** -(torch.arange(half) / half)
        cos, sin = (table.repeat(1, 2)[None].to(x.dtype) for table in (angles.cos(), angles.sin()))
        self.rotation.rotate(x, num_heads, self.rotation.tables(cos, sin))


def _without_scale(layer):
    layer.scaling = 1.0


def _with_wrong_residual(layer):
    layer.multiplier = 0.9


def _with_shifted_norm(layer):
    assert isinstance(layer.before_mlp, Norm)
    layer.before_mlp = copy.copy(layer.before_mlp)
    layer.before_mlp.form = SHIFTED


def _with_swapped_norms(layer):
    layer.before_attention, layer.before_mlp = layer.before_mlp, layer.before_attention


def _with_another_base(layer):
    layer.rotation = _OfBase(layer.rotation, 100.0)


def _with_swapped_heads(layer):
    project, size = layer.attention_output, layer.head_dim
    layer.attention_output = lambda x: project(torch.cat([x[:, size : 2 * size], x[:, :size], x[:, 2 * size :]], 1))


WRONG = {
    "scale of scores": _without_scale,
    "scale of updates": _with_wrong_residual,
    "norm of another kind": _with_shifted_norm,
    "norms swapped": _with_swapped_norms,
    "rotary base": _with_another_base,
    "heads swapped": _with_swapped_heads,
}


def distinct(model):
    """The model with norms that differ, which new models have all at 1."""
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.copy_(torch.rand(parameter.shape, generator=generator) + 0.5)
    return model


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("name", WRITTEN)
@torch.no_grad()
def test_right_decoders_are_taken(name, dtype):
    model = new_model(name, dtype=dtype)
    check(model, WrittenDecoder(make_plan(model)[0]))


@pytest.mark.parametrize("layer", (0, 1))
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("wrong", WRONG)
@torch.no_grad()
def test_wrong_arithmetic_in_one_layer_is_refused(wrong, dtype, layer):
    model = with_outliers(distinct(new_model("llama", dtype=dtype)))
    plan = make_plan(model)[0]
    check(model, WrittenDecoder(plan))
    WRONG[wrong](plan.layers[layer])
    with pytest.raises(UnknownStructureError, match=rf"layer {layer} differs by .* roundings"):
        check(model, WrittenDecoder(plan))


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32))
@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_rounding_of_quantized_models_is_told_from_wrong_arithmetic(kind, dtype):
    model = quantize(with_outliers(distinct(new_model("llama", dtype=dtype))), kind)
    plan = make_plan(model)[0]
    check(model, WrittenDecoder(plan))
    _with_swapped_heads(plan.layers[1])
    with pytest.raises(UnknownStructureError, match="layer 1 differs"):
        check(model, WrittenDecoder(plan))


@torch.no_grad()
def test_each_layer_is_copied_once_straight_to_float32_and_gone_before_the_next(monkeypatch):
    model = new_model("llama", dtype=torch.bfloat16)
    sources, copies, copy_layer = [], [], trial.float32_copy

    def noting(layer, *args):
        assert not any(known() for known in copies), "one layer at a time"
        copied = copy_layer(layer, *args)
        sources.append(layer)
        copies.append(weakref.ref(copied))
        assert {item.dtype for item in copied.parameters()} == {torch.float32}
        return copied

    def fail(parameter, memo):
        raise AssertionError(f"a copy in {parameter.dtype}")

    monkeypatch.setattr(trial, "float32_copy", noting)
    monkeypatch.setattr(nn.Parameter, "__deepcopy__", fail)
    check(model, WrittenDecoder(make_plan(model)[0]))
    assert sources == list(model.model.layers)


class _Widened(TorchDispatchMode):
    """Notes the numbers of the largest tensor in float32 that an operator returns."""

    def __init__(self):
        super().__init__()
        self.most = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result.dtype == torch.float32:
            self.most = max(self.most, result.numel())
        return result


@torch.no_grad()
def test_scores_of_large_vocabularies_are_widened_a_few_lines_at_a_time():
    model, widened = new_model("llama", dtype=torch.bfloat16, vocab_size=4_000), _Widened()
    with widened:
        trial._Trial(model, WrittenDecoder(make_plan(model)[0]), 24).run()
    assert 4_000 <= widened.most <= 12 * 4_000, "of the 51 whose likely continuations are drawn"


@torch.no_grad()
def test_wrong_logits_are_refused():
    model = distinct(new_model("llama", dtype=torch.bfloat16))
    plan = make_plan(model)[0]
    plan.logit_scaling = LogitScaling(multiplier=1.05)
    with pytest.raises(UnknownStructureError, match=r"the logits differ by .* roundings"):
        check(model, WrittenDecoder(plan))


@torch.no_grad()
def test_what_is_computed_between_layers_is_seen():
    class Scaled(type(shared_model("llama").model.layers[1])):  # type: ignore[misc]
        def __call__(self, hidden_states, *args, **kwargs):
            return super().__call__(hidden_states * 1.5, *args, **kwargs)

    model = new_model("llama")
    model.model.layers[1].__class__ = Scaled
    with pytest.raises(UnknownStructureError, match="between layers 0 and 1"):
        check(model, WrittenDecoder(make_plan(shared_model("llama"))[0]))


@torch.no_grad()
def test_too_little_memory_puts_the_trial_off_to_the_next_call(monkeypatch, caplog):
    attempts, model = [], new_model("llama")

    def fail(*args):
        attempts.append(1)
        raise torch.OutOfMemoryError("a layer too much")

    with monkeypatch.context() as patch:
        patch.setattr(registry, "check", fail)
        assert written_decoder(model, thoroughly=True) is None and len(attempts) == 1
        assert written_decoder(model) is None and len(attempts) == 1  # not before every forward
    assert "too little memory" in caplog.text
    assert written_decoder(model, thoroughly=True) is not None


def test_who_waited_for_a_trial_and_autocasts_gets_no_decoder(monkeypatch):
    model, is_trying, waits, found = new_model("llama"), Event(), Event(), []

    class Lock:
        def __init__(self):
            self.lock = RLock()

        def __enter__(self):
            if is_trying.is_set():
                waits.set()
            self.lock.acquire()

        def __exit__(self, *_):
            self.lock.release()

    def slow(*args):
        is_trying.set()
        assert waits.wait(TIMEOUT)

    def use_autocast():
        assert is_trying.wait(TIMEOUT)
        with torch.autocast("cpu", torch.bfloat16):
            found.append(written_decoder(model))

    monkeypatch.setattr(registry, "_lock", Lock())
    monkeypatch.setattr(registry, "check", slow)
    thread = Thread(target=use_autocast)
    thread.start()
    assert written_decoder(model) is not None
    thread.join()
    assert found == [None]


@torch.no_grad()
def test_the_reason_is_said(said_at_info, monkeypatch):
    def wrong_plan(model):
        plan, bypassed = make_plan(model)
        _with_swapped_heads(plan.layers[1])
        return plan, bypassed

    monkeypatch.setattr(registry, "make_plan", wrong_plan)
    assert written_decoder(distinct(new_model("llama"))) is None
    assert "LlamaForCausalLM is run by its own forward: layer 1 differs by" in said_at_info.text


@pytest.mark.parametrize("dtype", part_of(HALF, torch.bfloat16))
@torch.no_grad()
def test_a_real_model_is_taken_but_not_with_wrong_arithmetic_in_one_layer(real_model, dtype):
    """Rounding adds up over its 30 layers, so that logits end far from its own forward's."""
    plan = make_plan(real_model(dtype))[0]
    check(real_model(dtype), WrittenDecoder(plan))
    _with_swapped_heads(plan.layers[17])
    with pytest.raises(UnknownStructureError, match="layer 17 differs"):
        check(real_model(dtype), WrittenDecoder(plan))


@pytest.mark.parametrize("dtype", [torch.bfloat16, *exhaustive([torch.float32])])
@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_a_real_model_that_is_quantized_is_taken(real_folder, dtype, kind):
    """A last bit moves one number of one token to its next level: all later tokens see that one."""
    model = quantize(AutoModelForCausalLM.from_pretrained(real_folder, dtype=dtype), kind)
    check(model, WrittenDecoder(make_plan(model)[0]))
