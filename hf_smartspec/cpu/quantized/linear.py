"""The linear layer that holds its weight in int8."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from .product import dequantized, in_blocks, int8_linear, to_levels


class Int8Linear(nn.Module):
    """
    A linear layer with an int8 weight, for inference on the CPU. Each group of 64 neighbouring inputs of an output has
    one scale. Tokens are rounded to int8 as well, in groups of 32 numbers, for the time of the product.

    The weight lies in blocks of 16 outputs, in the order in which it is multiplied: `weight` has the shape `[blocks,
    groups, 16, 16, 4]`, and `scale` `[blocks, groups, 16]`; `dequantized` returns the usual matrix.

    Args:
        weight (`torch.Tensor` of shape `[out_features, in_features]`): The weight, in a floating dtype.
        bias (`torch.Tensor` of shape `[out_features]`, *optional*): Kept as it is.
    """

    weight: nn.Parameter
    scale: nn.Parameter
    bias: nn.Parameter | None

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None):
        super().__init__()
        self.out_features, self.in_features = weight.shape
        with torch.inference_mode(False), torch.no_grad():
            levels, scale = in_blocks(to_levels(weight.detach()))
        self.weight = nn.Parameter(levels, requires_grad=False)
        self.scale = nn.Parameter(scale, requires_grad=False)
        kept = None if bias is None else nn.Parameter(bias.detach(), requires_grad=False)
        self.register_parameter("bias", kept)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map `[..., in_features]` to `[..., out_features]`, in the dtype of `x`."""
        lines = int8_linear(x.reshape(-1, self.in_features), self.weight, self.scale, self.bias, self.out_features)
        return lines.view(*x.shape[:-1], self.out_features)

    def dequantized(self) -> torch.Tensor:
        """Return the weight that is multiplied, `[out_features, in_features]` float32."""
        return dequantized(self.weight, self.scale)[: self.out_features, : self.in_features]

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> "Int8Linear":
        """Move or cast the module as any other, but keep the scale in float32."""
        scale = self.scale.detach()
        super()._apply(fn, recurse)
        if self.scale.dtype != torch.float32:
            self.scale.data = scale.to(self.scale.device)
        return self

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Load weights, quantizing those of a model that is not quantized."""
        weight = state_dict.get(prefix + "weight")
        if weight is not None and weight.is_floating_point():
            levels, scale = in_blocks(to_levels(weight.detach()))
            state_dict = state_dict | {prefix + "weight": levels, prefix + "scale": scale}
        super()._load_from_state_dict(state_dict, prefix, *args)
