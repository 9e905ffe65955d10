"""Drafters that go on from the target's features: decoder layers with keys and values of their own."""

from abc import abstractmethod

import torch
from transformers import PreTrainedConfig

from ...target_model.drafters.features import Layers
from .learned import LearnedDrafter


class FeatureDrafter(LearnedDrafter):
    """
    A drafter whose position i takes token i + 1 of a text and the target's feature of token i, and predicts token
    i + 2. What it leaves there is at once the feature of the tokens that may follow, where the target's is not known.

    Attributes:
        config (`PreTrainedConfig`): Of its own layers: heads, and their size.
        hidden_layers (tuple of `int`): The target's hidden states that make up a feature, side by side; see
            `TreeCandidateGenerator.hidden_layers`.
        vocab_size (`int`): Of the target.
        token_ids (`torch.Tensor` of shape `[own vocab]`, *optional*): The target's token that each output stands for,
            where these are not all of them in order.
    """

    config: PreTrainedConfig
    hidden_layers: tuple[int, ...]
    vocab_size: int
    token_ids: torch.Tensor | None

    @abstractmethod
    def layers(self) -> Layers:
        """See `target.features.FeatureLayers`, also for what follows."""

    @abstractmethod
    def combine(self, states: torch.Tensor) -> torch.Tensor: ...

    @abstractmethod
    def logits(self, hidden: torch.Tensor) -> torch.Tensor: ...
