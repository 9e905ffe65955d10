"""Factors of queries by their positions (Ministral 3)."""

import sys
from typing import Any

import torch

from ..forward_code import QUERY_FACTORS, mentions


class QueryFactors:
    """
    Factors that multiply queries after their rotation.

    Args:
        kind (`type`): The kind of attention, in whose file there is a function of positions and two numbers.
        config (`PreTrainedConfig`): It holds these numbers, which are read anew each time.
    """

    def __init__(self, kind: type, config: Any):
        self.file, self.config = kind.__module__, config

    def __call__(self, positions: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return the factors of tokens `[N]`, rounded to `dtype`, from their positions `[N]`."""
        rope = self.config.rope_parameters
        slope, length = rope.get("llama_4_scaling_beta"), rope.get("original_max_position_embeddings")
        factors: torch.Tensor = getattr(sys.modules[self.file], QUERY_FACTORS)(positions[None], slope, length)
        return factors.to(dtype).flatten()


def query_factors(attention: Any) -> QueryFactors | None:
    """Return the factors by which an attention module multiplies queries; None if it does not."""
    kind = type(attention)
    return QueryFactors(kind, attention.config) if QUERY_FACTORS in mentions(kind) else None
