"""Operators of short convolutions in the program of a decoder's forward."""

import numpy as np
import torch

from ...cpu.kernels import program as codes
from ..cache.slot_cache import SlotCache
from ..recurrent.cache import StateCache
from .convolution import ConvolutionPlan
from .parts import Map
from .recurrent_program import LAYOUT, WIDE, Writer, add_convolution, as_wide, set_fields


class ConvolutionOperators:
    """The operators of all layers with a short convolution."""

    def __init__(self) -> None:
        self.plans: list[ConvolutionPlan] = []
        self._operators: list[tuple[int, int]] = []  # for each layer: product before the convolution, and this
        self._windows = np.zeros(0, np.int64)  # addresses of windows, for each layer, in the memory
        self._memory_id: object = None

    def add(self, own: Writer, plan: ConvolutionPlan, inputs: Map, x: torch.Tensor) -> None:
        """Write a layer's operators from its input `x` to `attended`."""
        size = plan.num_outputs
        own.multiply(inputs, x, own.states)
        factors, gates, values = (own.states.data_ptr() + place * size * own.states.itemsize for place in range(3))
        kept = own.add(codes.TIMES, size=size, x=factors, x_stride=3 * size, factors=values, factor_stride=3 * size)
        convolution = add_convolution(own, plan.convolution, size, size, outputs=own.recurred.data_ptr())
        own.add(
            codes.TIMES,
            size=size,
            x=own.recurred.data_ptr(),
            x_stride=size,
            is_wide=True,
            factors=gates,
            factor_stride=3 * size,
            outputs=own.attended.data_ptr(),
        )
        self.plans.append(plan)
        self._operators.append((kept, convolution))

    def place(self, rows: np.ndarray, x: torch.Tensor, cache: SlotCache) -> list[torch.Tensor]:
        """
        Set the memory of a forward of embeddings `x` in the program's `rows`; return what must stay meanwhile. Without
        drafts, states are stored at once, and all layers use the same memory.
        """
        assert isinstance(cache, StateCache) and cache.step.short is not None, "`CompiledDecoder.serves`"
        short, num = cache.step.short, len(x)
        totals = np.array([as_wide(num * plan.num_outputs, x.itemsize) for plan in self.plans])
        self._offsets = np.zeros_like(totals) if short.stores_all else np.cumsum(totals) - totals
        short.num_bytes, short.dtype = WIDE * int(totals.sum()), x.dtype
        memory = x.new_empty(int((self._offsets + totals).max()), dtype=torch.float32)
        inputs = memory.data_ptr() + WIDE * self._offsets
        if self._memory_id is not cache.memory_id:  # asking torch for so many addresses takes long
            own = [((plan.layer, 0), plan.convolution.width, plan.num_outputs) for plan in self.plans]
            self._windows = np.array([cache.windows(key, x, width, size).data_ptr() for key, width, size in own])
            self._memory_id = cache.memory_id
        products, convolutions = np.array(self._operators).T
        set_fields(rows, codes.TIMES, products, {"outputs": inputs})
        fields = {"inputs": inputs, "windows": self._windows, **dict(zip(LAYOUT, short.layout))}
        set_fields(rows, codes.CONVOLVE, convolutions, fields)
        return [memory]

    def keep(self, rows: np.ndarray, num: int, cache: SlotCache, held: list[torch.Tensor]) -> None:
        """Keep what `ShortTails.store` and longer drafts read after a forward of `num` tokens."""
        assert isinstance(cache, StateCache) and cache.step.short is not None
        short, (memory,) = cache.step.short, held
        if short.stores_all:
            return
        for plan, (_, convolution) in zip(self.plans, self._operators):
            short.operators[codes.CONVOLVE, (plan.layer, 0)] = rows[convolution].copy()
        short.held += held
        plans, offsets, dtype = self.plans, self._offsets, short.dtype

        def fill() -> None:
            for plan, offset in zip(plans, offsets.tolist()):
                inputs = memory[offset : offset + as_wide(num * plan.num_outputs, dtype.itemsize)].view(dtype)
                short.inputs[plan.layer, 0] = inputs[: num * plan.num_outputs].view(num, plan.num_outputs)

        short.fill = fill
