"""Operators of attention to latents in the program of a decoder's forward."""

from typing import Any

import numpy as np

from ...cpu.attention import parts_of_heads
from ...cpu.columns import column_share
from ...cpu.few_tokens import ROWS
from ...cpu.kernels import program as codes
from ...cpu.kernels.experts import BLOCK_SIZE
from ...cpu.kernels.multiply import (
    AT_ONCE,
    NEXT,
    NUM_INPUTS,
    NUM_OUTPUTS,
    NUM_TOKENS,
    OUTPUTS,
    SHARE,
    TOKENS,
    WEIGHT,
    tokens_at_once,
)
from ...cpu.threads import share_of
from .plan import LayerPlan
from .rotations import Rotation


class LatentOperators:
    """
    The operators of all layers that attend to latents. Queries, attended latents and values lie head by head.

    Args:
        own (`ForwardWriter`): What they are part of.
    """

    def __init__(self, own: Any):
        self.own = own
        plans: list[Any] = [layer.latent for layer in own.plan.layers if layer.latent is not None]
        downs = [plan.down.shape[0] for plan in plans if plan.down is not None]
        self.down = own.new(max(downs, default=0))
        self.whole = own.new(max(plan.queries.shape[0] for plan in plans))  # queries, token by token
        self.plain = own.new(max(plan.expansion.heads * plan.expansion.key_size for plan in plans))
        self.turned = own.new(max(plan.expansion.heads * plan.turned_size for plan in plans))
        values = max(plan.expansion.heads * plan.expansion.value_size for plan in plans)
        self.values, self.merged = own.new(values), own.new(values)
        self._blocks: list[tuple[np.ndarray, bool]] = []  # of each product, and whether it is of tokens that are kept

    def add(self, plan: LayerPlan, normed: Any, keeps: bool) -> None:
        """Write the attention of a layer; if it `keeps`, attention is of the tokens that are kept."""
        own, latent, heads, x = self.own, plan.latent, plan.num_heads, normed
        assert latent is not None and isinstance(plan.rotation, Rotation)
        expansion = latent.expansion
        down: Any = latent.down
        compress: Any = plan.query_key_value
        size, rank, width = expansion.key_size, expansion.rank, compress.shape[0]
        if down is not None:
            own.multiply(down, x, self.down)
            x = self.down
            self._norm(latent.down_norm, x, down.shape[0])
        own.multiply(latent.queries, x, self.whole)
        own.multiply(compress, normed, own.states)
        self._norm(latent.norm, own.states, width)
        own.rotated.append(
            own.add(
                codes.ROTATE,
                heads=heads,
                size=size + latent.turned_size,
                states=self.whole.data_ptr(),
                queries=self.plain.data_ptr(),
                is_interleaved=plan.rotation.code,
                rank=rank,
                room=own.room,
                compressed=own.states.data_ptr(),
                turned=self.turned.data_ptr(),
            )
        )
        keys, values = expansion.weights()
        self._multiply(keys, self.plain, own.queries, is_transposed=True)
        if keeps:
            own._keep_tokens()
        parts = parts_of_heads(heads)
        attention = own.add(
            codes.ATTEND,
            kv_heads=parts,
            groups=heads // parts,
            size=rank,
            queries=own.queries.data_ptr(),
            outputs=own.attended.data_ptr(),
            room=own.room,
            turned_size=latent.turned_size,
            turned=self.turned.data_ptr(),
            scale=plan.scaling,
        )
        own.attending.append(attention)
        if keeps:
            own.gathers[attention] = "places"
        self._multiply(values, own.attended, self.values)
        merged = {"x": self.values.data_ptr(), "outputs": self.merged.data_ptr()}
        own.add(codes.MERGE, heads=heads, size=expansion.value_size, room=own.room, **merged)
        own.multiply(plan.attention_output, self.merged, own.out)

    def _norm(self, norm: Any, x: Any, width: int) -> None:
        place = x.data_ptr()
        self.own.norm_vectors(norm, 1, (width, width), x=place, outputs=place)

    def _multiply(self, weight: Any, x: Any, outputs: Any, is_transposed: bool = False) -> None:
        """Write the product of each head's tokens with its own rows; with the columns of these, if they are so."""
        own, heads = self.own, np.arange(len(weight))
        num_outputs, num_inputs = reversed(weight.shape[1:]) if is_transposed else weight.shape[1:]
        blocks = np.zeros((len(weight), BLOCK_SIZE), np.int64)
        blocks[:, NUM_INPUTS], blocks[:, NUM_OUTPUTS] = num_inputs, num_outputs
        share = column_share(num_outputs, num_inputs) if is_transposed else share_of(num_outputs, num_inputs, ROWS)
        blocks[:, SHARE], blocks[:, AT_ONCE] = share, tokens_at_once(own.room, num_inputs, x.itemsize)
        blocks[:, WEIGHT] = weight.data_ptr() + heads * weight.stride(0) * x.itemsize
        blocks[:, TOKENS] = x.data_ptr() + heads * own.room * num_inputs * x.itemsize
        blocks[:, OUTPUTS] = outputs.data_ptr() + heads * own.room * num_outputs * x.itemsize
        self._blocks.append((blocks, bool(own.gathers)))
        own.add(codes.EXPERTS, num_experts=len(weight), blocks=blocks.ctypes.data, is_transposed=is_transposed)

    def place(self, num: int, num_kept: int) -> None:
        """Set the numbers of tokens, and counters."""
        for blocks, is_of_kept in self._blocks:
            blocks[:, NUM_TOKENS], blocks[:, NEXT] = num_kept if is_of_kept else num, 0
