"""Heads of EAGLE-3 as one compiled program: the numbers of the heads that run layer by layer, to the last bit."""

import copy
from concurrent.futures import ThreadPoolExecutor
from threading import Event, Lock

import pytest
import torch
from torch import nn

import hf_smartspec
from hf_smartspec.candidates.heads.eagle import heads as heads_module
from hf_smartspec.candidates.heads.eagle import written as written_module
from hf_smartspec.candidates.heads.eagle.heads import EagleHeads
from hf_smartspec.cpu.few_tokens import has_kernels
from hf_smartspec.cpu.quantized.product import has_right_kernels
from hf_smartspec.online.students import student_of
from hf_smartspec.target_model.drafters.features import FeatureForward
from hf_smartspec.target_model.written import watch
from hf_smartspec.target_model.written.compiled import CompiledDecoder
from hf_smartspec.target_model.written.decoder import WrittenDecoder

from ...models import new_model
from ...serving.helpers import TIMEOUT
from .eagle_forwards import check, run, texts
from .published_eagle import LAYOUTS, random_heads

pytestmark = [
    pytest.mark.skipif(not has_kernels(torch.float32), reason="there is no compiled code for this CPU"),
    pytest.mark.usefixtures("any_number_of_tokens"),
]

KINDS = {
    "own output": {"own_vocab": 60},
    "output of the target": {},
    "output in int8": {},
    "norms of heads": {"own_vocab": 60, "has_norms": True},
    "norms of states and before the residual": {"own_vocab": 60, "norm_before_residual": True, "has_input_norm": True},
    "norms of each of the states": {"own_vocab": 60, "has_fc_norm": True},
    "three layers": {"own_vocab": 60, "num_layers": 3, "has_norms": True},
    "features after the norm": {"own_vocab": 60, "num_layers": 2, "norm_output": True},
    "long window": {"own_vocab": 60, "window": 64},
    "another activation": {"own_vocab": 60, "activation": "gelu"},
}


def heads_of(kind: str, folder, dtype=torch.float32, lengths=(9, 2, 23)) -> tuple[EagleHeads, list]:
    """Heads, and texts with hidden states for them."""
    target = new_model("llama").to(dtype).requires_grad_(False)
    hidden, vocab = target.config.hidden_size, target.config.vocab_size
    published = random_heads(hidden, vocab, third=True, head_dim=16, inner=64, layers=(1, 1, 0), **KINDS[kind])
    LAYOUTS["speculators"](published, vocab, folder)
    if kind == "output in int8":
        hf_smartspec.quantize(target)
    heads = EagleHeads.from_pretrained(folder, target)
    return heads, [(tokens, states.to(dtype)) for tokens, states in texts(published, target, lengths)]


@pytest.fixture
def programs(monkeypatch):
    """Sizes of forwards that ran as programs."""
    sizes, run_program = [], CompiledDecoder.run
    monkeypatch.setattr(
        CompiledDecoder,
        "run",
        lambda self, given, *rest: (sizes.append(len(given.x)), run_program(self, given, *rest))[1],
    )
    return sizes


def logits_of(heads, items) -> torch.Tensor:
    """Logits after texts, and along drafts of three levels, whose nodes take the features that their parents left."""
    forward = FeatureForward(heads)
    return torch.cat(run(forward, [forward.add() for _ in items], items))


def logits_by_layers(heads, items, monkeypatch) -> torch.Tensor:
    with monkeypatch.context() as patch:
        patch.setattr(WrittenDecoder, "_compiled", None)
        return logits_of(copy.deepcopy(heads), items)


def test_heads_of_a_target_in_int8_run_in_int8_and_follow_changes_in_place(tmp_path, programs):
    heads, items = heads_of("output in int8", tmp_path)
    rounded = logits_of(heads, items)
    assert programs
    assert set(heads._write_out()._rounded) == {part for part in heads.parts.values() if isinstance(part, nn.Linear)}
    with torch.no_grad():
        heads.part("down_proj").weight.mul_(-3)
    changed = logits_of(heads, items)
    assert not torch.equal(changed, rounded) and torch.equal(changed, logits_of(copy.deepcopy(heads), items))


@pytest.fixture
def rounds_small_heads(monkeypatch):
    """Run heads of any size in int8, as only large ones are otherwise."""
    monkeypatch.setattr(written_module, "_LEAST_ROUNDED", 0)
    if not has_right_kernels(torch.float32):
        pytest.skip("this CPU has no instructions for int8")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["own output", "output of the target", "three layers"])
def test_large_heads_run_in_int8_with_every_bit_of_the_layers(kind, dtype, tmp_path, programs, monkeypatch, request):
    heads, items = heads_of(kind, tmp_path, dtype)
    as_they_are = logits_of(heads, items)
    assert heads._write_out()._rounded is None
    request.getfixturevalue("rounds_small_heads")
    rounded = copy.deepcopy(heads)
    expected = logits_by_layers(rounded, items, monkeypatch)
    logits_of(rounded, items)  # the program's trial
    programs.clear()
    found = logits_of(rounded, items)
    assert programs and torch.equal(found, expected) and not torch.equal(found, as_they_are)
    assert (found - as_they_are).float().norm() < 0.04 * as_they_are.float().norm()
    linears = {part for part in rounded.parts.values() if isinstance(part, nn.Linear)}
    assert set(rounded._write_out()._rounded) == linears, "the target's own output layer stays as it is"


