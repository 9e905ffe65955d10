"""What a written-out decoder follows: configs, memory of others, hooks, dropout; and what it does not keep."""

import gc
import threading
import weakref

import pytest
import torch
from torch import nn

import hf_smartspec
from hf_smartspec.target_model.forward.packed import PackedForward
from hf_smartspec.target_model.support.dropout import is_random
from hf_smartspec.target_model.written import packed_forward, registry, watch, written_decoder, written_decoders

from ...models import new_model
from .test_written import is_written, logits_of


@pytest.fixture
def plans(monkeypatch):
    """The models of which plans are made."""
    made, make_plan = [], registry.make_plan

    def noting(model):
        made.append(model)
        return make_plan(model)

    monkeypatch.setattr(registry, "make_plan", noting)
    return made


CONFIGS = {
    "final_logit_softcapping": ("gemma2", 0.5),
    "logits_scaling": ("granite", 4.0),
    "num_hidden_layers": ("llama", 1),
    "sliding_window": ("mistral", 3),
}


@pytest.mark.parametrize("name", CONFIGS)
@torch.no_grad()
def test_changes_of_the_config_alone_are_followed(name):
    kind, value = CONFIGS[name]
    model = new_model(kind)
    before = logits_of(packed_forward(model))
    setattr(model.config, name, value)
    actual, expected = logits_of(packed_forward(model)), logits_of(PackedForward(model))
    assert not torch.allclose(expected, before, atol=1e-3), "nothing has changed"
    assert torch.allclose(actual, expected, atol=1e-5)


def test_attributes_that_nobody_reads_do_not_count(plans):
    model = new_model("llama")
    assert is_written(model)
    model.num_calls = model.model.layers[0].num_calls = 7
    assert written_decoder(model, thoroughly=True) is not None
    assert len(plans) == 1


# --- Memory ----------------------------------------------------------------------------------------------------------


def addresses(model):
    return [parameter.data_ptr() for parameter in model.parameters()]


def in_one_buffer(model):
    parameters = list(model.parameters())
    flat = torch.cat([parameter.detach().flatten() for parameter in parameters])
    for parameter, part in zip(parameters, flat.split([parameter.numel() for parameter in parameters])):
        parameter.data = part.view(parameter.shape)


@pytest.mark.parametrize("share", [in_one_buffer, nn.Module.share_memory])
@torch.no_grad()
def test_memory_that_others_hold_stays_theirs(share):
    model = new_model("qwen2")
    share(model)
    places = addresses(model)
    assert is_written(model) and addresses(model) == places
    assert torch.allclose(logits_of(packed_forward(model)), logits_of(PackedForward(model)), atol=1e-5)


@pytest.mark.parametrize("share", [in_one_buffer, nn.Module.share_memory])
@torch.no_grad()
def test_weights_that_are_shared_later_are_followed(share):
    model = new_model("qwen2")
    assert is_written(model)
    share(model)
    model.model.layers[0].self_attn.q_proj.weight.mul_(3)
    assert is_written(model)
    assert torch.allclose(logits_of(packed_forward(model)), logits_of(PackedForward(model)), atol=1e-5)


@torch.no_grad()
def test_weights_of_inference_mode_are_written_out_where_they_are():
    with torch.inference_mode():
        model = new_model("llama")
    places = addresses(model)
    assert is_written(model) and addresses(model) == places
    assert torch.allclose(logits_of(packed_forward(model)), logits_of(PackedForward(model)), atol=1e-5)


def test_weights_stay_where_they_are_until_a_decoder_is_used(monkeypatch):
    def refuse(*args):
        raise registry.UnknownStructureError("its layers differ")

    model = new_model("llama")
    places = addresses(model)
    handle = model.model.layers[0].register_forward_hook(lambda *args: None)
    assert not is_written(model) and addresses(model) == places
    handle.remove()
    monkeypatch.setattr(registry, "check", refuse)
    assert not is_written(model) and addresses(model) == places


def test_planning_calls_no_hooks():
    model, calls = new_model("llama"), []
    handles = [module.register_forward_hook(lambda *args: calls.append(1)) for module in model.modules()]
    assert not is_written(model) and not calls
    for handle in handles:
        handle.remove()
    assert is_written(model)


@pytest.mark.parametrize("name", ["o_proj", "q_proj"])
def test_what_is_replaced_is_not_kept(name):
    torch.manual_seed(0)
    model = new_model("llama")
    assert is_written(model)
    attention = model.model.layers[0].self_attn
    old = weakref.ref(getattr(attention, name).weight)
    setattr(attention, name, nn.Linear(32, 32, bias=False).eval())
    assert old() is None
    old = weakref.ref(model.model.embed_tokens.weight)
    model.model.embed_tokens = nn.Embedding(97, 32).eval()
    assert old() is None
    assert is_written(model)
    assert torch.allclose(logits_of(packed_forward(model)), logits_of(PackedForward(model)), atol=1e-5)


def test_disable_forgets():
    model = new_model("llama")
    attributes = set(vars(model))
    assert is_written(model) and set(vars(model)) != attributes
    hf_smartspec.disable(model)
    assert set(vars(model)) == attributes


