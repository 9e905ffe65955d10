"""What is learnt is kept on disk, and found again by the drafter that learnt it."""

import os

import numpy as np
import pytest
import torch

from hf_smartspec.online.checkpoint import Checkpoint
from hf_smartspec.online.learner import Learner

from .helpers import feed, learner_of, new_target, student_with


@pytest.fixture
def target():
    return new_target()


def test_what_was_learnt_is_found_again(target, tmp_path):
    path = tmp_path / "learnt" / "draft.pt"
    first = learner_of(target, checkpoint=Checkpoint(path), tolerance=1.0)
    feed(first, target)
    first.update()
    second = learner_of(target, checkpoint=Checkpoint(path), tolerance=1.0)
    assert second.has_pending and second.statistics.updates == 1
    second.publish()
    assert all(torch.equal(*pair) for pair in zip(second.student.live_weights(), first.student.weights()))
    # It goes on as the first would have.
    for learner in (first, second):
        learner.checkpoint = None  # neither meets the other there
        learner._generator = np.random.default_rng(5)
        learner._buffer.old.clear()
        learner._buffer.fresh.clear()
        feed(learner, target, seed=2)
        learner.update()
    assert all(torch.equal(*pair) for pair in zip(first.student.weights(), second.student.weights()))


def test_what_failed_in_another_process_is_tried_again(target, tmp_path):
    path = tmp_path / "draft.pt"
    first = learner_of(target, checkpoint=Checkpoint(path), tolerance=1.0)
    feed(first, target)
    save = first.checkpoint.save

    def fails_meanwhile(weights, optimizer, statistics):
        save(weights, optimizer, {**statistics, "failure": "OSError()"})

    first.checkpoint.save = fails_meanwhile
    first.update()
    second = learner_of(target, checkpoint=Checkpoint(path))
    assert second.has_pending and not second.has_failed


class Killed(BaseException):
    pass


@pytest.mark.parametrize("where", ["fsync", "replace"])
def test_a_checkpoint_that_is_cut_short_leaves_the_one_before(target, tmp_path, monkeypatch, where):
    path = tmp_path / "draft.pt"
    learner = learner_of(target, checkpoint=Checkpoint(path), tolerance=1.0)
    feed(learner, target)
    learner.update()
    kept = path.read_bytes()

    def kill(*args):
        raise Killed

    monkeypatch.setattr(os, where, kill)
    feed(learner, target, seed=1)
    with pytest.raises(Killed):
        learner.update()
    monkeypatch.undo()
    assert path.read_bytes() == kept and os.listdir(tmp_path) == ["draft.pt"]
    assert learner_of(target, checkpoint=Checkpoint(path)).has_pending


@pytest.mark.parametrize("content", [b"", b"nonsense", "other", "no tensors"])
def test_checkpoints_that_do_not_fit_are_left_aside(target, tmp_path, content, caplog):
    path = tmp_path / "draft.pt"
    if content == "other":
        heads = learner_of(target, "medusa", checkpoint=Checkpoint(path), tolerance=1.0)
        feed(heads, target)
        heads.update()
    elif content == "no tensors":
        torch.save({"format": 1, "origin": "", "weights": [None], "optimizer": {}, "statistics": {}}, path)
    else:
        path.write_bytes(content)
    learner = learner_of(target, checkpoint=Checkpoint(path), tolerance=1.0)
    assert not learner.has_pending
    feed(learner, target)
    learner.update()
    assert learner_of(target, checkpoint=Checkpoint(path)).has_pending


def test_with_another_optimizer_what_was_learnt_is_kept(target, tmp_path):
    path = tmp_path / "draft.pt"
    first = learner_of(target, checkpoint=Checkpoint(path), tolerance=1.0)
    feed(first, target)
    first.update()
    content = torch.load(path, weights_only=True)
    for state in content["optimizer"]["state"].values():  # as of bitsandbytes
        state |= {"state1": state.pop("exp_avg"), "state2": state.pop("exp_avg_sq")}
    torch.save(content, path)
    second = learner_of(target, checkpoint=Checkpoint(path), tolerance=1.0)
    assert second.has_pending
    feed(second, target)
    assert second.update()


def test_two_that_write_one_file_leave_it_whole(tmp_path, monkeypatch):
    path = tmp_path / "draft.pt"
    one, other = Checkpoint(path), Checkpoint(path)
    original = torch.save

    def save(content, file):
        monkeypatch.undo()
        original(content, file)
        other.save([torch.zeros(3)], {}, {})  # in the middle of it

    monkeypatch.setattr(torch, "save", save)
    one.save([torch.ones(3)], {}, {})
    found = one.load([(3,)])
    assert found is not None and torch.equal(found.weights[0], torch.ones(3)) and os.listdir(tmp_path) == ["draft.pt"]


def test_what_a_drafter_of_the_same_shape_has_learnt_is_left_aside(target, tmp_path):
    path = tmp_path / "draft.pt"
    learner = learner_of(target, checkpoint=Checkpoint(path), tolerance=1.0)
    feed(learner, target)
    assert learner.update()
    other = Learner(student_with(new_target(seed=7)), learner.options, Checkpoint(path))
    assert not other.has_pending and other.statistics.updates == 0
    assert learner_of(target, checkpoint=Checkpoint(path)).has_pending


def test_a_checkpoint_that_cannot_be_written_stops_nothing(target, tmp_path):
    (tmp_path / "file").write_text("")
    learner = learner_of(target, checkpoint=Checkpoint(tmp_path / "file" / "draft.pt"), tolerance=1.0)
    feed(learner, target)
    assert learner.update()


def test_replicas_that_share_a_file_meet_half_way(target, tmp_path):
    """What another process has saved meanwhile is averaged with one's own weights, once, and one's own file is not."""
    path = tmp_path / "draft.pt"
    first, second = (learner_of(target, checkpoint=Checkpoint(path), shadow=2, tolerance=1.0) for _ in range(2))
    feed(first, target)
    first.update()
    own = second.student.live_weights()
    begun = []
    second._learn = lambda *_: begun.append(second.student.weights())
    feed(second, target, seed=2)
    second.update()
    assert all(torch.allclose(a, (b + c) / 2) for a, b, c in zip(begun[0], own, first.student.weights()))
    assert second.statistics.meetings == 1 and first.statistics.meetings == 0
    feed(second, target, seed=3)
    second.update()
    assert second.statistics.meetings == 1
    feed(first, target, seed=4)
    first.update()
    assert first.statistics.meetings == 1


def test_without_shadow_drafts_no_mean_is_taken(target, tmp_path):
    """Nothing would tell whether the other's weights draft worse (preset "published" has `shadow=0`)."""
    path = tmp_path / "draft.pt"
    first, second = (learner_of(target, checkpoint=Checkpoint(path), shadow=0) for _ in range(2))
    for learner in (first, second):
        feed(learner, target)
        learner.update()
    assert second.statistics.updates == 1 and second.statistics.meetings == 0


def test_what_another_saves_right_after_a_save_is_met(tmp_path, monkeypatch):
    path = tmp_path / "draft.pt"
    one, other = Checkpoint(path), Checkpoint(path)
    original = os.replace

    def replace(source, destination):
        monkeypatch.undo()
        original(source, destination)
        other.save([torch.zeros(3)], {}, {})

    monkeypatch.setattr(os, "replace", replace)
    one.save([torch.ones(3)], {}, {})
    found = one.load_of_others([(3,)])
    assert found is not None and torch.equal(found.weights[0], torch.zeros(3))
    assert one.load_of_others([(3,)]) is None and other.load_of_others([(3,)]) is None
