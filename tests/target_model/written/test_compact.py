"""Programs that read copies of weights in fewer bits: the numbers of the layers, to the last bit."""

import copy
import gc
from weakref import ref

import numpy as np
import pytest
import torch

import hf_smartspec
from hf_smartspec.cpu import screening
from hf_smartspec.cpu.compact import CompactWeights, can_pack, compact_bytes
from hf_smartspec.cpu.few_tokens import has_kernels
from hf_smartspec.cpu.kernels.packed import can_unpack
from hf_smartspec.cpu.kernels.program import MULTIPLY, NARROW
from hf_smartspec.target_model.layout.rows import RowInput
from hf_smartspec.target_model.written import compiled, copies, watch, written_decoder
from hf_smartspec.target_model.written.program import ForwardProgram

from .test_compiled import NAMES, SHORT_WINDOWS, by_layers, model_of, tried
from .test_written import logits_of

pytestmark = pytest.mark.skipif(not has_kernels(torch.float32), reason="there is no compiled code for this CPU")
DTYPES, MOST = [torch.float32], dict(compiled._MOST_COMPACT)
if can_pack():
    DTYPES.append(torch.bfloat16)
# Sizes with which all rows are whole blocks of packed weights.
WHOLE_BLOCKS = {"qwen2_moe": {"shared_expert_intermediate_size": 128}, "lfm2": {"block_auto_adjust_ff_dim": False}}
in_both = pytest.mark.parametrize("dtype", DTYPES, ids=str)


@pytest.fixture(autouse=True)
def noted(monkeypatch):
    """Note of each forward how many products read copies, and how many do not; renew copies at once."""
    monkeypatch.setattr(copies, "_LEAST_WAIT", 0)
    monkeypatch.setattr(compiled, "_PACKING", 0)
    monkeypatch.setattr(compiled, "_APART", 1)
    monkeypatch.setitem(compiled._MOST_COMPACT, torch.bfloat16, 32)  # as forwards of these tests have more than few
    monkeypatch.setattr(compiled, "_NUM_UNREAD", dict.fromkeys(compiled._NUM_UNREAD, 0))
    found, run = [], ForwardProgram.__call__

    def noting(self, *args):
        products = [(code, fields) for code, fields in self.written.operators if code in (NARROW, MULTIPLY)]
        copied = [code == NARROW or "packed" in fields for code, fields in products]
        found.append((sum(copied), len(copied) - sum(copied)))
        return run(self, *args)

    monkeypatch.setattr(ForwardProgram, "__call__", noting)
    return found


@pytest.fixture
def uncollected():
    """Free what nothing refers to, and not what refers to itself."""
    gc.disable()
    yield
    gc.enable()


def stored_in_bfloat16(name="llama", dtype=torch.float32, **options):
    options |= {"hidden_size": 64, "intermediate_size": 128} | WHOLE_BLOCKS.get(name, {})
    return model_of(name, torch.bfloat16, **options).to(dtype)


def copied(model):
    """A forward of the model as after many others, whose weights have been copied, one in each forward in bfloat16."""
    forward = tried(model)
    for _ in range(20):
        written_decoder(model)._compiled.compact.current()
    return forward


def is_used(noted):
    """Return whether forwards read copies: of all weights or, where they have many tokens, of none."""
    return any(number for number, _ in noted) and not any(number and others for number, others in noted)


@in_both
@pytest.mark.parametrize("name", NAMES)
def test_every_bit_is_that_of_the_layers(name, dtype, noted):
    model = stored_in_bfloat16(name, dtype)
    other = copy.deepcopy(model)
    assert torch.equal(logits_of(copied(model)), logits_of(by_layers(other)))
    # Trees in windows shorter than they may be deep run layer by layer, which reads no packed weights.
    assert is_used(noted) != (dtype is torch.bfloat16 and name in SHORT_WINDOWS)


def test_weights_that_hold_other_numbers_are_read_as_they_are(noted):
    model = stored_in_bfloat16()
    with torch.no_grad():
        model.model.layers[1].self_attn.k_proj.weight[3, 5] = 1 / 3
    assert torch.equal(logits_of(copied(model)), logits_of(by_layers(copy.deepcopy(model))))
    assert 1 in {others for _, others in noted}  # queries, keys and values are one weight


