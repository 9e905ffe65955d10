"""What all learned drafters have in common."""

from abc import abstractmethod
from pathlib import Path

import torch
from torch import nn
from transformers import PreTrainedModel


class LearnedDrafter(nn.Module):
    """
    A small module that was trained to draft for one target, and lies on the device of its output. Sources that draft
    with one have it as their attribute `heads`.

    Attributes:
        name_or_path (`str`): Where it was loaded from.
        label (`str`): Its kind, see `TreeCandidateGenerator.label`.
    """

    name_or_path: str = ""
    label: str = "heads"

    @property
    @abstractmethod
    def dtype(self) -> torch.dtype: ...

    @property
    @abstractmethod
    def device(self) -> torch.device: ...

    @classmethod
    @abstractmethod
    def from_pretrained(cls, name: str | Path, target: PreTrainedModel) -> "LearnedDrafter":
        """
        Reads the files of a folder or hub id.

        Raises:
            ValueError: if they hold no such drafter, or one of another target.
        """

    @abstractmethod
    def check_fit(self, target: PreTrainedModel) -> None:
        """Raises `ValueError` unless it is of this target's sizes."""