def _change_in_place(heads):
    with torch.no_grad():
        heads.part("down_proj").weight.mul_(-3)


def _change_uncounted(heads):
    heads.part("down_proj").weight.data.mul_(-3)


def _replace(heads):
    heads.part("down_proj").weight.data = heads.part("down_proj").weight.data * -3


def _learn(heads):
    student = student_of(heads)
    student.publish([item * -3 for item in student.weights()])


@pytest.mark.parametrize("change", [_change_in_place, _change_uncounted, _replace, _learn])
def test_heads_that_change_run_as_they_are(change, tmp_path, rounds_small_heads):
    heads, items = heads_of("own output", tmp_path)
    rounded = logits_of(heads, items)
    assert heads._write_out()._rounded
    change(heads)
    changed = logits_of(heads, items)
    assert heads._write_out()._rounded is None
    assert (changed - rounded).norm() > 0.2 * rounded.norm()


def test_what_is_learnt_is_found_while_the_same_rows_run(tmp_path, rounds_small_heads):
    heads, items = heads_of("own output", tmp_path)
    forward = FeatureForward(heads)
    rounded = torch.cat(run(forward, [forward.add() for _ in items], items))
    forward.cache.has_new_rows = False
    _learn(heads)
    assert heads._write_out(may_wait=True)._rounded is None
    changed = torch.cat(run(forward, [forward.add() for _ in items], items))
    assert (changed - rounded).norm() > 0.2 * rounded.norm()


def test_copies_of_heads_that_are_not_rounded_follow_changes_at_once(tmp_path):
    heads, items = heads_of("own output", tmp_path)
    heads.to(torch.bfloat16).to(torch.float32)  # so that their weights fit copies in bfloat16
    forward = FeatureForward(heads)
    torch.cat(run(forward, [forward.add() for _ in items], items))
    copies = heads._write_out()._decoder._compiled.compact
    assert heads._write_out()._rounded is None and copies.kept.copies
    forward.cache.has_new_rows = False
    _change_in_place(heads)
    assert heads._write_out(may_wait=True)._decoder._compiled.compact.kept is None
    changed = torch.cat(run(forward, [forward.add() for _ in items], items))
    assert torch.equal(changed, logits_of(heads, items))
    logits_of(heads.to(torch.bfloat16), [(text, states.bfloat16()) for text, states in items])


def test_heads_in_another_dtype_are_rounded_anew(tmp_path, rounds_small_heads):
    heads, items = heads_of("own output", tmp_path)
    rounded = logits_of(heads, items)
    found = logits_of(heads.to(torch.bfloat16), [(text, states.bfloat16()) for text, states in items])
    assert heads._write_out()._rounded
    assert (found - rounded).norm() < 0.04 * rounded.norm()


def test_weights_whose_changes_are_not_counted_stay_as_they_are(tmp_path, rounds_small_heads):
    with torch.inference_mode():
        heads, _ = heads_of("own output", tmp_path)
    assert heads._write_out()._rounded is None


def test_the_first_eagle_drafts_in_int8(tmp_path, request):
    """Draft layer by layer, since heads of this kind are not compiled as one program."""
    target = new_model("llama").requires_grad_(False)
    published = random_heads(target.config.hidden_size, target.config.vocab_size, has_bias=True)
    LAYOUTS["1"](published, target.config.vocab_size, tmp_path)
    heads, items = EagleHeads.from_pretrained(tmp_path, target), texts(published, target, (9, 2, 23))
    as_they_are = logits_of(heads, items)
    request.getfixturevalue("rounds_small_heads")
    rounded = copy.deepcopy(heads)
    found = logits_of(rounded, items)
    assert rounded._write_out()._rounded and not torch.equal(found, as_they_are)
    assert (found - as_they_are).norm() < 0.04 * as_they_are.norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_every_bit_is_that_of_the_layers(kind, dtype, tmp_path, programs, monkeypatch):
    """Several rows at once, texts and the levels of a tree."""
    heads, items = heads_of(kind, tmp_path, dtype)
    expected = logits_by_layers(heads, items, monkeypatch)
    assert not programs
    logits_of(heads, items)  # the program's trial
    programs.clear()
    assert torch.equal(logits_of(heads, items), expected)
    assert programs == [8 + 1 + 22, 2 * 3, 3 * 3, 3]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_long_texts_are_read_by_programs(dtype, tmp_path, programs, monkeypatch):
    heads, items = heads_of("norms of heads", tmp_path, dtype, (300, 9))
    expected = logits_by_layers(heads, items, monkeypatch)
    logits_of(heads, items)  # the program's trial
    programs.clear()
    assert torch.equal(logits_of(heads, items), expected)
    assert programs[0] == 299 + 8