@in_both
@pytest.mark.parametrize("part", [..., (3, 5)], ids=str)
@pytest.mark.parametrize("is_counted", [True, False])
def test_weights_that_change(is_counted, part, dtype, noted):
    """Change all numbers or one between two calls, in place or, as weight syncing does, through `.data`."""
    model = stored_in_bfloat16(dtype=dtype)
    hf_smartspec.enable(model)
    ids, arguments = torch.arange(3, 12)[None], {"max_new_tokens": 24, "do_sample": False}
    model.generate(ids, **arguments, assistant="none")
    kept = written_decoder(model)._compiled.compact
    before = kept.kept
    assert before is not None
    with torch.no_grad():
        for layer in model.model.layers:
            weight = layer.mlp.down_proj.weight
            (weight if is_counted else weight.data)[part] *= -2
    noted.clear()
    found = model.generate(ids, **arguments, assistant="none")
    assert is_used(noted) and kept.kept is not before
    other = copy.deepcopy(model)
    by_layers(other)
    assert torch.equal(found, other.generate(ids, **arguments, assistant="none"))
    if dtype is torch.float32:  # as transformers' own rounds otherwise in bfloat16
        assert torch.equal(found, model.generate(ids, **arguments))


@torch.no_grad()
@in_both
def test_while_the_same_rows_run_changed_weights_are_noticed_a_moment_later(dtype, monkeypatch, noted):
    now = [0.0]
    monkeypatch.setattr(watch, "perf_counter", lambda: now[0])
    model = stored_in_bfloat16(dtype=dtype)
    forward = copied(model)
    row, weight = forward.add(), model.model.layers[1].mlp.down_proj.weight
    kept = written_decoder(model)._compiled.compact

    def run():
        """Return the logits of some tokens, and whether the copy was still there."""
        before = kept.kept
        forward.cut(row, 0)
        logits = forward.forward([RowInput(row, np.arange(5))])[0].clone()
        return logits, kept.kept is before is not None

    def by_weights():
        other = by_layers(copy.deepcopy(model))
        return other.forward([RowInput(other.add(), np.arange(5))])[0]

    run()
    noted.clear()
    weight *= -2
    logits, is_kept = run()
    assert is_kept and is_used(noted) and not torch.equal(logits, by_weights())
    now[0] += 1
    logits, is_kept = run()
    assert not is_kept and torch.equal(logits, by_weights())
    copied(model)
    assert run()[1]
    weight *= -2
    row = forward.add()
    logits, is_kept = run()
    assert not is_kept and torch.equal(logits, by_weights()), "before new rows are run"


def _to_bfloat16(model):
    model.to(torch.bfloat16)


def _replace_head(model):
    model.lm_head = copy.deepcopy(model.lm_head)
    with torch.no_grad():
        model.lm_head.weight *= -2


def _replace_rotary(model):
    model.model.rotary_emb = copy.deepcopy(model.model.rotary_emb)
    model.model.rotary_emb.inv_freq *= 2


@pytest.mark.parametrize("change", [_to_bfloat16, _replace_head, _replace_rotary])
def test_what_was_copied_may_be_moved_or_replaced(change, monkeypatch):
    monkeypatch.setattr(screening, "_LEAST", 0)
    model = stored_in_bfloat16()
    hf_smartspec.enable(model)
    ids, arguments = torch.arange(3, 12)[None], {"max_new_tokens": 24, "do_sample": False}
    model.generate(ids, **arguments, assistant="none")
    known = written_decoder(model)._compiled
    assert known.compact.kept is not None and known.screen.kept is not None
    change(model)
    gc.collect()
    found = model.generate(ids, **arguments, assistant="none")
    other = copy.deepcopy(model)
    by_layers(other)
    assert torch.equal(found, other.generate(ids, **arguments, assistant="none"))


