"""The training loop is transformers' `Trainer`: progress, schedule, checkpoints and resumption are its."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from safetensors.torch import load_file
from torch import nn
from transformers import Trainer, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

from .texts import Text, collate

_SAVE_STEPS = 100  # between two checkpoints, of which the newest is kept


@dataclass(frozen=True)
class Schedule:
    """
    Args:
        epochs (`float`): Passes over the texts.
        steps (`int`, *optional*): Updates in all, in place of epochs.
        batch_size (`int`): Texts of an update.
        max_length (`int`): Tokens of each.
        learning_rate (`float`): Highest; a cosine down to 0 behind a warm-up.
        seed (`int`): Of the order.
    """

    epochs: float = 3.0
    steps: int | None = None
    batch_size: int = 8
    max_length: int = 512
    learning_rate: float = 1e-3
    seed: int = 0


def train(module: nn.Module, texts: Sequence[Text], folder: Path, schedule: Schedule, resume: bool = False) -> None:
    """
    Trains what is a parameter of a module that returns its loss.

    Args:
        folder (`Path`): Of checkpoints, from the newest of which it goes on if told to `resume`.
    """
    arguments = TrainingArguments(
        output_dir=str(folder),
        num_train_epochs=schedule.epochs,
        max_steps=schedule.steps or -1,
        per_device_train_batch_size=schedule.batch_size,
        learning_rate=schedule.learning_rate,
        lr_scheduler_type="cosine",
        warmup_steps=0.05,
        weight_decay=0.0,
        max_grad_norm=1.0,
        seed=schedule.seed,
        save_steps=_SAVE_STEPS,
        save_total_limit=1,
        logging_steps=10,
        report_to=[],
        remove_unused_columns=False,
        train_sampling_strategy="group_by_length",  # little padding
        use_cpu=next(module.parameters()).device.type == "cpu",
        dataloader_pin_memory=False,
    )
    arguments._n_gpu = 1  # the target is on one
    examples = [item.example(schedule.max_length) for item in texts]
    trainer = Trainer(model=module, args=arguments, train_dataset=examples, data_collator=collate)
    newest = get_last_checkpoint(str(folder)) if resume and folder.is_dir() else None
    if newest is not None and _is_done(Path(newest)):
        module.load_state_dict(load_file(Path(newest) / "model.safetensors"))
    else:
        trainer.train(resume_from_checkpoint=newest)


def _is_done(checkpoint: Path) -> bool:
    state = json.loads((checkpoint / "trainer_state.json").read_text())
    return bool(state["global_step"] >= state["max_steps"])
