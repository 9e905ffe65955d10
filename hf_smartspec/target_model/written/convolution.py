"""Short convolutions of written-out layers, in place of attention (LFM2), and as a part of other layers."""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn

from ...cpu.recurrence import can_convolve
from ..recurrent.cache import StateCache
from .parts import Map, Weighted


class Convolution(Weighted):
    """Weights of a causal convolution over the inputs of single channels."""

    def __init__(self, module: nn.Conv1d):
        super().__init__(module)
        self.width = module.kernel_size[0]

    def weight(self) -> torch.Tensor:
        """Return `[channels, width]`."""
        found: torch.Tensor = self._parameters()["weight"]
        return found.squeeze(1)

    def bias(self) -> torch.Tensor | None:
        return self._parameters()["bias"]

    def can_compile(self, dtype: torch.dtype) -> bool:
        """Return whether there is compiled code for it."""
        weight = self.weight()
        with torch.no_grad():
            return can_convolve(torch.empty(1, len(weight), dtype=dtype, device="cpu"), weight, self.bias())


@dataclass(eq=False)
class ConvolutionPlan:
    """
    Plan of a gated short convolution: with `[a, b, c]` of a token's inputs side by side, `b * convolution(a * c)`. Its
    layer's `query_key_value` maps to these, and `attention_output` maps its outputs.

    Args:
        layer (`int`): Index of the layer in caches.
        num_outputs (`int`): Numbers of a token's output.
    """

    layer: int
    num_outputs: int
    convolution: Convolution
    is_limited: ClassVar[bool] = False  # whether it has limits that apply to prompts only

    def run(self, inputs: Map, x: torch.Tensor, cache: StateCache) -> torch.Tensor:
        """Run it on `x` of shape `[N, hidden_size]`; return `[N, num_outputs]`."""
        factors, gates, values = inputs(x).chunk(3, dim=1)
        cache.enter(self.layer)
        weight, bias = self.convolution.weight(), self.convolution.bias()
        convolved = cache.convolve(factors * values, weight, bias, None, torch.float32)
        return gates * convolved.to(x.dtype)

    def can_compile(self, dtype: torch.dtype) -> bool:
        """Return whether there is compiled code for it."""
        return not self.num_outputs % 16 and self.convolution.can_compile(dtype)


def convolution_plan(module: Any) -> ConvolutionPlan | None:
    """Return the plan of a module, without its maps; None if it is of another structure."""
    if (
        set(module._modules) != {"in_proj", "conv", "out_proj"}
        or module._parameters
        or type(module.conv) is not nn.Conv1d
    ):
        return None
    size = module.conv.out_channels
    is_known = module.conv.groups == size and module.in_proj.out_features == 3 * size
    return ConvolutionPlan(module.layer_idx, size, Convolution(module.conv)) if is_known else None
