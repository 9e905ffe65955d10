"""Factors of queries by their positions (Ministral 3)."""

import sys
from collections.abc import Callable
from typing import Any

import torch

from ..forward_code import QUERY_FACTORS, mentions


class QueryFactors:
    """
    Factors that multiply queries after their rotation.

    Args:
        function (`Callable`): The model's own, of positions and two numbers.
        config (`PreTrainedConfig`): It holds these numbers, which are read anew each time.
    """

    def __init__(self, function: Callable[..., torch.Tensor], config: Any):
        self.function, self.config = function, config

    def __call__(self, positions: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return the factors of tokens `[N]`, rounded to `dtype`, from their positions `[N]`."""
        rope = self.config.rope_parameters
        slope, length = rope.get("llama_4_scaling_beta"), rope.get("original_max_position_embeddings")
        return self.function(positions[None], slope, length).to(dtype).flatten()


def query_factors(attention: Any) -> QueryFactors | None:
    """Return the factors by which an attention module multiplies queries; None if it does not."""
    if QUERY_FACTORS not in mentions(type(attention)):
        return None
    return QueryFactors(getattr(sys.modules[type(attention).__module__], QUERY_FACTORS), attention.config)
