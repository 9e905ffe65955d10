"""Operators of gated delta rules and of state spaces in the program of a decoder's forward."""

from typing import Any

import numpy as np
import torch

from ...cpu.kernels import program as codes
from ...cpu.kernels.recur import scratch_size
from ...cpu.program import column
from ..cache.slot_cache import SlotCache
from ..recurrent.cache import StateCache
from .delta import NORM_EPS, DeltaPlan
from .recurrent_program import LAYOUT, WIDE, Writer, add_convolution, as_wide, set_fields
from .state_space import StateSpacePlan


class RecurrenceOperators:
    """The operators of all layers with a recurrence of one kind, a delta rule or a state space."""

    is_delta: bool
    eps = 0.0  # of queries and keys, under the root
    norm_code: int

    def __init__(self) -> None:
        self.plans: list[Any] = []
        self._widths: list[int] = []  # outputs of the layers' maps
        self._operators: list[list[int]] = []  # for each layer: map or its arrangement, convolution, recurrence, norm
        self._addresses = np.zeros((2, 0), np.int64)  # of windows and states, for each layer, in the memory
        self._memory_id: object = None
        self._indices: np.ndarray | None = None

    def add(self, own: Writer, plan: Any, inputs: Any, x: torch.Tensor) -> None:
        """Write a layer's operators from its input `x` to `attended`."""
        channels, width = plan.channels, inputs.shape[0]
        number = self._add_map(own, plan, inputs, x)
        convolution = add_convolution(own, plan.convolution, channels, width, is_silu=True)
        logs, biases = plan.rates()
        recurrence = own.add(
            codes.RECUR,
            heads=plan.heads,
            groups=plan.heads // plan.key_heads,
            size=plan.key_size,
            value_size=plan.value_size,
            **dict.fromkeys(("query_stride", "key_stride", "value_stride"), channels),
            **dict.fromkeys(("decay_stride", "beta_stride"), width),
            logs=logs.data_ptr(),
            biases=biases.data_ptr(),
            is_delta=self.is_delta,
            outputs=own.recurred.data_ptr(),
            scale=plan.scale,
            eps=self.eps,
        )
        norm = own.add(
            self.norm_code,
            x=own.recurred.data_ptr(),
            weight=plan.norm.weight().data_ptr(),
            gate_stride=width,
            outputs=own.attended.data_ptr(),
            eps=plan.norm.eps,
            **self._norm_fields(plan),
        )
        self.plans.append(plan)
        self._widths.append(width)
        self._operators.append([number, convolution, recurrence, norm])

    def _add_map(self, own: Writer, plan: Any, inputs: Any, x: torch.Tensor) -> int:
        """Write the map of a layer's inputs; return the operator whose outputs, which are set later, others read."""
        return own.multiply(inputs, x, own.states)

    def _norm_fields(self, plan: Any) -> dict[str, int]:
        raise NotImplementedError

    def _index(self, rows: np.ndarray) -> np.ndarray:
        """
        Return for each layer: its map's operator and the place of outputs there, convolution, recurrence, norm; outputs
        of the map, what is convolved of them, values, and heads; and the plan's places. `[15, layers]`
        """
        places = []
        for plan, width, (number, *others) in zip(self.plans, self._widths, self._operators):
            places.append(
                [
                    number,
                    column(rows[number, 0], "outputs"),
                    *others,
                    width,
                    plan.channels,
                    plan.num_outputs,
                    plan.heads,
                    *plan.places,
                ]
            )
        return np.array(places).T

    def place(self, rows: np.ndarray, x: torch.Tensor, cache: SlotCache) -> list[torch.Tensor]:
        """
        Set the memory of a forward of embeddings `x` in the program's `rows`; return what must stay meanwhile. Without
        drafts, states are stored at once, and all layers use the same memory for the rest.
        """
        assert isinstance(cache, StateCache), "the cache that the model needs"
        num, short, itemsize = len(x), cache.step.short, x.itemsize
        assert short is not None, "`CompiledDecoder.serves`"
        if self._indices is None:
            self._indices = self._index(rows)
        maps, outputs, convolutions, recurrences, norms, widths, channels, values, heads, *places = self._indices
        totals = num * (as_wide(widths, itemsize) + channels + values)
        self._offsets = np.zeros_like(totals) if short.stores_all else np.cumsum(totals) - totals
        short.num_bytes, short.dtype = WIDE * int(totals.sum()), x.dtype
        memory = x.new_empty(int((self._offsets + totals).max()), dtype=torch.float32)
        inputs = memory.data_ptr() + WIDE * self._offsets
        convolved = inputs + WIDE * num * as_wide(widths, itemsize)
        if self._memory_id is not cache.memory_id:
            self._addresses, self._memory_id = self._addresses_in(cache, x), cache.memory_id
        windows, states = self._addresses
        tail = short.parents.shape[1], short.most_states
        number = max(scratch_size(*tail, plan.key_size, plan.value_size) for plan in self.plans)
        # `ShortTails.store` may run with more threads than the program.
        scratch = x.new_empty(short.num_threads * number, dtype=torch.float32)

        rows[maps, outputs] = inputs
        mixed, gates, decays = (inputs + itemsize * place for place in places[:3])
        query, key, value = (convolved + WIDE * place for place in places[3:])
        layout = dict(zip(LAYOUT, short.layout))
        fields: dict[str, Any] = {"inputs": mixed, "windows": windows, "outputs": convolved, **layout}
        set_fields(rows, codes.CONVOLVE, convolutions, fields)
        fields = {"queries": query, "keys": key, "values": value, "decays": decays, "states": states, **layout}
        fields |= {"betas": decays - itemsize * heads} if self.is_delta else {}
        fields |= {"writes": convolved + WIDE * num * channels, "scratch": scratch.data_ptr()}
        set_fields(rows, codes.RECUR, recurrences, fields | {"scratch_size": number})
        set_fields(rows, self.norm_code, norms, {"gates": gates} | ({} if self.is_delta else {"values": value}))
        return [memory, scratch]

    def _addresses_in(self, cache: StateCache, like: torch.Tensor) -> np.ndarray:
        """Return the addresses of each layer's windows and states; asking torch for so many takes long."""
        windows, states, wide = [], [], like.new_empty(0, dtype=torch.float32)
        for plan in self.plans:
            key, shape = (plan.layer, 0), (plan.heads, plan.key_size, plan.value_size)
            windows.append(cache.windows(key, like, plan.convolution.width, plan.channels).data_ptr())
            states.append(cache.states(key, wide, *shape).data_ptr())
        return np.array([windows, states])

    def keep(self, rows: np.ndarray, num: int, cache: SlotCache, held: list[torch.Tensor]) -> None:
        """Keep what `ShortTails.store` and longer drafts read after a forward of `num` tokens."""
        assert isinstance(cache, StateCache) and cache.step.short is not None
        short, memory = cache.step.short, held[0]
        if short.stores_all:
            return
        for plan, (_, convolution, recurrence, _) in zip(self.plans, self._operators):
            short.operators[codes.CONVOLVE, (plan.layer, 0)] = rows[convolution].copy()
            short.operators[codes.RECUR, (plan.layer, 0)] = rows[recurrence].copy()
        short.held += held
        plans, widths, offsets, dtype, eps = self.plans, self._widths, self._offsets, short.dtype, self.eps

        def fill() -> None:
            for plan, width, offset in zip(plans, widths, offsets.tolist()):
                key, channels, values, (mixed, _, first, _, first_key, _) = (
                    (plan.layer, 0),
                    plan.channels,
                    plan.num_outputs,
                    plan.places,
                )
                sizes = [num * as_wide(width, dtype.itemsize), num * channels, num * values]
                inputs, *others = memory[offset : offset + sum(sizes)].split(sizes)
                inputs = inputs.view(dtype)[: num * width].view(num, width)
                convolved, writes = (item.view(num, -1) for item in others)
                own = convolved[:, first_key : first_key + plan.key_heads * plan.key_size]
                written, decays = writes.unflatten(1, (plan.heads, -1)), inputs[:, first : first + plan.heads]
                short.inputs[key] = inputs[:, mixed : mixed + channels]
                short.written[key] = own.unflatten(1, (plan.key_heads, -1)), eps, written, decays, plan.rates()

        short.fill = fill


class DeltaOperators(RecurrenceOperators):
    """The operators of all layers with a delta rule."""

    is_delta, eps, norm_code = True, NORM_EPS, codes.GATED_NORM

    def _add_map(self, own: Writer, plan: DeltaPlan, inputs: Any, x: torch.Tensor) -> int:
        number = super()._add_map(own, plan, inputs, x)
        if not plan.is_by_head:
            return number
        parts, states = plan.parts, own.states.data_ptr()
        return own.add(codes.ARRANGE, size=inputs.shape[0], num_parts=len(parts), parts=parts.ctypes.data, x=states)

    def _norm_fields(self, plan: DeltaPlan) -> dict[str, int]:
        return {"vectors": plan.heads, "size": plan.value_size}


class StateSpaceOperators(RecurrenceOperators):
    """The operators of all layers with a state space."""

    is_delta, norm_code = False, codes.STATE_NORM

    def _norm_fields(self, plan: StateSpacePlan) -> dict[str, int]:
        norm, skips = plan.norm, plan.norm.skips().data_ptr()
        sizes = {"vectors": norm.groups, "size": norm.size // norm.groups, "heads": plan.heads}
        return {**sizes, "value_stride": plan.channels, "skips": skips}
