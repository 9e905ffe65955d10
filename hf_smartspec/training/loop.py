"""The training loop: transformers' `Trainer`, with whole checkpoints about every minute and at Ctrl-C."""

import math
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, LRScheduler
from torch.utils.data import Sampler
from transformers import ProgressCallback, Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_pt_utils import get_length_grouped_indices

from .checkpoints import Checkpoint, distinct, load_weights, write_checkpoint
from .texts import Text, collate

SAVE_SECONDS = 60.0  # between two checkpoints
_WARM_UP = 0.05  # share of a training
_ENDLESS = 1e9  # epochs of a training that ends by the clock


@dataclass(frozen=True)
class Schedule:
    """
    Length and learning rate of a training.

    Args:
        epochs (`float`): Passes over the texts.
        steps (`int`, *optional*): Updates in all, in place of epochs.
        minutes (`float`, *optional*): Time in all, in place of epochs.
        batch_size (`int`): Texts per update.
        max_length (`int`): Tokens per text.
        learning_rate (`float`): Highest rate; after a warm-up it follows a cosine down to 0.
        seed (`int`): Seed of the order of texts.
    """

    epochs: float = 3.0
    steps: int | None = None
    minutes: float | None = None
    batch_size: int = 8
    max_length: int = 512
    learning_rate: float = 1e-3
    seed: int = 0


def train(
    module: nn.Module,
    texts: Sequence[Text],
    folder: Path,
    schedule: Schedule,
    resume: Checkpoint | None = None,
) -> None:
    """
    Train the parameters of a module whose forward returns its loss. Write a checkpoint about every minute, at the end,
    and at Ctrl-C after the running step; a second Ctrl-C stops at once.

    Args:
        folder (`Path`): Folder of checkpoints.
        resume (`Checkpoint`, *optional*): The checkpoint to resume from.

    Raises:
        KeyboardInterrupt: after the checkpoint.
    """
    if resume is not None and resume.is_done:
        load_weights(module, resume.folder)
        return
    arguments = TrainingArguments(
        output_dir=str(folder),
        num_train_epochs=schedule.epochs if schedule.minutes is None else _ENDLESS,
        max_steps=schedule.steps or -1,
        per_device_train_batch_size=schedule.batch_size,
        learning_rate=schedule.learning_rate,
        lr_scheduler_type="cosine",
        warmup_steps=_WARM_UP,
        weight_decay=0.0,
        max_grad_norm=1.0,
        seed=schedule.seed,
        save_strategy="no",  # `_Saving` decides
        logging_steps=10,
        report_to=[],
        remove_unused_columns=False,
        use_cpu=next(module.parameters()).device.type == "cpu",
        dataloader_pin_memory=next(module.parameters()).device.type == "cuda",
        logging_nan_inf_filter=False,  # it waits for a GPU after every update
    )
    arguments._n_gpu = 1  # the target is on one
    examples = [item.example(schedule.max_length) for item in texts]
    clock = None if schedule.minutes is None else _Clock(60 * schedule.minutes)
    saving = _Saving(clock)
    trainer = _Trainer(model=module, args=arguments, train_dataset=examples, data_collator=collate, callbacks=[saving])
    trainer.clock = clock
    if trainer.pop_callback(ProgressCallback) is not None:
        trainer.add_callback(_Progress)
    with _waiting_for_the_step(saving):
        trainer.train(resume_from_checkpoint=None if resume is None else str(resume.folder))
    if saving.is_interrupted:
        raise KeyboardInterrupt


