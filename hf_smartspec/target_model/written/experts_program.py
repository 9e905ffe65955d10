"""Operators of mixtures of experts in the program of a decoder's forward."""

from typing import Any

import numpy as np
import torch

from ...cpu.columns import column_share
from ...cpu.few_tokens import ROWS
from ...cpu.gates import ClampedGate
from ...cpu.kernels import program as codes
from ...cpu.kernels.experts import BLOCK_SIZE
from ...cpu.kernels.multiply import AT_ONCE, BIAS, NUM_INPUTS, NUM_OUTPUTS, SHARE, WEIGHT, tokens_at_once
from ...cpu.program import Program
from ...cpu.threads import share_of
from .experts import Experts, WideRows
from .mixed_mlps import MixedMLP, mlps_of


class ExpertOperators:
    """
    The operators of all layers with experts.

    Args:
        own (`ForwardWriter`): What they are part of.
    """

    def __init__(self, own: Any):
        self.own = own
        mlps = [mlp for mlp in mlps_of(own.plan.layers) if isinstance(mlp, Experts)]
        chosen, num = max(mlp.routing.num_chosen for mlp in mlps), max(mlp.num for mlp in mlps)
        size, hidden = max(mlp.size for mlp in mlps), max(mlp.hidden for mlp in mlps)
        self.scores, self.probabilities = own.new(num), own.new(num, torch.float32)
        self.wide_scores = own.new(num if any(isinstance(mlp.router, WideRows) for mlp in mlps) else 0, torch.float32)
        self.ranks = own.new(2 * max(mlp.routing.groups for mlp in mlps), torch.float32)
        self.choices, self.pairs, self.places = (own.new(chosen, torch.int64) for _ in range(3))
        self.weights = own.new(chosen, torch.float32)
        self.inputs, self.outputs = (own.new(chosen * hidden) for _ in range(2))  # of pairs of a token and an expert
        self.hidden, self.activated = own.new(chosen * 2 * size), own.new(chosen * size)
        has_shared = any(mlp.shared is not None for mlp in mlps)
        self.shared, self.gates = own.new(hidden if has_shared else 0), own.new(1 if has_shared else 0)
        self._blocks: list[np.ndarray] = []
        self._biased: list[tuple[int, Experts]] = []  # operators that choose experts with a bias

    def add(self, mlp: Experts, x: torch.Tensor, outputs: torch.Tensor, routed: torch.Tensor | None = None) -> None:
        """Write a layer's operators from its input `x`, and the router's where that is another, to `outputs`."""
        own, routing, itemsize = self.own, mlp.routing, x.itemsize
        numbers = {"num_experts": mlp.num, "num_chosen": routing.num_chosen}
        code, scores = codes.ROUTE, self.scores
        if isinstance(mlp.router, WideRows):
            code, scores = codes.WIDE_ROUTE, self.wide_scores
            self._multiply_wide(mlp.router, x)
        else:
            own.multiply(mlp.router, x if routed is None else routed, scores)
        number = own.add(
            code,
            **numbers,
            is_sigmoid=routing.is_sigmoid,
            norms=routing.norms,
            groups=routing.groups,
            num_groups=routing.num_groups,
            adds_two=routing.adds_two,
            ranks=self.ranks.data_ptr(),
            scores=scores.data_ptr(),
            probabilities=self.probabilities.data_ptr(),
            choices=self.choices.data_ptr(),
            weights=self.weights.data_ptr(),
            eps=routing.eps,
            own_factors=0 if (factors := mlp.factors()) is None else factors.data_ptr(),
            factor=routing.factor,
            scale=routing.scale,
            is_sparse=routing.cap is not None,
            cap=routing.cap or 0.0,
            least=routing.least,
        )
        if mlp.bias() is not None:
            self._biased.append((number, mlp))
        weights = zip(mlp.weights(), mlp.biases())
        first, second = (self._new_blocks(*pair, mlp.is_transposed, itemsize) for pair in weights)
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
        experts = {"num_experts": mlp.num, "is_transposed": mlp.is_transposed}
        own.add(codes.EXPERTS, blocks=first, **experts)
        gates = {"size": mlp.size, "inputs": self.hidden.data_ptr(), "outputs": self.activated.data_ptr()}
        if isinstance(mlp.activation, ClampedGate):
            gates |= {"factor": mlp.activation.alpha, "cap": mlp.activation.limit}
            self._add_for_pairs(routing.num_chosen, codes.CLAMPED_GATE, **gates)
        else:
            gates |= {"activation": mlp.activation, "is_gated": True}
            self._add_for_pairs(routing.num_chosen, codes.GATE, **gates)
        own.add(codes.EXPERTS, blocks=second, **experts)
        shared = {}
        if mlp.shared is not None:
            own.write_mlp(mlp.shared[0], x, self.shared)
            shared = {"shared": self.shared.data_ptr()}
            if mlp.shared[1] is not None:
                own.multiply(mlp.shared[1], x, self.gates)
                shared["gates"] = self.gates.data_ptr()
        own.add(
            codes.COMBINE,
            size=mlp.hidden,
            num_chosen=routing.num_chosen,
            x=self.outputs.data_ptr(),
            places=self.places.data_ptr(),
            weights=self.weights.data_ptr(),
            **shared,
            outputs=outputs.data_ptr(),
            factor=mlp.factor,
        )

    def _multiply_wide(self, router: WideRows, x: torch.Tensor) -> None:
        num_outputs, num_inputs = router.shape
        self.own.add(
            codes.WIDE_MULTIPLY,
            num_inputs=num_inputs,
            num_outputs=num_outputs,
            share=share_of(num_outputs, num_inputs, ROWS),
            at_once=tokens_at_once(self.own.room, num_inputs, x.itemsize),
            weight=router.whole().weight.data_ptr(),
            tokens=x.data_ptr(),
            outputs=self.wide_scores.data_ptr(),
        )

    def add_mixed(self, mlp: MixedMLP, x: torch.Tensor, outputs: torch.Tensor) -> None:
        """Write an MLP beside experts."""
        own, normed, beside = self.own, self.own.normed, self.own.beside
        self._norm(mlp.before, x, normed)
        own.write_mlp(mlp.mlp, normed, outputs)
        self._norm(mlp.after, outputs, outputs)
        self._norm(mlp.before_router, x, normed)
        self._norm(mlp.before_experts, x, beside)
        self.add(mlp.experts, beside, beside, normed)
        self._norm(mlp.after_experts, beside, beside)
        own.add(codes.ADD, size=own.size, x=outputs.data_ptr(), added=beside.data_ptr(), factor=1.0)

    def _norm(self, norm: Any, x: torch.Tensor, outputs: torch.Tensor) -> None:
        strides = self.own.size, self.own.size
        self.own.norm_vectors(norm, 1, strides, x=x.data_ptr(), outputs=outputs.data_ptr())

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

    def _new_blocks(self, weight: torch.Tensor, bias: torch.Tensor | None, is_transposed: bool, itemsize: int) -> int:
        """
        Return the address of the fields of each expert's product with a weight `[experts, out, in]`; `[experts, in,
        out]` if it `is_transposed`.
        """
        num, *sizes = weight.shape
        num_outputs, num_inputs = reversed(sizes) if is_transposed else sizes
        # Without scratch memory, which changes no bit: an expert has few of the tokens for which it saves time.
        blocks, experts = np.zeros((num, BLOCK_SIZE), np.int64), np.arange(num)
        blocks[:, NUM_INPUTS], blocks[:, NUM_OUTPUTS] = num_inputs, num_outputs
        share = column_share(num_outputs, num_inputs) if is_transposed else share_of(num_outputs, num_inputs, ROWS)
        blocks[:, SHARE] = share
        blocks[:, AT_ONCE] = tokens_at_once(self.own.room, num_inputs, itemsize)
        blocks[:, WEIGHT] = weight.data_ptr() + experts * num_outputs * num_inputs * itemsize
        if bias is not None:
            blocks[:, BIAS] = bias.data_ptr() + experts * num_outputs * itemsize
        self._blocks.append(blocks)
        return blocks.ctypes.data
