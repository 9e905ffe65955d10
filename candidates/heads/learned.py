"""Base classes of the modules that learned drafters consist of."""

import os
from abc import abstractmethod
from pathlib import Path
from typing import Any, Self

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from ...target_model.drafters.features import Layers


class LearnedDrafter(nn.Module):
    """
    A small module that was trained to draft for one target, and lies on the device of its output. Sources that draft
    with one have it as their attribute `heads`.

    Attributes:
        name_or_path (`str`): The folder or hub id that it was loaded from.
        label (`str`): Its kind, see `TreeCandidateGenerator.label`.
    """

    name_or_path: str = ""
    label: str = "heads"

    @property
    def identity(self) -> str:
        """Its name and address: drafters of one path may differ."""
        return f"{os.path.basename(self.name_or_path)}, {id(self):x}"

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
        Read the files of a folder or hub id.

        Raises:
            ValueError: if they hold no such drafter, or one of another target.
        """

    def _placed(self, name: str | Path, target: PreTrainedModel) -> Self:
        """Return itself, named, checked, and moved to the device of the target's output and to its dtype."""
        self.name_or_path = str(name)
        self.check_fit(target)
        output: Any = target.get_output_embeddings()
        return self.to(device=output.weight.device, dtype=target.dtype)

    @abstractmethod
    def check_fit(self, target: PreTrainedModel) -> None:
        """Raise `ValueError` unless it has this target's sizes."""


class FeatureDrafter(LearnedDrafter):
    """
    A drafter of decoder layers with keys and values of their own. Its position i takes token i + 1 of a text and the
    target's feature of token i, and predicts token i + 2. The output of its layers there is also the feature for the
    tokens after it, where the target's own is not known.

    Attributes:
        config (`PreTrainedConfig`): Config of its own layers: heads, and their size.
        hidden_layers (tuple of `int`): The target's hidden states that make up a feature, side by side; see
            `TreeCandidateGenerator.hidden_layers`.
        target_size, vocab_size (`int`): Size of the target's hidden states and of its vocabulary.
        token_ids (`torch.Tensor` of shape `[own vocab]`, *optional*): The target's token that each output stands for,
            where these are not all of them in order.
    """

    config: PreTrainedConfig
    hidden_layers: tuple[int, ...]
    target_size: int
    vocab_size: int
    token_ids: torch.Tensor | None

    @abstractmethod
    def layers(self) -> Layers:
        """See `target_model.drafters.features.FeatureLayers`."""
