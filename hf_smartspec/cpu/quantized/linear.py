"""Linear layers that hold their weights in int8 or in int4."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from .codes import check, to_codes
from .levels import in_blocks, to_levels
from .product import dequantized, quantized_linear


class QuantizedLinear(nn.Module):
    """
    Base of linear layers with a quantized weight, for inference on the CPU. Tokens are rounded to int8 as well, in
    groups of 32 numbers, for the time of the product. `dequantized` returns the usual matrix.

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
            own, scale = self.quantized(weight.detach())
        self.weight = nn.Parameter(own, requires_grad=False)
        self.scale = nn.Parameter(scale, requires_grad=False)
        kept = None if bias is None else nn.Parameter(bias.detach(), requires_grad=False)
        self.register_parameter("bias", kept)

    @staticmethod
    def quantized(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a floating weight as it is held, and its scales."""
        raise NotImplementedError

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map `[..., in_features]` to `[..., out_features]`, in the dtype of `x`."""
        lines = x.reshape(-1, self.in_features)
        lines = quantized_linear(lines, self.weight, self.scale, self.bias, self.out_features)
        return lines.view(*x.shape[:-1], self.out_features)

    def dequantized(self) -> torch.Tensor:
        """Return the weight that is multiplied, `[out_features, in_features]` float32."""
        return dequantized(self.weight, self.scale)[: self.out_features, : self.in_features]

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> "QuantizedLinear":
        """Move or cast the module as any other, but keep the dtype of the scale."""
        scale = self.scale.detach()
        super()._apply(fn, recurse)
        if self.scale.dtype != scale.dtype:
            self.scale.data = scale.to(self.scale.device)
        return self

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Load weights, quantizing those of a model that is not quantized."""
        weight = state_dict.get(prefix + "weight")
        if weight is not None and weight.is_floating_point():
            own, scale = self.quantized(weight.detach())
            state_dict = state_dict | {prefix + "weight": own, prefix + "scale": scale}
        super()._load_from_state_dict(state_dict, prefix, *args)


class Int8Linear(QuantizedLinear):
    """
    A linear layer with an int8 weight, for inference on the CPU. Each group of 64 neighbouring inputs of an output has
    one scale. Tokens are rounded to int8 as well, in groups of 32 numbers, for the time of the product.

    The weight lies in blocks of 16 outputs, in the order in which it is multiplied: `weight` has the shape `[blocks,
    groups, 16, 16, 4]`, and `scale` `[blocks, groups, 16]`; `dequantized` returns the usual matrix.

    Args:
        weight (`torch.Tensor` of shape `[out_features, in_features]`): The weight, in a floating dtype.
        bias (`torch.Tensor` of shape `[out_features]`, *optional*): Kept as it is.
    """

    @staticmethod
    def quantized(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return in_blocks(to_levels(weight))


class Int4Linear(QuantizedLinear):
    """
    A linear layer with a weight in four bits, for inference on the CPU. Each group of 32 neighbouring inputs of an
    output has a scale and a least weight in float16, as in llama.cpp's Q4_1: five bits per weight in all. Tokens are
    rounded to int8 as well, in the same groups, for the time of the product.

    The weight lies in blocks of 16 outputs, in the order in which it is multiplied: `weight` has the shape `[blocks,
    groups, 8, 16, 4]`, two codes in a byte, and `scale` `[blocks, groups, 2, 2, 16]`, scales and least weights of the
    two halves of a group of 64 inputs; `dequantized` returns the usual matrix.

    Args:
        weight (`torch.Tensor` of shape `[out_features, in_features]`): The weight, in a floating dtype.
        bias (`torch.Tensor` of shape `[out_features]`, *optional*): Kept as it is.

    Raises:
        ValueError: if a weight is beyond 32,768, infinite or NaN.
    """

    @staticmethod
    def quantized(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        check(weight)
        return to_codes(weight)
