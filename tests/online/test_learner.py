"""Updates learn what they should, take nothing over that drafts worse, and lose nothing when they are cut short."""

import threading
from contextlib import nullcontext

import pytest
import torch

from hf_smartspec.online.learner import Learner, LearningEndedError
from hf_smartspec.online.losses import LOSSES
from hf_smartspec.online.options import LearningOptions

from ..covering import exhaustive, part_of
from .helpers import KINDS, TIMEOUT, feed, learner_of, new_drafter, new_target, samples_of, student_with


@pytest.fixture
def target():
    return new_target()


@pytest.mark.parametrize("kind", part_of(KINDS, "draft", "medusa"))
def test_what_was_learnt_drafts_better_and_only_once_it_is_published(target, kind):
    learner = learner_of(target, kind, passes=12, tolerance=1.0, learning_rate=3e-2 if kind == "medusa" else 3e-3)
    feed(learner, target)
    samples = [*learner._buffer.new]
    before, live = learner.acceptance(samples), learner.student.live_weights()
    assert learner.update()
    assert learner.acceptance(samples) > before + 0.1
    assert all(torch.equal(*pair) for pair in zip(learner.student.live_weights(), live))
    learner.publish()
    assert all(torch.equal(*pair) for pair in zip(learner.student.live_weights(), learner.student.weights()))
    assert learner.statistics.swaps == learner.statistics.updates == 1 and not learner.has_pending


@pytest.mark.parametrize("loss", part_of(LOSSES, "kl", "labels"))
def test_every_loss_brings_the_drafter_nearer(target, loss):
    learner = learner_of(target, loss=loss, passes=8, shadow=0)
    feed(learner, target)
    samples = [*learner._buffer.new]
    before = learner.acceptance(samples)
    learner.update()
    assert learner.acceptance(samples) > before + 0.05


def test_what_drafts_worse_is_given_up(target):
    learner = learner_of(target, learning_rate=30.0)
    # A drafter that is always right.
    learner = Learner(student_with(new_target()), learner.options)
    feed(learner, target)
    live = learner.student.live_weights()
    assert not learner.update()
    learner.publish()
    assert all(torch.equal(*pair) for pair in zip(learner.student.live_weights(), live))
    counts = learner.statistics
    assert (counts.rollbacks, counts.swaps, counts.acceptance, counts.acceptance_before) == (1, 0, 1.0, 1.0)
    # When that has led nowhere for long, it goes on from what drafts.
    for seed in range(1, 5):
        feed(learner, target, seed=seed)
        assert not learner.update()
    feed(learner, target, seed=5)
    learner.options.__dict__["learning_rate"] = 0.0  # frozen against accidents
    assert learner.update()
    assert all(torch.equal(*pair) for pair in zip(learner.student.weights(), live))


def test_updates_that_are_not_taken_over_lose_nothing_that_was_learnt(target, monkeypatch):
    """After a shift, texts that are held out are those before it at first."""
    patient, eager = learner_of(target, shadow=0), learner_of(target, shadow=0)
    verdicts = iter([False, False, True])
    monkeypatch.setattr(patient, "_judge", lambda *args: next(verdicts))
    live = patient.student.live_weights()
    for seed in range(3):
        assert not patient.has_pending and all(torch.equal(*pair) for pair in zip(patient.student.live_weights(), live))
        for learner in (patient, eager):
            feed(learner, target, 4, seed)
            learner.update()
    assert all(torch.equal(*pair) for pair in zip(patient._pending, eager._pending))
    assert patient.statistics.rollbacks == 2


@pytest.mark.parametrize("is_worse", [False, True])
def test_what_may_be_chance_is_taken_over(target, monkeypatch, is_worse):
    learner = learner_of(target, tolerance=0.0)
    feed(learner, target)
    before = torch.ones(100)
    after = before.clone()
    after[: 10 if is_worse else 3] = 0.0  # a tenth is three standard errors
    answers = iter([(after, torch.ones(100)), (before, torch.ones(100))])
    monkeypatch.setattr(learner, "_judged", lambda samples, go_on: next(answers))
    assert learner.update() is not is_worse


def test_weights_that_are_no_numbers_any_more_are_given_up_at_once(target, monkeypatch):
    learner = learner_of(target, shadow=0)
    original, live = learner._learn, learner.student.live_weights()
    monkeypatch.setattr(learner, "_judge", lambda *args: False)
    monkeypatch.setattr(learner, "_learn", lambda *args: learner.student.parameters[0][1].data.fill_(float("nan")))
    feed(learner, target)
    assert not learner.update()
    monkeypatch.undo()
    monkeypatch.setattr(learner, "_learn", original)
    learner.options.__dict__["learning_rate"] = 0.0
    feed(learner, target, 4)
    assert learner.update() and all(torch.equal(*pair) for pair in zip(learner._pending, live))


def test_shadow_drafts_are_of_texts_that_nothing_was_learnt_from(target, monkeypatch):
    learner = learner_of(target)
    learnt, judged = [], []
    monkeypatch.setattr(learner, "_learn", lambda samples, go_on: learnt.append(list(samples)))
    monkeypatch.setattr(learner, "_judged", lambda samples, go_on: judged.append(list(samples)) or [torch.ones(1)] * 2)
    for seed in range(3):
        feed(learner, target, 8, seed)
        learner.update()
        before = [sample for samples in learnt for sample in samples]
        assert judged[-1] and not set(judged[-1]) & set(before)
    everything = {sample for samples in learnt for sample in samples}
    assert len(everything) == 24 - len(learner._buffer.fresh)  # what was fresh is learnt later


