"""What a drafter has learnt, on disk: whole, or not at all."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..files import replacing
from ..log import get_logger

logger = get_logger(__name__)

_FORMAT = 1
_SHOWN = 4096  # numbers of each tensor, by which weights are told apart


@dataclass
class Found:
    """The contents of a checkpoint."""

    weights: list[torch.Tensor]
    optimizer: dict[str, Any]
    statistics: dict[str, Any]


class Checkpoint:
    """
    A file that is replaced as a whole, so that whoever reads it finds the old or the new one.

    Args:
        path (`Path`): Of the file.
    """

    def __init__(self, path: Path):
        self.path, self._origin = path, ""

    def begin(self, weights: Sequence[torch.Tensor]) -> None:
        """Says what the drafter has learnt all from: what others have learnt from other weights is not its own."""
        digest = hashlib.sha256()
        for item in weights:
            digest.update(item.flatten()[:_SHOWN].float().cpu().numpy().tobytes())
        self._origin = digest.hexdigest()

    def save(
        self, weights: Sequence[torch.Tensor], optimizer: Mapping[str, Any], statistics: Mapping[str, Any]
    ) -> None:
        """A file that cannot be written is reported; nothing else is lost by it."""
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
        except (OSError, RuntimeError) as error:
            logger.warning_once(f"What a drafter has learnt cannot be written to {self.path}: {error}")

    def load(self, shapes: Sequence[tuple[int, ...]]) -> Found | None:
        """What was kept; None, with a warning where there is a file, unless it is of weights of these shapes."""
        if not self.path.exists():
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
