"""Greedy decoding by the best tokens of a screened head: the tokens of the whole head."""

from itertools import pairwise

import pytest
import torch

import hf_smartspec
from hf_smartspec.cpu import screening
from hf_smartspec.cpu.screening import Screen, has_screening
from hf_smartspec.target_model.layout.rows import RowInput
from hf_smartspec.target_model.written import compiled, copies, packed_forward, written_decoder
from hf_smartspec.target_model.written.program import ForwardProgram

from ...models import new_model
from ...serving.helpers import TIMEOUT

pytestmark = pytest.mark.skipif(not has_screening(torch.float32), reason="there is no faster code for this CPU")

PROMPT = torch.tensor([[5, 6, 7, 8, 5, 6, 7], [9, 10, 11, 9, 10, 11, 9]])


@pytest.fixture(autouse=True)
def screened(monkeypatch):
    """Screens of small heads, too, also right after changes; the list of whether forwards had one."""
    monkeypatch.setattr(screening, "_LEAST", 1)
    monkeypatch.setattr(copies, "_LEAST_WAIT", 0)
    found, run = [], ForwardProgram.__call__

    def noting(self, *args):
        found.append(self.written.screening is not None)
        return run(self, *args)

    monkeypatch.setattr(ForwardProgram, "__call__", noting)
    return found


def enabled(name="llama", **options):
    model = new_model(name, head_dim=16, **options)
    hf_smartspec.enable(model)
    return model


def generate(model, assistant, **options):
    options = {"max_new_tokens": 24, "do_sample": False} | options
    return model.generate(PROMPT, attention_mask=torch.ones_like(PROMPT), assistant=assistant, **options)


def plain(model, **options):
    options = {"max_new_tokens": 24, "do_sample": False} | options
    return model.generate(PROMPT, attention_mask=torch.ones_like(PROMPT), **options)


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3_text", "smollm3"])
@pytest.mark.parametrize("assistant", ["none", "prompt_lookup", "auto", "suffix"])
def test_the_same_tokens(name, assistant, screened):
    model = enabled(name)
    expected = plain(model)
    for _ in range(2):  # the second time, suffix trees know the answers, and what was likely after each token
        assert torch.equal(generate(model, assistant), expected)
    assert any(screened)


def test_the_same_tokens_in_bfloat16(screened, monkeypatch):
    model = enabled().bfloat16()
    found = generate(model, "prompt_lookup")
    assert any(screened)
    monkeypatch.setattr(compiled, "can_screen", lambda weight: False)
    screened.clear()
    assert torch.equal(generate(model, "none"), found)
    assert screened and not any(screened)


@pytest.mark.parametrize(
    "options",
    [
        {"do_sample": True},
        {"repetition_penalty": 1.3},
        {"output_logits": True, "return_dict_in_generate": True},
        {"output_scores": True, "return_dict_in_generate": True},
    ],
)
def test_what_needs_scores_gets_them(options, screened):
    model = enabled()
    torch.manual_seed(0)
    generate(model, "prompt_lookup", **options)
    assert screened and not any(screened)


def test_pieces_of_prompts_whose_scores_are_needed_build_no_screen(screened):
    model = enabled()
    forward = packed_forward(model, prefill_chunk=16)
    for best_only in (False, True):
        screened.clear()
        for _ in range(2):  # in the first forward of all, the program is compared with the layers
            forward.forward([RowInput(forward.add(), torch.arange(3, 43).numpy(), best_only=best_only)])
        assert len(screened) > 2 and any(screened) == best_only


def test_scaled_scores_are_compared_as_they_are(screened):
    """Scaling may round different scores to the same number, of which the first one is picked."""
    model = enabled("granite", logits_scaling=8.0)
    assert torch.equal(generate(model, "prompt_lookup"), plain(model))
    assert screened and not any(screened)


@pytest.mark.parametrize("is_counted", [True, False])
def test_a_head_that_has_changed(is_counted, screened):
    model = enabled(tie_word_embeddings=False)
    before = generate(model, "none")
    weight = model.lm_head.weight
    with torch.no_grad():
        changed = weight if is_counted else weight.data
        changed.copy_(weight.flip(0))
    screened.clear()
    found = generate(model, "none")
    assert any(screened)
    assert torch.equal(found, plain(model)) and not torch.equal(found, before)


