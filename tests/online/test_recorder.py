"""What is kept of a request is what one plain forward over its text says, however it was decoded."""

import numpy as np
import pytest
import torch
from transformers import GenerationMixin

from hf_smartspec import Engine, OnlineDistillation, SmartSpecConfig, enable
from hf_smartspec.candidates.committed import Committed
from hf_smartspec.decoding import source_guard
from hf_smartspec.decoding.learning import Shown
from hf_smartspec.drafts.tree import DraftTree
from hf_smartspec.online import recorder as recorders
from hf_smartspec.online.recorder import SampleRecorder

from ..models import VOCAB_SIZE, with_noise
from .helpers import KINDS, new_drafter, new_target, sample_of

PROMPTS = [[5, 6, 7, 8, 9, 10, 11], [12, 13], [5, 6, 7, 8, 20, 21, 22, 23, 24]]


@pytest.fixture
def target():
    return enable(new_target())


def online_that_keeps() -> OnlineDistillation:
    return OnlineDistillation(background=False, every_requests=10**6, top_k=8, shadow=0)


def kept(online):
    return [sample for learner in online._learners.values() for sample in learner._buffer.new]


def check(target, sample, layers, start=0):
    text = [*sample.prompt.tolist(), *sample.response.tolist()]
    wanted = sample_of(target, text[: len(sample.prompt)], sample.response.tolist(), layers)
    if not start:
        torch.testing.assert_close(sample.top_probs, wanted.top_probs, rtol=0, atol=2e-3)
        for layer in layers:
            torch.testing.assert_close(sample.hidden[layer], wanted.hidden[layer], rtol=0, atol=1e-4)
    return sample.top_ids[:, 0]


