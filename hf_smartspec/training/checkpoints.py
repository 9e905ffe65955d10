"""Checkpoints of training, written whole or not at all."""

import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple
from zipfile import is_zipfile

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import nn

from ..log import get_logger

logger = get_logger(__name__)

_NAME = re.compile(r"checkpoint-(\d+)")
_UNFINISHED = "unfinished"  # folder of the checkpoint that is being written
_KEPT = 2  # the newest, and one to fall back to
_WEIGHTS, _STATE = "model.safetensors", "trainer_state.json"
_ARCHIVES = ("optimizer.pt", "scheduler.pt")


class Checkpoint(NamedTuple):
    """
    A complete checkpoint.

    Args:
        folder (`Path`): The checkpoint's folder.
        step, num_steps (`int`): Updates up to the checkpoint, and of the whole training.
    """

    folder: Path
    step: int
    num_steps: int

    @property
    def is_done(self) -> bool:
        """Return whether training was complete."""
        return self.step >= self.num_steps


def newest_checkpoint(folder: Path) -> Checkpoint | None:
    """Return the newest complete checkpoint in a folder, or None; log a warning for each incomplete one."""
    for path in _newest_first(folder):
        if (found := _opened(path)) is not None:
            return found
        logger.warning(f"The checkpoint {str(path)!r} is incomplete: falling back to the one before.")
    return None


@contextmanager
def write_checkpoint(folder: Path, step: int) -> Iterator[Path]:
    """
    Yield a folder in which the caller writes `checkpoint-{step}`. It is then moved to its place, and all but the newest
    checkpoints are deleted.
    """
    place = folder / _UNFINISHED
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    yield place
    for file in place.rglob("*"):
        if file.is_file():
            with open(file, "rb+") as written:
                os.fsync(written.fileno())
    written_folder, final = place / f"checkpoint-{step}", folder / f"checkpoint-{step}"
    shutil.rmtree(final, ignore_errors=True)  # an incomplete one
    os.replace(written_folder, final)
    shutil.rmtree(place)
    found = _newest_first(folder)
    newest = found.index(final)  # those of later steps were incomplete, and training resumed before them
    for old in found[:newest] + found[newest + _KEPT :]:
        shutil.rmtree(old, ignore_errors=True)


def distinct(state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the tensors of a state dict, with tied tensors once, under the first of their names."""
    seen: dict[tuple, str] = {}
    return {name: item for name, item in state.items() if seen.setdefault(_identity(name, item), name) == name}


def load_weights(module: nn.Module, checkpoint: Path) -> None:
    """
    Load the tensors that `distinct` has kept into a module; tied ones share them.

    Raises:
        ValueError: if the names of the tensors are not the module's.
    """
    found = load_file(checkpoint / _WEIGHTS)
    if found.keys() != distinct(module.state_dict()).keys():
        raise ValueError(f"The checkpoint {str(checkpoint)!r} holds the tensors of another model.")
    module.load_state_dict(found, strict=False)


def _identity(name: str, item: torch.Tensor) -> tuple:
    return (item.data_ptr(), item.shape, item.stride()) if item.numel() else (name,)


def _newest_first(folder: Path) -> list[Path]:
    steps = {path: found for path in folder.glob("*") if path.is_dir() and (found := _NAME.fullmatch(path.name))}
    return sorted(steps, key=lambda path: -int(steps[path][1]))


def _opened(path: Path) -> Checkpoint | None:
    """Return the checkpoint in a folder, or None if a file that training resumes from is missing or incomplete."""
    try:
        state = json.loads((path / _STATE).read_text())
        with safe_open(path / _WEIGHTS, "pt"):  # raises for files that are too short
            pass
        if all(is_zipfile(path / name) for name in _ARCHIVES):
            return Checkpoint(path, int(state["global_step"]), int(state["max_steps"]))
    except (OSError, ValueError, KeyError, SafetensorError):
        pass
    return None
