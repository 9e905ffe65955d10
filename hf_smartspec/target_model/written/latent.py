"""Attention to latents, of which keys and values are made (multi-head latent attention, as in DeepSeek)."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ...cpu.columns import column_product
from ...cpu.few_tokens import most_tokens, product
from .parts import Map, Weighted


class Expansion(Weighted):
    """
    The linear layer that makes each head's key and value of a latent. Keys are not made: a query times the key's rows
    is a query of latents. Nor are values: the attended latent times the value's rows is the attended value.

    Args:
        module (`nn.Linear`): The layer, without a bias.
        heads, key_size, value_size (`int`): Heads, and the numbers of each head's key, not rotated, and value.
    """

    def __init__(self, module: nn.Linear, heads: int, key_size: int, value_size: int):
        super().__init__(module)
        self.heads, self.key_size, self.value_size, self.rank = heads, key_size, value_size, module.in_features

    def weights(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the rows of keys, `[heads, key_size, rank]`, and of values, `[heads, value_size, rank]`."""
        weight: torch.Tensor = self._parameters()["weight"]
        keys, values = weight.view(self.heads, -1, self.rank).split([self.key_size, self.value_size], dim=1)
        return keys, values

    def queries(self, x: torch.Tensor) -> torch.Tensor:
        """Return queries of latents `[heads, N, rank]` from queries of keys `[heads, N, key_size]`."""
        keys, _ = self.weights()
        if self.has_columns and x.is_cpu and 0 < x.shape[1] <= most_tokens(x.dtype):
            return torch.stack([column_product(own, rows, None) for own, rows in zip(x, keys)])
        return torch.bmm(x, keys)

    def values(self, x: torch.Tensor) -> torch.Tensor:
        """Return values `[N, heads * value_size]` from attended latents `[heads, N, rank]`."""
        _, values = self.weights()
        if x.is_cpu and 0 < x.shape[1] <= most_tokens(x.dtype):
            found = torch.stack([product(own, rows, None) for own, rows in zip(x, values)])
        else:
            found = torch.bmm(x, values.mT)
        return found.transpose(0, 1).flatten(1)

    @property
    def has_columns(self) -> bool:
        """Return whether compiled code multiplies by the rows of keys as they lie."""
        return not self.key_size % 16 and not self.rank % 16


@dataclass(eq=False)
class LatentPlan:
    """
    Plan of what attention to latents has beside a `LayerPlan`, whose `query_key_value` returns a latent and a key that
    all heads share and that is rotated. The cache has latents in place of keys, and rotated keys in place of values.

    Args:
        down, down_norm (`Callable`, *optional*): A map that comes before that of queries, and its norm.
        queries (`Callable`): Map to queries, of whose heads the last `turned_size` numbers are rotated.
        norm (`Callable`): Norm of latents.
        expansion (`Expansion`): What makes keys and values of latents.
        turned_size (`int`): Numbers of rotated keys.
    """

    down: Map | None
    down_norm: Map | None
    queries: Map
    norm: Map
    expansion: Expansion
    turned_size: int

    @property
    def products(self) -> list[Map]:
        """Products of all tokens with one weight."""
        return [self.queries, *([] if self.down is None else [self.down])]

    @property
    def norms(self) -> list[Map]:
        return [self.norm, *([] if self.down_norm is None else [self.down_norm])]


def is_expansion(module: Any) -> bool:
    """Return whether a module is a linear layer whose rows are read as keys and values."""
    is_plain = type(module) is nn.Linear and module._parameters["bias"] is None
    return is_plain and module.weight.is_contiguous()
