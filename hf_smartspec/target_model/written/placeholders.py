"""Tokens that stand for images and sounds, in whose place some models read padding."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from ..forward_code import mentions

# Entries of configs.
_NAMES = "image_token_id", "image_token_index", "video_token_id", "video_token_index", "audio_token_id"


class Placeholders:
    """
    Replacement of tokens before embeddings are looked up.

    Args:
        tokens (sequence of `int`): The tokens that are replaced.
        pad_token (`int`): The token in their place.
    """

    def __init__(self, tokens: Sequence[int], pad_token: int):
        self.tokens, self.pad_token = tokens, pad_token

    def __call__(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return int64 tokens of any shape with padding in the place of placeholders."""
        for token in self.tokens:
            tokens = tokens.masked_fill(tokens == token, self.pad_token)
        return tokens


def placeholders_of(model: PreTrainedModel, around: Sequence[nn.Module]) -> Placeholders | None:
    """
    Return the placeholders of a model whose modules `around` its decoder replace them also where they have embeddings
    (Gemma 4); None for other models, in which those without embeddings are replaced.
    """
    if not any(_replaces(type(module)) for module in around):
        return None
    config: Any = model.config
    tokens = placeholder_tokens(model)
    return Placeholders(tokens, config.get_text_config(decoder=True).pad_token_id)


def placeholder_tokens(model: PreTrainedModel) -> list[int]:
    """Return the tokens that stand for images, videos and sounds."""
    found = [getattr(model.config, name, None) for name in _NAMES]
    return [token for token in found if token is not None]


def _replaces(kind: type[nn.Module]) -> bool:
    return "get_per_layer_inputs" in mentions(kind) or kind.__name__ == "Gemma4UnifiedModel"