def test_the_first_layers_share_the_copies_and_the_checks_of_all(noted, monkeypatch):
    made = []
    monkeypatch.setattr(compiled, "CompactWeights", lambda given: made.append(CompactWeights(given)) or made[-1])
    model = stored_in_bfloat16(num_hidden_layers=3)
    hf_smartspec.enable(model)
    ids, arguments = torch.arange(3, 12)[None], {"max_new_tokens": 24, "do_sample": False}
    draft = hf_smartspec.SmartSpecConfig("early_exit:1", num_nodes=4)
    for _ in range(2):
        expected = model.generate(ids, **arguments)
        assert torch.equal(model.generate(ids, **arguments, assistant=draft), expected)
        model.model.layers[0].mlp.down_proj.weight.data.neg_()
    assert len(made) == 2  # once more after the change
    assert is_used(noted)


def test_what_can_be_unpacked_is_packed():
    assert can_pack() == can_unpack()


@in_both
def test_memory_of_weights_that_are_replaced_is_freed_while_they_are_packed(dtype, uncollected):
    model = stored_in_bfloat16(dtype=dtype)
    forward = tried(model)
    logits_of(forward)
    weight = ref(model.model.layers[1].mlp.down_proj.weight)
    model.model.layers[1].mlp.down_proj.weight = torch.nn.Parameter(torch.zeros(64, 128, dtype=dtype))
    assert weight() is None


@in_both
def test_copies_are_freed_with_the_decoder(dtype, noted, uncollected):
    model = stored_in_bfloat16(dtype=dtype)
    forward = copied(model)
    copies = ref(written_decoder(model)._compiled.compact.kept)
    hf_smartspec.disable(model)
    del forward
    assert copies() is None


@in_both
def test_a_change_between_two_steps(dtype, noted):
    model = stored_in_bfloat16(dtype=dtype)
    forward = copied(model)
    logits_of(forward)
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight[7].neg_()
    assert torch.equal(logits_of(forward), logits_of(by_layers(copy.deepcopy(model))))
    assert is_used(noted)


@in_both
def test_nothing_is_copied_where_memory_is_scarce(dtype, monkeypatch, noted):
    model = stored_in_bfloat16(dtype=dtype)
    weights = [item for name, item in model.named_parameters() if "proj" in name or "embed" in name]
    num_bytes = 2 * sum(map(compact_bytes, weights))
    monkeypatch.setattr(compiled, "free_bytes", lambda device: num_bytes - 1)
    logits_of(copied(model))
    assert noted and not is_used(noted)
    noted.clear()
    monkeypatch.setattr(compiled, "free_bytes", lambda device: num_bytes)
    logits_of(copied(stored_in_bfloat16(dtype=dtype)))
    assert is_used(noted)


@in_both
@pytest.mark.parametrize("is_more", [False, True])
def test_many_tokens_read_the_weights_themselves(is_more, dtype, monkeypatch, noted):
    monkeypatch.setattr(compiled, "_MOST_COMPACT", MOST)
    num_tokens = MOST[dtype] + is_more
    forward = copied(stored_in_bfloat16(dtype=dtype))
    noted.clear()
    forward.forward([RowInput(forward.add(), np.arange(3, 3 + num_tokens))])
    assert is_used(noted) != is_more


@pytest.mark.skipif(not can_pack(), reason="this CPU has no code for packed weights")
def test_weights_are_packed_once_many_forwards_have_read_them(monkeypatch, noted):
    monkeypatch.setattr(compiled, "_PACKING", 20)
    model, ids = stored_in_bfloat16(dtype=torch.bfloat16), torch.arange(3, 12)[None]
    hf_smartspec.enable(model)
    found = model.generate(ids, max_new_tokens=40, do_sample=False, assistant="none")
    are_packed = [number > 0 for number, _ in noted]
    assert not any(are_packed[:20]) and all(are_packed[-8:])
    monkeypatch.setattr(compiled, "_PACKING", 1000)
    other = copy.deepcopy(model)
    hf_smartspec.enable(other)
    assert torch.equal(other.generate(ids, max_new_tokens=40, do_sample=False, assistant="none"), found)
    assert not any(number for number, _ in noted[len(are_packed) :])
