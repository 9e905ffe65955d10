"""Inputs of layers beside hidden states (Gemma 4), and factors of their outputs."""

from typing import Any

import torch

from .mlps import activate
from .parts import Map, Weighted


class LayerInputs:
    """
    Inputs of all layers: embeddings of tokens of their own, and a map of those that the first layer reads,

        factors[1] * (norm(factors[0] * projection(x)) + embedding(tokens))

    Args:
        embedding (`Callable`): Returns `[1, N, num_layers * size]`.
        projection (`Callable`): Map of `[N, hidden_size]` to `[N, num_layers * size]`.
        norm (`Callable`): Norm of each layer's input, of the last of its dimensions.
        factors (pair of `float`): What the projection and the sum are multiplied by.
        num_layers (`int`): Number of layers.
        size (`int`): Size of the input of each.
    """

    def __init__(
        self, embedding: Map, projection: Map, norm: Map, factors: tuple[float, float], num_layers: int, size: int
    ):
        self.embedding, self.projection, self.norm, self.factors = embedding, projection, norm, factors
        self.num_layers, self.size = num_layers, size

    def __call__(self, tokens: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """Return inputs `[N, num_layers, size]`, from tokens `[1, N]` and their embeddings `[N, hidden_size]`."""
        projected = self.projection(x).mul_(self.factors[0]).view(-1, self.num_layers, self.size)
        return (self.norm(projected) + self.embedding(tokens)[0].view(projected.shape)).mul_(self.factors[1])


class LayerInput:
    """Summand that a layer adds to hidden states last: `norm(projection(activation(gate(x)) * given))`."""

    def __init__(self, gate: Map, activation: int | Map, projection: Map, norm: Map):
        self.gate, self.activation, self.projection, self.norm = gate, activation, projection, norm

    @property
    def products(self) -> tuple[Map, Map]:
        """Products of all tokens with one weight."""
        return self.gate, self.projection

    def __call__(self, x: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
        """Return what is added to `x`, `[N, hidden_size]`, from the layer's inputs `[N, size]`."""
        return self.norm(self.projection(activate(self.gate(x), self.activation) * given))


class Factor(Weighted):
    """A number that is held in a module's buffer, `[1]`, and multiplies the outputs of a layer."""

    def __init__(self, module: Any, name: str):
        super().__init__(module)
        self._name = name

    def number(self) -> torch.Tensor:
        """Return the buffer, as it is now."""
        module: Any = self._module()
        found: torch.Tensor = module._buffers[self._name]
        return found
