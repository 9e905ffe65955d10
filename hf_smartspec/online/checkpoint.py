"""Checkpoints of online learning: one file per drafter, written whole or not at all."""

import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..files import replacing
from ..log import get_logger

logger = get_logger(__name__)

_FORMAT = 1
_HASHED = 4096  # numbers of each tensor that identify the original weights


@dataclass
class Found:
    """The contents of a checkpoint."""

    weights: list[torch.Tensor]
    optimizer: dict[str, Any]
    statistics: dict[str, Any]


class Checkpoint:
    """
    A file that is replaced as a whole, so that readers find the old or the new one. Replicas may share it: each writes
    its own weights, and finds those that another one has written since.

    Args:
        path (`Path`): The file's path.
    """

    def __init__(self, path: Path):
        self.path, self._origin = path, ""
        self._known: tuple[int, int] | None = None  # the file that was written or read last: its number and time

    def begin(self, weights: Sequence[torch.Tensor]) -> None:
        """Set the drafter's original weights: only checkpoints that have learnt from the same weights are loaded."""
        digest = hashlib.sha256()
        for item in weights:
            digest.update(item.flatten()[:_HASHED].float().cpu().numpy().tobytes())
        self._origin = digest.hexdigest()

    def save(
        self, weights: Sequence[torch.Tensor], optimizer: Mapping[str, Any], statistics: Mapping[str, Any]
    ) -> None:
        """Write the file; log a warning if it cannot be written."""
        content = {
            "format": _FORMAT,
            "origin": self._origin,
            "weights": [item.cpu() for item in weights],
            "optimizer": dict(optimizer),
            "statistics": dict(statistics),
        }
        try:
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with replacing(self.path, is_private=True) as file:
                torch.save(content, file)
                file.flush()
                known = _identity(os.fstat(file.fileno()))  # before the move: another one may replace the file after it
            self._known = known
        except (OSError, RuntimeError) as error:
            logger.warning_once(f"What a drafter has learnt cannot be written to {self.path}: {error}")

    def load(self, shapes: Sequence[tuple[int, ...]]) -> Found | None:
        """Return the file's contents; None, with a warning if there is a file, unless its weights fit the drafter."""
        self._known = self._present()
        if self._known is None:
            return None
        try:
            content = torch.load(self.path, map_location="cpu", weights_only=True)
            is_own = content["format"] == _FORMAT and content["origin"] == self._origin
            fits = is_own and [tuple(item.shape) for item in content["weights"]] == list(shapes)
            if fits and all(bool(item.isfinite().all()) for item in content["weights"]):
                return Found(content["weights"], content["optimizer"], content["statistics"])
            reason = "is of another drafter"
        except Exception as error:  # whatever is in the file
            reason = f"cannot be read: {error}"
        logger.warning(f"{self.path} {reason}; the drafter begins as it is.")
        return None

    def load_of_others(self, shapes: Sequence[tuple[int, ...]]) -> Found | None:
        """Return what another process has written since this one wrote or read the file; None if none has."""
        return None if self._present() in (None, self._known) else self.load(shapes)

    def _present(self) -> tuple[int, int] | None:
        try:
            return _identity(self.path.stat())
        except OSError:
            return None


def _identity(found: os.stat_result) -> tuple[int, int]:
    return found.st_ino, found.st_mtime_ns