@pytest.mark.parametrize("do_sample", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_samples_of_a_batch(target, kind, do_sample):
    drafter = with_noise(new_target(), 0.02) if kind == "draft" else new_drafter(kind, target)
    online = online_that_keeps()
    prompts = [[0] * (9 - len(prompt)) + prompt for prompt in PROMPTS]
    ids = torch.tensor(prompts)
    mask = torch.tensor([[0] * (9 - len(prompt)) + [1] * len(prompt) for prompt in PROMPTS])
    assistant = SmartSpecConfig(drafter, num_nodes=4, online=online)
    arguments = {"attention_mask": mask, "max_new_tokens": 14, "do_sample": do_sample, "seed": 3 if do_sample else None}
    output = target.generate(ids, assistant=assistant, **arguments)
    samples = {tuple(item.prompt.tolist()): item for item in kept(online)}
    assert len(samples) == 3
    for prompt, row in zip(PROMPTS, output[:, 9:].tolist()):
        sample = samples[tuple(prompt)]
        assert sample.response.tolist() == row and sample.is_greedy is not do_sample
        (learner,) = online._learners.values()
        assert set(sample.hidden) == set(learner.student.hidden_layers)
        check(target, sample, tuple(sample.hidden))
        if not do_sample:
            assert sample.top_ids[:, 0].tolist() == row


@pytest.mark.parametrize("kind", KINDS)
def test_samples_of_an_engine_whose_prompts_come_in_pieces_and_begin_alike(target, kind):
    online = online_that_keeps()
    with Engine(target, new_drafter(kind, target), max_prefill_tokens=3, online=online) as engine:
        outputs = [engine.get_result(engine.add_request(prompt, max_new_tokens=9)) for prompt in PROMPTS]
    samples = kept(online)
    assert len(samples) == 3
    for prompt, output, sample in zip(PROMPTS, outputs, samples):
        assert sample.response.tolist() == output.generated_tokens
        # Where a prefix was there already, its hidden states are not.
        assert sample.prompt.tolist() == prompt[len(prompt) - len(sample.prompt) :]
        if len(sample.prompt) == len(prompt):
            check(target, sample, tuple(sample.hidden))
        else:
            wanted = sample_of(target, prompt, output.generated_tokens, tuple(sample.hidden))
            for layer, states in sample.hidden.items():
                torch.testing.assert_close(states, wanted.hidden[layer][-len(states) :], rtol=0, atol=1e-4)
            torch.testing.assert_close(sample.top_probs, wanted.top_probs, rtol=0, atol=2e-3)


def test_requests_that_are_hardly_drafted_for_teach_too(target):
    online = online_that_keeps()
    draft = new_drafter("draft", target)
    with Engine(target, draft, online=online) as engine:
        engine._runner.loop.drafting.sources.gates[engine._assistant.source.name].admits = lambda request: False
        output = engine.get_result(engine.add_request(PROMPTS[0], max_new_tokens=9))
    assert output.statistics.drafted_tokens == 0
    (sample,) = kept(online)
    assert sample.response.tolist() == output.generated_tokens
    check(target, sample, ())


def test_cancelled_requests_teach_what_they_have(target):
    online = online_that_keeps()
    seen = []
    with Engine(target, new_drafter("draft", target), online=online) as engine:
        name = engine.add_request(PROMPTS[0], max_new_tokens=500, streaming=True)
        for output in engine.request_id_iter(name):
            seen = output.generated_tokens
            engine.cancel_request(name)
    (sample,) = kept(online)
    assert sample.response.tolist()[: len(seen)] == seen


def test_samples_end_before_a_step_that_could_not_be_shown(target, monkeypatch):
    online, calls, show = online_that_keeps(), [], source_guard.show_steps

    def failing(rows, *arguments):
        calls.extend(rows)
        if len(calls) == 4:
            raise RuntimeError("not enough memory")
        show(rows, *arguments)

    monkeypatch.setattr(source_guard, "show_steps", failing)
    assistant = SmartSpecConfig(new_drafter("eagle3", target), num_nodes=4, online=online)
    output = target.generate(torch.tensor(PROMPTS[:1]), assistant=assistant, max_new_tokens=14)[0, len(PROMPTS[0]) :]
    (sample,) = kept(online)
    num = len(sample.response)
    assert 3 <= num < 14 and len(calls) > 4 and sample.response.tolist() == output[:num].tolist()
    check(target, sample, tuple(sample.hidden))


def test_all_rows_of_a_step_are_looked_at_together(target, monkeypatch):
    calls = []
    original = recorders.likeliest_tokens
    monkeypatch.setattr(recorders, "_LINES", 10**6)
    monkeypatch.setattr(recorders, "likeliest_tokens", lambda *args: calls.append(len(args[0])) or original(*args))
    online = online_that_keeps()
    assistant = SmartSpecConfig(new_drafter("draft", target), num_nodes=2, online=online)
    output = target.generate(torch.tensor([[5, 6, 7]] * 4), assistant=assistant, max_new_tokens=10, eos_token_id=-1)
    assert len(calls) <= 10 and sum(calls) == output[:, 3:].numel() == 40


def step(tokens, path=(), tree=None, **fields):
    size = 1 + (0 if tree is None else len(tree))
    logits = torch.randn(3 + size, VOCAB_SIZE, generator=torch.Generator().manual_seed(size))
    found = Committed(np.array(tokens), np.array(path, np.int64), tree=tree or DraftTree.empty(), **fields)
    return {"a": Shown(found, 3)}, logits  # behind lines of others


def test_errors_stand_where_a_draft_had_something_else():
    samples = []
    recorder = SampleRecorder(samples.append, 4)
    recorder.start("a", np.array([3, 4]), True)
    tree = DraftTree(np.array([5, 6, 7]), np.array([-1, 0, 1]), np.ones(3, np.float32))
    recorder.show(*step([9]))  # nothing was drafted
    recorder.show(*step([5, 6, 8], [0, 1], tree))  # right, right, wrong
    recorder.show(*step([5, 6, 7, 1], [0, 1, 2], tree))  # right, and behind the draft nothing was said
    recorder.show(*step([2], [], tree))  # wrong at once
    recorder.stop("a")
    (sample,) = samples
    assert sample.response.tolist() == [9, 5, 6, 8, 5, 6, 7, 1, 2]
    assert sample.errors.nonzero()[0].tolist() == [3, 8]


def hidden(first, num):
    return {0: torch.arange(first, first + num, dtype=torch.float32)[:, None]}


def test_texts_that_are_run_anew_have_each_state_once():
    samples = []
    recorder = SampleRecorder(samples.append, 4, [0])
    recorder.start("a", np.array([3, 4, 5]), True)
    recorder.show({"a": Shown(Committed(np.empty(0, np.int64), hidden_states=hidden(0, 2)), 0)}, None)
    recorder.show(*step([6], hidden_states=hidden(2, 1), start=2))
    recorder.show(*step([7], hidden_states=hidden(1, 3), start=1))  # weights have changed, say
    recorder.stop("a")
    assert samples[0].hidden[0][:, 0].tolist() == [0, 1, 2, 3] and samples[0].num_tokens == 5


def test_texts_with_gaps_are_left_out():
    samples = []
    recorder = SampleRecorder(samples.append, 4, [0])
    recorder.start("a", np.array([3, 4, 5]), True)
    recorder.show(*step([6], hidden_states=hidden(0, 3)))
    recorder.show(*step([7], hidden_states=hidden(5, 1), start=5))
    recorder.stop("a")
    recorder.start("b", np.array([3, 4, 5]), True)
    recorder.stop("b")
    recorder.stop("unknown")
    assert not samples


def test_of_long_texts_the_end_is_kept(target):
    sample = sample_of(target, list(range(3, 13)), [20, 21, 22, 23], (0,))
    short = sample.end(6)
    assert [*short.prompt, *short.response] == [11, 12, 20, 21, 22, 23]
    assert torch.equal(short.hidden[0], sample.hidden[0][8:]) and sample.end(14) is sample
    shorter = sample.end(3)
    assert [*shorter.prompt, *shorter.response] == [12, 20, 21] and len(shorter.top_ids) == 2


def test_nothing_is_computed_for_calls_that_teach_nobody(target):
    output = target.generate(torch.tensor([PROMPTS[0]]), assistant=new_drafter("draft", target), max_new_tokens=5)
    plain = GenerationMixin.generate(target, torch.tensor([PROMPTS[0]]), max_new_tokens=5)
    assert torch.equal(output, plain)


@pytest.mark.parametrize("length", [6, 12])
@pytest.mark.parametrize("kind", KINDS)
def test_of_long_requests_no_more_is_kept_meanwhile_than_samples_need(target, kind, length, monkeypatch):
    most = []
    original = SampleRecorder.show

    def show(self, steps, logits):
        original(self, steps, logits)
        most.extend((self._recordings[name].num_hidden, self._recordings[name].num_tokens) for name in steps)

    monkeypatch.setattr(SampleRecorder, "show", show)
    prompt, new = list(range(5, 45)), 20
    options = {"background": False, "every_requests": 10**6, "top_k": 8, "shadow": 0}
    samples = []
    for max_length in (length, 1000):
        online = OnlineDistillation(**options, max_length=max_length)
        with Engine(
            target, SmartSpecConfig(new_drafter(kind, target), num_nodes=2), max_prefill_tokens=7, online=online
        ) as engine:
            engine.get_result(engine.add_request(prompt, max_new_tokens=new))
        samples += kept(online)
        if max_length == length:
            assert max(hidden for hidden, _ in most) <= 2 * length + 3 and max(num for _, num in most) <= length + 1
    short, long = samples[0], samples[1].end(length)
    assert short.prompt.tolist() == long.prompt.tolist() and short.response.tolist() == long.response.tolist()
    assert torch.equal(short.top_ids, long.top_ids) and short.num_tokens == length
    for layer, states in short.hidden.items():
        torch.testing.assert_close(states, long.hidden[layer], rtol=0, atol=1e-4)
        assert states.untyped_storage().nbytes() == states.nbytes


def test_a_request_of_which_a_step_could_not_be_kept_teaches_nothing():
    samples = []
    recorder = SampleRecorder(samples.append, 4)
    recorder.start("a", np.array([1, 2]), True)
    recorder.show(*step([3]))
    with pytest.raises(AttributeError):
        recorder.show({"a": Shown(Committed(np.array([4])), 0)}, "none")
    recorder.show(*step([5]))
    recorder.stop("a")
    assert not samples and not recorder._recordings