def test_heads_that_change_often_are_read_whole(screened, monkeypatch):
    """A screen that serves few forwards, as between two steps of training, costs more than it saves."""
    monkeypatch.setattr(copies, "_LEAST_WAIT", 30)
    model = enabled(tie_word_embeddings=False)
    numbers = []
    for _ in range(6):
        screened.clear()
        generate(model, "none")
        numbers.append(sum(screened))
        model.lm_head.weight.data.neg_()  # which torch does not count
    assert numbers[0] > numbers[2] > numbers[5] > 0 == numbers[1] == numbers[3] == numbers[4]


def test_an_infinite_weight(screened):
    model = enabled(tie_word_embeddings=False)
    generate(model, "none", max_new_tokens=2)
    screened.clear()
    with torch.no_grad():
        model.lm_head.weight[50, 3] = float("inf")
    assert torch.equal(generate(model, "none"), plain(model))
    assert screened and not any(screened)


def test_a_step_without_bounds_takes_the_whole_product(monkeypatch, screened):
    model = enabled()
    expected = plain(model)
    monkeypatch.setattr(screening.ScreenOperators, "tokens", lambda self, num: None)
    assert torch.equal(generate(model, "none"), expected)
    assert any(screened)


def test_a_screen_is_kept_from_call_to_call(monkeypatch):
    built = []
    model = enabled()
    monkeypatch.setattr(compiled, "Screen", lambda weight: built.append(1) or Screen(weight))
    for assistant in ("none", "prompt_lookup", "none"):
        generate(model, assistant)
    assert len(built) == 1 and written_decoder(model) is not None


@pytest.mark.parametrize("error", [MemoryError("no room"), RuntimeError("DefaultCPUAllocator: can't allocate memory")])
def test_heads_are_read_whole_where_there_is_no_memory_for_a_screen(error, monkeypatch, screened):
    """And a screen is tried again, not at every forward."""
    monkeypatch.setattr(copies, "_LEAST_WAIT", 4)
    model, tried = enabled(), []

    def make(weight):
        tried.append(len(screened))
        if len(tried) < 3:
            raise error
        return Screen(weight)

    monkeypatch.setattr(compiled, "Screen", make)
    assert torch.equal(generate(model, "none"), plain(model))
    assert [later - first for first, later in pairwise(tried)] == [5, 9]
    assert any(screened) and not any(screened[: tried[-1]])


def test_programs_of_an_outdated_screen_are_dropped(monkeypatch):
    """Also one that another thread runs meanwhile: it would hold the old copy."""
    model = enabled()
    generate(model, "none")
    program, run = written_decoder(model)._compiled, ForwardProgram.__call__
    monkeypatch.setattr(ForwardProgram, "__call__", lambda self, *args: program.screen._drop() or run(self, *args))
    generate(model, "none", max_new_tokens=3)
    assert not [key for key in program._free if key[-2] is not None]


def test_in_engines(screened):
    """Greedy requests beside a sampled one get logits, and alone best tokens again."""
    model = enabled()
    expected = plain(model)
    with hf_smartspec.Engine(model, assistant="auto") as engine:
        with engine.pause():
            names = [engine.add_request(row.tolist(), max_new_tokens=24) for row in PROMPT]
            sampled = engine.add_request(PROMPT[0].tolist(), max_new_tokens=8, do_sample=True)
        found = [engine.get_result(name, timeout=TIMEOUT) for name in (*names, sampled)]
    for row, output in zip(expected, found):
        assert output.generated_tokens == row[PROMPT.shape[1] :].tolist()
    assert any(screened) and not all(screened)


def test_weights_that_change_in_a_pause(screened):
    """Copied through `.data`, as weight syncing does, which torch does not count."""
    model = enabled(tie_word_embeddings=False)

    def answers():
        names = [engine.add_request(row.tolist(), max_new_tokens=24) for row in PROMPT]
        return [engine.get_result(name, timeout=TIMEOUT).generated_tokens for name in names]

    with hf_smartspec.Engine(model, assistant="none") as engine:
        before = answers()
        with engine.pause():
            model.lm_head.weight.data.copy_(model.lm_head.weight.flip(0))
        screened.clear()
        found = answers()
    assert any(screened) and found != before
    assert found == plain(model)[:, PROMPT.shape[1] :].tolist()