# --- Not now ---------------------------------------------------------------------------------------------------------


def test_a_model_that_cannot_be_tried_yet_is_planned_once(plans):
    model = new_model("llama")
    handle = model.model.layers[0].register_forward_hook(lambda *args: None)
    assert [is_written(model) for _ in range(4)] == [False] * 4
    handle.remove()
    with torch.autocast("cpu", torch.bfloat16):
        assert not is_written(model)
    decoder = model.train().model
    decoder.gradient_checkpointing = True
    assert not is_written(model)
    decoder.gradient_checkpointing = False
    assert is_written(model) and len(plans) == 1


def test_a_model_in_training_is_tried_out_unless_something_is_dropped():
    """Rollouts of reinforcement learning come from models that never leave training mode."""
    model = new_model("llama", attention_dropout=0.1).train()
    assert not is_written(model) and is_written(model.eval())
    assert is_written(new_model("llama").train())


def test_a_model_that_is_not_recognised_is_looked_at_once_per_use(monkeypatch):
    model, looks = new_model("gpt_bigcode"), []
    assert not is_written(model)
    monkeypatch.setattr(registry, "_setting", looks.append)
    assert [is_written(model) for _ in range(4)] == [False] * 4 and not looks
    packed_forward(model)
    assert looks


def test_threads_that_come_at_once_make_one_plan(plans):
    model, barrier, found = new_model("llama"), threading.Barrier(4), []

    def use():
        barrier.wait()
        found.append(written_decoder(model))

    threads = [threading.Thread(target=use) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4 and len(set(found)) == 1 and found[0] is not None
    assert plans.count(model) == 1


@pytest.mark.parametrize("name", ["residual_dropout", "embedding_dropout", "attention_dropout"])
def test_every_kind_of_dropout_is_the_models_own(name):
    model = new_model("starcoder2", **{name: 0.5})
    assert is_written(model)
    model.train()
    assert not is_written(model) and is_random(model)
    model.eval()
    assert is_written(model) and not is_random(model)
    assert not is_random(new_model("starcoder2").train())


def test_hooks_that_are_registered_elsewhere_change_nothing():
    model = new_model("llama")
    decoder = written_decoder(model)
    nn.Linear(2, 2).register_forward_hook(lambda *args: None)
    assert written_decoder(model) is decoder is not None


def test_models_do_not_outlive_their_last_reference():
    model = new_model("llama")
    assert is_written(model)
    reference = weakref.ref(model)
    del model
    gc.collect()
    assert reference() is None


def test_the_environment_switches_them_off_when_asked(monkeypatch):
    model = new_model("llama")
    monkeypatch.setenv("HF_SMARTSPEC_WRITTEN", "0")
    assert not is_written(model)
    with written_decoders(True):
        assert is_written(model)
    monkeypatch.setenv("HF_SMARTSPEC_WRITTEN", "1")
    assert is_written(model)


def test_while_the_same_rows_run_moved_weights_and_replaced_forwards_are_noticed_a_moment_later(monkeypatch):
    model, now = new_model("llama"), [0.0]
    monkeypatch.setattr(watch, "perf_counter", lambda: now[0])
    decoder, layer = written_decoder(model), model.model.layers[0]
    layer.mlp.forward = lambda x: x
    assert written_decoder(model, may_wait=True) is decoder is not None
    now[0] += 1
    assert written_decoder(model, may_wait=True) is None
    del layer.mlp.forward
    now[0] += 1
    assert written_decoder(model, may_wait=True) is decoder
    layer.mlp.down_proj.weight.data = layer.mlp.down_proj.weight.data.clone()
    assert written_decoder(model, may_wait=True) is decoder
    now[0] += 1
    assert written_decoder(model, may_wait=True) not in (None, decoder)
    layer.mlp.register_forward_hook(lambda *args: None)
    assert written_decoder(model, may_wait=True) is None, "hooks are noticed at once"


def test_after_a_thorough_look_at_one_model_no_other_waits(monkeypatch):
    """An engine that was paused looks at its target alone, and its draft model may have been moved, too."""
    target, draft = new_model("llama"), new_model("llama")
    monkeypatch.setattr(watch, "perf_counter", lambda: 0.0)
    assert written_decoder(target) is not None and written_decoder(draft) is not None  # both have been tried out
    decoder = written_decoder(draft)
    projection = draft.model.layers[0].mlp.down_proj
    projection.weight.data = projection.weight.data.clone()
    assert written_decoder(draft, may_wait=True) is decoder is not None
    written_decoder(target, thoroughly=True)
    assert written_decoder(draft, may_wait=True) not in (None, decoder)


@torch.no_grad()
def test_moved_weights_are_noticed_before_new_rows_run(monkeypatch):
    monkeypatch.setattr(watch, "perf_counter", lambda: 0.0)
    model, other = new_model("llama"), new_model("llama")
    forward = packed_forward(model)
    before = logits_of(forward)
    for parameter in model.model.layers[0].parameters():
        parameter.data = 2 * parameter.data
    other.load_state_dict(model.state_dict())
    after = logits_of(forward)
    assert not torch.allclose(after, before, atol=1e-3)
    assert torch.equal(after, logits_of(packed_forward(other)))
