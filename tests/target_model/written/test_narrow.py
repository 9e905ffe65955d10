"""Programs that read float32 weights from copies in bfloat16: the numbers of the layers, to the last bit."""

import copy
import gc
from weakref import ref

import numpy as np
import pytest
import torch

import hf_smartspec
from hf_smartspec.cpu.few_tokens import has_kernels, most_tokens
from hf_smartspec.cpu.kernels.program import MULTIPLY, NARROW
from hf_smartspec.cpu.narrow import NarrowWeights
from hf_smartspec.target_model.layout.rows import RowInput
from hf_smartspec.target_model.written import compiled, copies, written_decoder
from hf_smartspec.target_model.written.program import ForwardProgram

from .test_compiled import NAMES, by_layers, model_of, tried
from .test_written import logits_of

pytestmark = pytest.mark.skipif(not has_kernels(torch.float32), reason="there is no compiled code for this CPU")


@pytest.fixture(autouse=True)
def narrow(monkeypatch):
    """Note of each forward how many products read copies, and how many do not; renew copies at once."""
    monkeypatch.setattr(copies, "_LEAST_WAIT", 0)
    found, run = [], ForwardProgram.__call__

    def noting(self, *args):
        codes = [code for code, _ in self.operators]
        found.append((codes.count(NARROW), codes.count(MULTIPLY)))
        return run(self, *args)

    monkeypatch.setattr(ForwardProgram, "__call__", noting)
    return found


def stored_in_bfloat16(name="llama", **options):
    return model_of(name, torch.bfloat16, **options).float()


def is_used(narrow):
    """Return whether forwards read copies: of all weights or, where they have many tokens, of none."""
    return any(number for number, _ in narrow) and not any(number and others for number, others in narrow)


@pytest.mark.parametrize("name", NAMES)
def test_every_bit_is_that_of_the_layers(name, narrow):
    model = stored_in_bfloat16(name)
    other = copy.deepcopy(model)
    assert torch.equal(logits_of(tried(model)), logits_of(by_layers(other)))
    assert is_used(narrow)


def test_weights_that_hold_other_numbers_are_read_as_they_are(narrow):
    model = stored_in_bfloat16()
    with torch.no_grad():
        model.model.layers[1].self_attn.k_proj.weight[3, 5] = 1 / 3
    assert torch.equal(logits_of(tried(model)), logits_of(by_layers(copy.deepcopy(model))))
    assert 1 in {others for _, others in narrow}  # queries, keys and values are one weight


@pytest.mark.parametrize("part", [..., (3, 5)], ids=str)
@pytest.mark.parametrize("is_counted", [True, False])
def test_weights_that_change(is_counted, part, narrow):
    """Change all numbers or one between two calls, in place or, as weight syncing does, through `.data`."""
    model = stored_in_bfloat16()
    hf_smartspec.enable(model)
    ids, arguments = torch.arange(3, 12)[None], {"max_new_tokens": 24, "do_sample": False}
    model.generate(ids, **arguments, assistant="none")
    kept = written_decoder(model)._compiled.narrow
    before = kept.kept
    with torch.no_grad():
        for layer in model.model.layers:
            weight = layer.mlp.down_proj.weight
            (weight if is_counted else weight.data)[part] *= -2
    narrow.clear()
    found = model.generate(ids, **arguments, assistant="none")
    assert torch.equal(found, model.generate(ids, **arguments))
    assert is_used(narrow) and kept.kept is not before


def test_the_first_layers_share_the_copies_and_the_checks_of_all(narrow, monkeypatch):
    made = []
    monkeypatch.setattr(compiled, "NarrowWeights", lambda *given: made.append(NarrowWeights(*given)) or made[-1])
    model = stored_in_bfloat16(num_hidden_layers=3)
    hf_smartspec.enable(model)
    ids, arguments = torch.arange(3, 12)[None], {"max_new_tokens": 24, "do_sample": False}
    draft = hf_smartspec.SmartSpecConfig("early_exit:1", num_nodes=4)
    for _ in range(2):
        expected = model.generate(ids, **arguments)
        assert torch.equal(model.generate(ids, **arguments, assistant=draft), expected)
        model.model.layers[0].mlp.down_proj.weight.data.neg_()
    assert len(made) == 2  # once more after the change
    assert is_used(narrow)


def test_copies_are_freed_with_the_decoder(narrow):
    model = stored_in_bfloat16()
    forward = tried(model)
    copies = ref(written_decoder(model)._compiled.narrow.kept)
    gc.disable()
    try:
        hf_smartspec.disable(model)
        del forward
        assert copies() is None
    finally:
        gc.enable()


def test_a_change_between_two_steps(narrow):
    model = stored_in_bfloat16()
    forward = tried(model)
    logits_of(forward)
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight[7].neg_()
    assert torch.equal(logits_of(forward), logits_of(by_layers(copy.deepcopy(model))))
    assert is_used(narrow)


def test_nothing_is_copied_where_memory_is_scarce(monkeypatch, narrow):
    model = stored_in_bfloat16()
    num_weights = sum(item.numel() for name, item in model.named_parameters() if "proj" in name or "embed" in name)
    monkeypatch.setattr(compiled, "free_bytes", lambda device: 4 * num_weights - 1)
    logits_of(tried(model))
    assert narrow and not is_used(narrow)
    narrow.clear()
    monkeypatch.setattr(compiled, "free_bytes", lambda device: 4 * num_weights)
    logits_of(tried(stored_in_bfloat16()))
    assert is_used(narrow)


@pytest.mark.parametrize("num_tokens", [32, 33])
def test_many_tokens_read_the_weights_themselves(num_tokens, narrow):
    if most_tokens(torch.float32) < num_tokens:
        pytest.skip("so many tokens run layer by layer")
    forward = tried(stored_in_bfloat16())
    narrow.clear()
    forward.forward([RowInput(forward.add(), np.arange(3, 3 + num_tokens))])
    assert is_used(narrow) == (num_tokens == 32)


def test_a_model_in_bfloat16_needs_no_copies(narrow):
    logits_of(tried(model_of("llama", torch.bfloat16)))
    assert narrow and not any(number for number, _ in narrow)