def test_held_out_samples_count_and_leave_room_for_others(target):
    size = samples_of(target, 1)[0].num_bytes
    learner = learner_of(target, shadow=50, max_bytes=6 * size)
    feed(learner, target, 40)
    assert learner.statistics.buffer_bytes <= 6 * size
    assert len(learner._buffer.new) == len(learner._buffer.fresh) == 3
    learner.update()
    assert learner.statistics.updates == 1


def test_an_update_that_is_cut_short_loses_nothing_but_itself(target):
    learner = learner_of(target)
    feed(learner, target)
    new, live = [*learner._buffer.new], learner.student.live_weights()
    calls = []

    def go_on():
        calls.append(1)
        if len(calls) == 3:
            raise LearningEndedError

    with pytest.raises(LearningEndedError):
        learner.update(go_on)
    assert learner._buffer.new == new and not learner.has_pending
    assert learner.update()
    learner.publish()
    assert not all(torch.equal(*pair) for pair in zip(learner.student.live_weights(), live))


@pytest.mark.parametrize(
    "limit, is_due", [({"every_requests": 4}, [0, 0, 0, 1]), ({"every_requests": None, "every_tokens": 20}, [0, 1])]
)
def test_when_an_update_is_due(target, limit, is_due):
    learner = learner_of(target, shadow=0, **limit)
    for sample, due in zip(samples_of(target, 4), is_due):
        learner._keep(sample)
        assert learner.is_due == bool(due)
    learner.update()
    assert not learner.is_due


def test_an_update_is_due_after_a_time_if_there_is_anything_to_learn(target):
    learner = learner_of(target, shadow=0, every_requests=None, every_seconds=1e-9)
    assert not learner.is_due
    feed(learner, target, 1)
    assert learner.is_due


@pytest.mark.parametrize("ends", [False, True])
def test_who_gives_up_in_the_middle_of_an_update_keeps_nothing(target, ends):
    learner = learner_of(target, tolerance=1.0)
    feed(learner, target)

    def go_on():
        learner.give_up(OSError())  # as where weights cannot be handed over
        if ends:
            raise LearningEndedError

    with pytest.raises(LearningEndedError) if ends else nullcontext():
        assert not learner.update(go_on)
    assert learner.has_failed and not learner.has_pending and not len(learner._buffer) and not learner.is_due


@pytest.mark.parametrize(
    "options, message",
    [
        ({"loss": "tv"}, "`loss` must be one of"),
        ({"every_requests": None}, "must not all be None"),
        ({"every_requests": 0}, "every_requests"),
        ({"beta": 1.0}, "`beta`"),
        ({"temperature": 0.0}, "`temperature`"),
        ({"tolerance": -1.0}, "`tolerance`"),
        ({"max_length": 1}, "`max_length`"),
        ({"eviction": "oldest"}, "`eviction` must be one of"),
    ],
)
def test_options_out_of_range_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        LearningOptions(**options)


def test_steps_of_infinite_gradients_are_left_out(target, monkeypatch):
    learner = learner_of(target, shadow=0)
    feed(learner, target)
    original, before = learner._loss, learner.student.live_weights()
    monkeypatch.setattr(learner, "_loss", lambda batch: original(batch) * float("inf"))
    learner.update()
    assert all(torch.equal(*pair) for pair in zip(learner.student.weights(), before))


def test_one_update_at_a_time(target, monkeypatch):
    learner = learner_of(target)
    feed(learner, target)
    begun, may_go_on = threading.Semaphore(0), threading.Semaphore(0)
    original = learner._learn

    def learn(*args):
        begun.release()
        assert may_go_on.acquire(timeout=TIMEOUT)
        original(*args)

    monkeypatch.setattr(learner, "_learn", learn)
    first = threading.Thread(target=learner.update)
    first.start()
    assert begun.acquire(timeout=TIMEOUT)
    feed(learner, target)
    second = threading.Thread(target=learner.update)
    second.start()
    assert not begun.acquire(timeout=0.05)
    may_go_on.release(2)
    first.join()
    second.join()
    assert learner.statistics.updates == 2


def test_an_update_never_begins_with_weights_that_are_half_taken_over(target, monkeypatch):
    learner = learner_of(target, shadow=0)
    feed(learner, target)
    assert learner.update()
    feed(learner, target)
    has_read, original, live = threading.Event(), learner.student.publish, learner.student.live_weights
    other = threading.Thread(target=learner.update)

    def publish(weights):
        other.start()
        assert not has_read.wait(0.05)
        original(weights)

    monkeypatch.setattr(learner.student, "live_weights", lambda: has_read.set() or live())
    monkeypatch.setattr(learner.student, "publish", publish)
    learner.publish()
    other.join()
    assert has_read.is_set() and learner.statistics.updates == 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, *exhaustive([torch.float32])])
def test_callers_contexts_change_nothing(target, dtype):
    found = []
    for context in (torch.enable_grad(), torch.no_grad(), torch.autocast("cpu", torch.bfloat16)):
        student = student_with(new_drafter("draft", target).to(dtype))
        learner = Learner(student, LearningOptions(learning_rate=3e-3, shadow=0, batch_tokens=64, passes=2))
        feed(learner, target, 6)
        with context:
            learner.update()
        found.append(learner.student.weights())
    assert all(torch.equal(*pair) for other in found[1:] for pair in zip(found[0], other))
