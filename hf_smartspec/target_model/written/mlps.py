"""MLPs of a written-out layer, and their activations."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.functional import silu

from ...cpu.gates import FUNCTIONS, activated, can_gate, gated, xielu
from ...cpu.kernels.gates import GELU, GELU_TANH, RELU, RELU_SQUARED, SILU
from ...gpu import elementwise
from .parts import Called, Map, Weighted

# Activations by the names of their modules. In half precision, NewGELUActivation and FastGELUActivation round every
# step of the same function; rounded once, it is nearer to float32.
_ACTIVATIONS = {
    **dict.fromkeys(("SiLU", "SiLUActivation"), SILU),
    **dict.fromkeys(("PytorchGELUTanh", "GELUTanh", "NewGELUActivation", "FastGELUActivation"), GELU_TANH),
    "GELUActivation": GELU,
    "ReLU": RELU,
    "ReLUSquaredActivation": RELU_SQUARED,
}


class XIELU(Weighted):
    """xIELU, whose parameters and buffers are one number each (Apertus)."""

    def numbers(self) -> list[torch.Tensor]:
        """Return alpha of positive and of negative numbers, before their softplus, beta and epsilon."""
        module: Any = self._module()
        return [module.alpha_p, module.alpha_n, module.beta, module.eps]

    def can_read(self, dtype: torch.dtype) -> bool:
        """Return whether compiled code reads the numbers as they are."""
        return all(item.is_cpu and item.dtype is dtype and item.numel() == 1 for item in self.numbers())

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        if can_gate(hidden) and self.can_read(hidden.dtype):
            return xielu(hidden, self.numbers())
        found: torch.Tensor = self._module()(hidden)  # type: ignore[misc]
        return found


def written_activation(module: nn.Module | Callable) -> int | Map:
    """Return the number by which compiled code knows an activation; others are called as they are."""
    known = SILU if module is silu else _ACTIVATIONS.get(type(module).__name__)
    if known is not None:
        return known
    if type(module).__name__ == "XIELUActivation":
        return XIELU(module)  # type: ignore[arg-type]
    return Called(module) if isinstance(module, nn.Module) else module


class MLP:
    """
    `output(activation(gate) * up)`, or without a gate `output(activation(input))`.

    Args:
        inputs (`Callable`): Returns gate and up side by side.
        activation (`int` or `Callable`): One of those in `cpu.kernels.gates`, or any other.
    """

    def __init__(self, inputs: Map, activation: int | Map, output: Map, is_gated: bool):
        self.inputs, self.activation, self.output, self.is_gated = inputs, activation, output, is_gated

    @property
    def products(self) -> tuple[Map, Map]:
        """Products of all tokens with one weight."""
        return self.inputs, self.output

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.output(self._activated(self.inputs(x)))

    def _activated(self, hidden: torch.Tensor) -> torch.Tensor:
        known = self.activation
        if not self.is_gated:
            return activate(hidden, known)
        if isinstance(known, int):
            if can_gate(hidden):
                return gated(hidden, known)
            if known == SILU and elementwise.can_gate(hidden):
                return elementwise.silu_gated(hidden)
        gate, up = hidden.chunk(2, dim=-1)
        function = FUNCTIONS[known] if isinstance(known, int) else known
        return function(gate) * up


def activate(hidden: torch.Tensor, activation: int | Map) -> torch.Tensor:
    """Return an activation of `hidden`, `[N, size]`."""
    if not isinstance(activation, int):
        return activation(hidden)
    return activated(hidden, activation) if can_gate(hidden) else FUNCTIONS[activation](hidden)


class CalledMLP:
    """A module that is called as it is, such as a mixture of experts."""

    def __init__(self, module: nn.Module):
        self.module = Called(module)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        output = self.module(x[None])
        return (output if isinstance(output, torch.Tensor) else output[0])[0]
