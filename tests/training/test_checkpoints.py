"""Checkpoints are whole, hold tied tensors once, and the newest of them is where training goes on."""

import math
import shutil
from types import SimpleNamespace

import pytest
import torch

from hf_smartspec.commands.train.kinds import shortened
from hf_smartspec.training import loop
from hf_smartspec.training.checkpoints import distinct, load_weights, newest_checkpoint, write_checkpoint
from hf_smartspec.training.draft import DraftTraining
from hf_smartspec.training.loop import Schedule, train

from ..covering import exhaustive
from ..generate.helpers import tiny_llama
from .test_medusa import texts_of

SCHEDULE = Schedule(steps=6, batch_size=4, max_length=32)


@pytest.fixture
def module():
    target = tiny_llama(vocab_size=100, tie_word_embeddings=True)
    return lambda: DraftTraining(target, shortened(target, 1))


@pytest.fixture
def every_step(monkeypatch):
    monkeypatch.setattr(loop, "SAVE_SECONDS", 0)


def weights(module):
    return module.draft.state_dict()


def steps_in(folder):
    return sorted(int(path.name.removeprefix("checkpoint-")) for path in folder.glob("checkpoint-*"))


def test_without_a_minute_one_is_written_at_the_end_alone(module, tmp_path):
    train(module(), texts_of(16), tmp_path, SCHEDULE)
    assert steps_in(tmp_path) == [6] and newest_checkpoint(tmp_path).is_done


def test_the_newest_is_kept_and_one_to_step_back_to(module, tmp_path, every_step):
    train(module(), texts_of(16), tmp_path, SCHEDULE)
    assert steps_in(tmp_path) == [5, 6]


@pytest.mark.parametrize(
    "name", ["model.safetensors", None, *exhaustive(["optimizer.pt"], ["scheduler.pt"], ["trainer_state.json"])]
)
def test_a_half_written_one_is_skipped(module, tmp_path, every_step, caplog, name):
    whole = module()
    train(whole, texts_of(16), tmp_path, SCHEDULE)
    newest = tmp_path / "checkpoint-6"
    if name is None:
        shutil.rmtree(newest)
        newest.mkdir()
    else:
        content = (newest / name).read_bytes()
        (newest / name).write_bytes(content[: len(content) // 2])
    found = newest_checkpoint(tmp_path)
    assert (found.step, found.num_steps) == (5, 6) and "incomplete" in caplog.text
    resumed = module()
    train(resumed, texts_of(16), tmp_path, SCHEDULE, found)
    for key, item in weights(whole).items():
        torch.testing.assert_close(weights(resumed)[key], item)
    assert newest_checkpoint(tmp_path).step == 6


def test_an_incomplete_one_takes_no_place_of_those_that_are_kept(tmp_path):
    for step in (100, 200):
        write(tmp_path, step)
    (tmp_path / "checkpoint-200" / "state.json").unlink(missing_ok=True)
    for step in (150, 170):
        write(tmp_path, step)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-150", "checkpoint-170"]


def write(folder, step):
    with write_checkpoint(folder, step) as place:
        (place / f"checkpoint-{step}").mkdir()
        (place / f"checkpoint-{step}" / "state.json").write_text("{}")


def test_an_end_while_one_is_written_leaves_the_one_before(module, tmp_path, every_step, monkeypatch):
    save = loop._Trainer._save_rng_state

    def fail_at_four(self, folder):
        if self.state.global_step == 4:
            raise SystemExit("killed")
        save(self, folder)

    monkeypatch.setattr(loop._Trainer, "_save_rng_state", fail_at_four)
    with pytest.raises(SystemExit):
        train(module(), texts_of(16), tmp_path, SCHEDULE)
    assert steps_in(tmp_path) == [2, 3] and newest_checkpoint(tmp_path).step == 3


def test_tied_tensors_are_kept_once_and_loaded_into_both(module, tmp_path):
    whole = module()
    kept = distinct(whole.state_dict())
    assert whole.state_dict().keys() - kept.keys() == {"draft.lm_head.weight"}
    train(whole, texts_of(16), tmp_path, SCHEDULE)
    loaded = module()
    load_weights(loaded, newest_checkpoint(tmp_path).folder)
    assert loaded.draft.lm_head.weight is loaded.draft.get_input_embeddings().weight
    assert all(torch.equal(weights(loaded)[key], item) for key, item in weights(whole).items())


def test_another_models_checkpoint_is_refused(module, tmp_path):
    train(module(), texts_of(16), tmp_path, SCHEDULE)
    target = tiny_llama(vocab_size=100)
    with pytest.raises(ValueError, match="tensors of another model"):
        load_weights(DraftTraining(target, shortened(target, 2)), newest_checkpoint(tmp_path).folder)


def rate_at(share):
    """Return the learning rate after a share of the time, by a cosine after the warm-up."""
    return 1e-3 * 0.5 * (1 + math.cos(math.pi * (share - 0.05) / 0.95))


@pytest.mark.parametrize("num_before", [0, 4])
def test_a_training_by_the_clock_ends_when_its_time_is_over(module, tmp_path, monkeypatch, num_before):
    """An update takes six seconds; what passes between an interrupt and the next run does not count."""
    now, calls, forward = [0.0], [], DraftTraining.forward

    def six_seconds(self, input_ids, labels):
        now[0] += 6
        calls.append(input_ids)
        if len(calls) == num_before + 1 and num_before:
            raise KeyboardInterrupt
        return forward(self, input_ids, labels)

    monkeypatch.setattr(loop, "time", SimpleNamespace(monotonic=lambda: now[0]))
    schedule = Schedule(minutes=1.0, batch_size=4, max_length=32)
    whole = module()
    with monkeypatch.context() as patch:
        patch.setattr(loop, "SAVE_SECONDS", 0)
        patch.setattr(DraftTraining, "forward", six_seconds)
        if num_before:
            with pytest.raises(KeyboardInterrupt):
                train(whole, texts_of(16), tmp_path, schedule)
            found = newest_checkpoint(tmp_path)
            assert (found.step, found.num_steps, found.is_done) == (4, 10, False)
            now[0] += 1000
            whole = module()
        train(whole, texts_of(16), tmp_path, schedule, newest_checkpoint(tmp_path))
    assert len(calls) == (11 if num_before else 10)
    found = newest_checkpoint(tmp_path)
    assert (found.step, found.is_done) == (10, True)
    scheduler = torch.load(found.folder / "scheduler.pt", weights_only=True)
    assert scheduler["_last_lr"] == pytest.approx([rate_at(54 / 60)] * 2)
    again = module()
    train(again, texts_of(16), tmp_path, schedule, found)
    assert all(torch.equal(weights(again)[key], item) for key, item in weights(whole).items()), "nothing is left to do"