class _Trainer(Trainer):
    """transformers' trainer with checkpoints that are written whole or not at all, and hold tied tensors once."""

    clock: "_Clock | None" = None
    _place: Path | None = None

    def create_scheduler(self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None) -> LRScheduler:
        if self.clock is None:
            return super().create_scheduler(num_training_steps, optimizer)
        assert self.optimizer is not None, "it is made before"
        self.lr_scheduler = LambdaLR(self.optimizer, self.clock)  # its state, and so a checkpoint, holds the clock's
        return self.lr_scheduler

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if self.clock is not None:
            logs.pop("train_samples_per_second", None)  # computed as if all epochs had been run
        super().log(logs, start_time)

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        with write_checkpoint(Path(str(self.args.output_dir)), self.state.global_step) as self._place:
            super()._save_checkpoint(model, trial)
        self._place = None

    def _get_train_sampler(self, train_dataset: Any = None) -> Sampler:
        examples: Any = self.train_dataset if train_dataset is None else train_dataset
        lengths = [len(example["input_ids"]) for example in examples]
        return _Order(lengths, self.args.per_device_train_batch_size, self.args.seed)

    def _get_output_dir(self, trial: Any) -> str:
        return super()._get_output_dir(trial) if self._place is None else str(self._place)

    def _save(self, output_dir: str | None = None, state_dict: dict | None = None) -> None:
        assert self.model is not None, "it is trained"
        super()._save(output_dir, distinct(state_dict or self.model.state_dict()))

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        assert self.model is not None, "it is trained"
        load_weights(model or self.model, Path(resume_from_checkpoint))


class _Order(Sampler):
    """
    Sampler that groups texts of similar lengths, for little padding. The order of an epoch depends on its number and
    the seed only, so that training can resume anywhere.
    """

    def __init__(self, lengths: Sequence[int], batch_size: int, seed: int):
        self._lengths, self._batch_size, self._seed, self._epoch = list(lengths), batch_size, seed, 0

    def set_epoch(self, epoch: int) -> None:
        self._epoch = epoch

    def __len__(self) -> int:
        return len(self._lengths)

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(self._seed + self._epoch)
        return iter(get_length_grouped_indices(self._lengths, self._batch_size, generator=generator))


class _Clock:
    """
    Learning rate of a training that ends by the clock: warm-up and cosine over its time in place of its steps.

    Args:
        seconds (`float`): Time of the training.
    """

    def __init__(self, seconds: float):
        self.seconds, self.used = seconds, 0.0

    def __call__(self, step: int) -> float:
        """Return the share of the highest learning rate."""
        share = min(self.used / self.seconds, 1.0)
        if share < _WARM_UP:
            return share / _WARM_UP
        return 0.5 * (1 + math.cos(math.pi * (share - _WARM_UP) / (1 - _WARM_UP)))

    def num_steps(self, step: int) -> int:
        """Return the updates of the whole training, of which `step` are done: an estimate until the time is over."""
        if self.used >= self.seconds:
            return step
        # Trainer ends where it believes that the next update is the last one.
        return max(round(step * self.seconds / max(self.used, 1e-6)), step + 2)


class _Saving(TrainerCallback):
    """Callback that requests a checkpoint when one is due, and the end of training by the clock or by an interrupt."""

    def __init__(self, clock: _Clock | None) -> None:
        self.is_interrupted = False
        self._clock = clock
        self._latest = self._now = time.monotonic()  # of the latest checkpoint, and of the latest update

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._now = time.monotonic()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        before, self._now = self._now, time.monotonic()
        if self._clock is not None:
            self._clock.used += self._now - before
            state.max_steps = self._clock.num_steps(state.global_step)
        is_over = state.global_step >= state.max_steps
        control.should_save = self._now - self._latest >= SAVE_SECONDS or self.is_interrupted or is_over
        control.should_training_stop = control.should_training_stop or self.is_interrupted or is_over

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._latest = time.monotonic()


class _Progress(ProgressCallback):
    """transformers' progress bar, whose total may change."""

    training_bar: Any

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.training_bar.total = state.max_steps
        super().on_step_end(args, state, control, **kwargs)


@contextmanager
def _waiting_for_the_step(saving: _Saving) -> Iterator[None]:
    """Let the first Ctrl-C wait for the running step: in the middle of an update, weights are half updated."""
    if threading.current_thread() is not threading.main_thread():
        yield  # signals do not arrive here
        return
    before = signal.getsignal(signal.SIGINT)

    def interrupt(*_: Any) -> None:
        saving.is_interrupted = True
        signal.signal(signal.SIGINT, before)

    signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