def test_weights_that_move_are_found(tmp_path, programs, monkeypatch):
    heads, items = heads_of("own output", tmp_path)
    before = logits_of(heads, items)
    for name in ("down_proj", "lm_head", "norm"):
        heads.part(name).weight.data = heads.part(name).weight.data * 1.5
    found = logits_of(heads, items)
    assert programs and not torch.equal(found, before)
    assert torch.equal(found, logits_by_layers(heads, items, monkeypatch))


def test_weights_that_move_are_found_before_new_rows_run(tmp_path, programs, monkeypatch):
    """While the same rows run, heads look at their weights now and then only."""
    monkeypatch.setattr(watch, "perf_counter", lambda: 0.0)
    heads, items = heads_of("own output", tmp_path)
    forward = FeatureForward(heads)
    before = torch.cat(run(forward, [forward.add() for _ in items], items))
    heads.part("down_proj").weight.data = heads.part("down_proj").weight.data * 1.5
    found = torch.cat(run(forward, [forward.add() for _ in items], items))
    assert programs and not torch.equal(found, before)
    assert torch.equal(found, logits_by_layers(heads, items, monkeypatch))


def test_parts_that_are_replaced_are_found(tmp_path, programs, monkeypatch):
    heads, items = heads_of("own output", tmp_path)
    before, old = logits_of(heads, items), heads.part("norm")
    heads.parts["norm"] = copy.deepcopy(old)
    heads.part("norm").weight.data.mul_(torch.linspace(-1, 1, len(old.weight)))
    found = logits_of(heads, items)
    assert programs and not torch.equal(found, before)
    assert torch.equal(found, logits_by_layers(heads, items, monkeypatch))


def test_learnt_weights_are_found(tmp_path, programs, monkeypatch):
    heads, items = heads_of("own output", tmp_path)
    before, student = logits_of(heads, items), student_of(heads)
    student.publish([item * 1.5 for item in student.weights()])
    found = logits_of(heads, items)
    assert programs and not torch.equal(found, before)
    assert torch.equal(found, logits_by_layers(heads, items, monkeypatch))


class Counted:
    """A lock that says when a second thread has come to it."""

    def __init__(self):
        self.lock, self.num_arrived, self.second = Lock(), 0, Event()

    def __enter__(self):
        self.num_arrived += 1
        if self.num_arrived == 2:
            self.second.set()
        self.lock.acquire()

    def __exit__(self, *_):
        self.lock.release()


def test_one_thread_writes_heads_out_while_others_wait(tmp_path, monkeypatch):
    (heads, items), write, written, others = heads_of("own output", tmp_path), heads_module.WrittenHeads, [], []
    lock = Counted()

    def write_slowly(given):
        written.append(given)
        if len(written) == 1:
            others.append(pool.submit(logits_of, heads, items))
            assert lock.second.wait(timeout=TIMEOUT)
        return write(given)

    monkeypatch.setattr(heads_module, "WrittenHeads", write_slowly)
    monkeypatch.setattr(heads_module, "_lock", lock)
    with ThreadPoolExecutor(1) as pool:
        expected = logits_of(heads, items)
        assert torch.equal(others[0].result(), expected) and len(written) == 1


def test_outputs_that_are_called_are_not_run_in_inference_mode(tmp_path):
    """Such as those of targets with adapters, which may be trained later."""
    heads, items = heads_of("output of the target", tmp_path)
    expected, modes = logits_of(heads, items), []

    class Output(nn.Linear):
        def forward(self, x):
            modes.append(torch.is_inference_mode_enabled())
            return super().forward(x)

    heads.output.__class__ = Output
    torch.testing.assert_close(logits_of(heads, items), expected, rtol=0, atol=1e-5)
    assert modes and not any(modes)


def test_copies_compute_with_their_own_weights(tmp_path, programs):
    heads, items = heads_of("own output", tmp_path)
    expected, other = logits_of(heads, items), copy.deepcopy(heads)
    for parameter in heads.parameters():
        parameter.data.fill_(torch.nan)
    assert programs and torch.equal(logits_of(other, items), expected)


@pytest.mark.parametrize("options", [{"third": False}, {"head_dim": 8}, {"inner": 40}, {"activation": "tanh"}])
def test_other_heads_run_layer_by_layer(options, tmp_path, programs):
    """EAGLE-1, and sizes and an activation for which there is no compiled code."""
    target = new_model("llama")
    options = {"third": True, "head_dim": 16, "inner": 64, "own_vocab": 60, "layers": (1, 1, 0)} | options
    if not options["third"]:
        options |= {"own_vocab": None, "layers": (-1,)}
    published = random_heads(32, 97, **options)
    published.config["head_dim"] = published.head_dim
    LAYOUTS["3" if options["third"] else "1"](published, 97, tmp_path)
    heads = EagleHeads.from_pretrained(tmp_path, target)
    forward, items = FeatureForward(heads), texts(published, target, (9, 2))
    check(run(forward, [forward.add() for _ in items], items), published, target, items)
    assert not programs
