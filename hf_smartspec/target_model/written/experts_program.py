"""Operators of mixtures of experts in the program of a decoder's forward."""

from typing import Any

import numpy as np
import torch

from ...cpu.few_tokens import ROWS
from ...cpu.kernels import program as codes
from ...cpu.kernels.experts import BLOCK_SIZE
from ...cpu.kernels.multiply import AT_ONCE, NUM_INPUTS, NUM_OUTPUTS, SHARE, WEIGHT, tokens_at_once
from ...cpu.program import Program
from ...cpu.threads import share_of
from .experts import Experts


class ExpertOperators:
    """
    The operators of all layers with experts.

    Args:
        own (`ForwardWriter`): What they are part of.
    """

    def __init__(self, own: Any):
        self.own = own
        mlps = [layer.mlp for layer in own.plan.layers if isinstance(layer.mlp, Experts)]
        chosen, num = max(mlp.routing.num_chosen for mlp in mlps), max(mlp.num for mlp in mlps)
        size, hidden = max(mlp.size for mlp in mlps), max(mlp.hidden for mlp in mlps)
        self.scores, self.probabilities = own.new(num), own.new(num, torch.float32)
        self.choices, self.pairs, self.places = (own.new(chosen, torch.int64) for _ in range(3))
        self.weights = own.new(chosen, torch.float32)
        self.inputs, self.outputs = (own.new(chosen * hidden) for _ in range(2))  # of pairs of a token and an expert
        self.hidden, self.activated = own.new(chosen * 2 * size), own.new(chosen * size)
        has_shared = any(mlp.shared is not None for mlp in mlps)
        self.shared, self.gates = own.new(hidden if has_shared else 0), own.new(1 if has_shared else 0)
        self._blocks: list[np.ndarray] = []
        self._biased: list[tuple[int, Experts]] = []  # operators that choose experts with a bias

    def add(self, mlp: Experts, x: torch.Tensor, outputs: torch.Tensor) -> None:
        """Write a layer's operators from its input `x` to `outputs`."""
        own, routing, itemsize = self.own, mlp.routing, x.itemsize
        numbers = {"num_experts": mlp.num, "num_chosen": routing.num_chosen}
        own.multiply(mlp.router, x, self.scores)
        number = own.add(
            codes.ROUTE,
            **numbers,
            is_sigmoid=routing.is_sigmoid,
            norms=routing.norms,
            scores=self.scores.data_ptr(),
            probabilities=self.probabilities.data_ptr(),
            choices=self.choices.data_ptr(),
            weights=self.weights.data_ptr(),
            eps=routing.eps,
            factor=routing.factor,
        )
        if mlp.bias() is not None:
            self._biased.append((number, mlp))
        first, second = (self._new_blocks(weight, itemsize) for weight in mlp.weights())
        own.add(
            codes.GROUP,
            **numbers,
            choices=self.choices.data_ptr(),
            pairs=self.pairs.data_ptr(),
            places=self.places.data_ptr(),
            first=first,
            first_tokens=self.inputs.data_ptr(),
            first_outputs=self.hidden.data_ptr(),
            first_token_bytes=mlp.hidden * itemsize,
            first_output_bytes=2 * mlp.size * itemsize,
            second=second,
            second_tokens=self.activated.data_ptr(),
            second_outputs=self.outputs.data_ptr(),
            second_token_bytes=mlp.size * itemsize,
            second_output_bytes=mlp.hidden * itemsize,
        )
        pairs = {"x": x.data_ptr(), "outputs": self.inputs.data_ptr(), "lines": self.pairs.data_ptr()}
        self._add_for_pairs(routing.num_chosen, codes.ADD, size=mlp.hidden, **pairs)
        own.add(codes.EXPERTS, num_experts=mlp.num, blocks=first)
        gates = {"inputs": self.hidden.data_ptr(), "outputs": self.activated.data_ptr()}
        fields = {"size": mlp.size, "activation": mlp.activation, "is_gated": True}
        self._add_for_pairs(routing.num_chosen, codes.GATE, **fields, **gates)
        own.add(codes.EXPERTS, num_experts=mlp.num, blocks=second)
        shared = {}
        if mlp.shared is not None:
            own.write_mlp(mlp.shared[0], x, self.shared)
            own.multiply(mlp.shared[1], x, self.gates)
            shared = {"shared": self.shared.data_ptr(), "gates": self.gates.data_ptr()}
        own.add(
            codes.COMBINE,
            size=mlp.hidden,
            num_chosen=routing.num_chosen,
            x=self.outputs.data_ptr(),
            places=self.places.data_ptr(),
            weights=self.weights.data_ptr(),
            **shared,
            outputs=outputs.data_ptr(),
        )

    def place(self, program: Program) -> list[torch.Tensor]:
        """Set where biases lie, which are buffers that may be replaced; return what must stay meanwhile."""
        held = []
        for number, mlp in self._biased:
            bias = mlp.bias()
            assert bias is not None
            program.set(number, "bias", bias.data_ptr())
            program.set(number, "is_wide", bias.dtype is torch.float32)
            held.append(bias)
        return held

    def _add_for_pairs(self, num_chosen: int, code: int, **fields: float) -> None:
        self.own.times[self.own.add(code, **fields)] = num_chosen

    def _new_blocks(self, weight: torch.Tensor, itemsize: int) -> int:
        """Return the address of the fields of each expert's product with a weight `[experts, out, in]`."""
        num, num_outputs, num_inputs = weight.shape
        # Without scratch memory, which changes no bit: an expert has few of the tokens for which it saves time.
        blocks = np.zeros((num, BLOCK_SIZE), np.int64)
        blocks[:, NUM_INPUTS], blocks[:, NUM_OUTPUTS] = num_inputs, num_outputs
        blocks[:, SHARE] = share_of(num_outputs, num_inputs, ROWS)
        blocks[:, AT_ONCE] = tokens_at_once(self.own.room, num_inputs, itemsize)
        blocks[:, WEIGHT] = weight.data_ptr() + np.arange(num) * num_outputs * num_inputs * itemsize
        self._blocks.append(blocks)
        return blocks.ctypes.data
