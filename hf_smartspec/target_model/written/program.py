"""The program of a decoder's forward, and what is set before each run."""

from collections import defaultdict
from collections.abc import Callable
from typing import Any
from weakref import ref

import numpy as np
import torch

from ...cpu.attention import division, parts_of_heads
from ...cpu.few_tokens import needs_scratch
from ...cpu.kernels import program as codes
from ...cpu.program import Program, column
from ...cpu.screening import Picks
from ..attention.seen_lines import kept_lines_of, lines_of
from ..cache.slot_cache import SlotCache
from .forward_writer import ForwardWriter
from .inputs import DecoderInput
from .plan import LayerPlan

Places = tuple[np.ndarray, list[int]]  # indices of fields of some operators in `Program.rows`
# Fields that are set before every forward.
_MEMORY = ["keys", "values"]
_ROTATE = ["dim", "is_wide", "cos", "sin"]
_ATTEND = "scratch num_runs parts scratch_size runs firsts counts nodes bits distance prefixes prefix_counts".split()


class ForwardProgram:
    """A program of what a `ForwardWriter` has written, with its memory; one thread at a time runs it."""

    def __init__(self, written: ForwardWriter):
        self.written, self.plan = written, written.plan
        self.kept_in: tuple[Any, int, int] | None = None  # the cache whose memory is set, and its state then
        self.program = Program(written.dtype, written.operators)
        self._index()
        self.bytes_per_token = sum(item.nbytes for item in written.memory) // written.room  # without int8 and screens

    def _index(self) -> None:
        """Note where the fields are that are set before every forward."""
        rows, own = self.program.rows, self.written
        self.token_counts = rows[:, column(codes.ADD, "num_tokens")]
        # Indices of numpy's own, since every use of a list would make them anew.
        self.sized, self.sized_kept, self.on_scratch, self.on_lines = (
            np.array(numbers, np.int64) for numbers in (own.on_all, own.on_kept, own.multiplied, own.rotated)
        )
        self.times, self.times_kept = (
            np.array([own.times.get(number, 1) for number in numbers]) for numbers in (own.on_all, own.on_kept)
        )
        self.scratch = column(codes.MULTIPLY, "scratch")
        self.most_scratch = int(rows[own.multiplied, column(codes.MULTIPLY, "scratch_size")].max(initial=0))
        layers = [layer for layer in self.plan.layers if layer.attends]
        self.lines = column(codes.ROTATE, "lines")
        pairs = (codes.ROTATE, own.rotated), (codes.ATTEND, own.attending)
        self.memory_places = [_places(*pair, _MEMORY) for pair in pairs]
        end = min(own.gathers)  # operators from here on are on the tokens that are kept
        rotated = [(layer, number) for number, layer in zip(own.rotated, layers) if layer.rotation is not None]
        types = [(layer.layer_type, number > end) for layer, number in rotated]
        numbers = [number for _, number in rotated]
        self.rotations = _places_by(types, codes.ROTATE, numbers, _ROTATE)  # elsewhere, these fields stay 0
        factors = [(item, number > end) for number, item in own.factors.items()]
        self.factors = _places_by(factors, codes.TIMES, list(own.factors), ["factors"])
        self.inputs = _places(codes.TIMES, list(own.inputs), ["factors"])
        self.inputs_begin = np.array(list(own.inputs.values()), np.int64)[:, None]
        kinds = [(number > end, layer.window, *_heads_of(layer)) for number, layer in zip(own.attending, layers)]
        self.attentions = _places_by(kinds, codes.ATTEND, own.attending, _ATTEND)

    def __call__(self, given: DecoderInput, keep: Callable[[int, torch.Tensor], None] | None) -> torch.Tensor | Picks:
        x, num, program, lines = given.x, len(given.x), self.program, given.layout.kept
        own = self.written
        head: Any = self.plan.head
        own.embedded[:num].copy_(x)
        if given.features is not None:
            own.given[:num].copy_(given.features.values)
        num_kept, dtype = num if lines is None else len(lines), x.dtype if own.screening is None else torch.float32
        logits, scratch = x.new_empty(num_kept, head.shape[0], dtype=dtype), self._set_places(given)
        recurrent = own.recurrent.place(program.rows, x, given.cache) if own.recurrent.plans else []
        if own.experts is not None:
            scratch += own.experts.place(program)
        if own.latents is not None:
            own.latents.place(num, num_kept)
        kept = [x.new_empty(num_kept if number in own.on_kept else num, own.size) for number in own.kept.values()]
        for number, states in zip(own.kept.values(), kept):
            program.set(number, "outputs", states.data_ptr())
        self.token_counts[self.sized] = num * self.times
        self.token_counts[self.sized_kept] = num_kept * self.times_kept
        for number, field in own.gathers.items():
            program.set(number, field, 0 if lines is None else lines.data_ptr())
        if own.screening is None:
            program.set(own.head, "outputs", logits.data_ptr())
        else:
            own.screening.set_scores(program, logits)
        program.run(own.num_threads)
        if own.recurrent.plans:
            own.recurrent.keep(program.rows, num, given.cache, recurrent)
        del scratch, recurrent  # until here, only their addresses were known
        for layer, states in zip(own.kept, kept):
            assert keep is not None, "`layers` come with `keep`"
            if lines is not None and len(states) < num:
                states = x.new_zeros(num, own.size).index_copy_(0, lines, states)
            keep(layer, states)
        if own.screening is None:
            return logits
        tokens = own.screening.tokens(num_kept)
        if tokens is None:
            return head(own.normed[:num_kept])
        return Picks(tokens, logits, own.screening.bounds[:num_kept].copy())

    def _set_places(self, given: DecoderInput) -> list[torch.Tensor]:
        """Set the memory of layers, what tokens attend to, and rotary embeddings; return what must stay meanwhile."""
        (x, layout, cache, tables, *_), rows, own = given, self.program.rows, self.written
        if self.kept_in != (ref(cache), cache.num_moves, len(cache.layers)):  # a look at every layer takes long
            self._set_memory(x, cache)
        held: list[torch.Tensor] = []
        rows[self.on_lines, self.lines] = layout.lines.data_ptr()
        for (name, is_of_kept), where in self.rotations.items():
            cos, sin = (part.contiguous() for part in tables[name])
            if is_of_kept and layout.kept is not None:
                cos, sin = cos[layout.kept], sin[layout.kept]
            rows[where] = cos.shape[-1], cos.dtype is not own.dtype, cos.data_ptr(), sin.data_ptr()
            held += cos, sin

        for (query_factors, is_of_kept), where in self.factors.items():
            factors = query_factors(layout.positions[0], own.dtype)
            held.append(factors[layout.kept] if is_of_kept and layout.kept is not None else factors)
            rows[where] = held[-1].data_ptr()

        for (is_of_kept, window, (heads, kv_heads, head_dim), turned_size), where in self.attentions.items():
            seen = kept_lines_of(layout, window) if is_of_kept else lines_of(layout, layout.parts, window)
            parts, size = division(seen, heads, kv_heads, head_dim, own.num_threads, turned_size)
            held.append(x.new_empty(own.num_threads * size, dtype=torch.float32))
            rows[where] = held[-1].data_ptr(), len(seen.runs) - 1, parts, size, *seen.addresses

        if own.inputs:
            assert given.layer_inputs is not None
            held.append(given.layer_inputs.contiguous())
            rows[self.inputs] = held[-1].data_ptr() + self.inputs_begin

        if needs_scratch(own.dtype, len(x)):
            held.append(x.new_empty(own.num_threads * self.most_scratch, dtype=torch.float32))
            rows[self.on_scratch, self.scratch] = held[-1].data_ptr()
        else:
            rows[self.on_scratch, self.scratch] = 0
        return held

    def _set_memory(self, x: torch.Tensor, cache: SlotCache) -> None:
        """Set where the layers keep keys and values."""
        layers = [(index, layer) for index, layer in enumerate(self.plan.layers) if layer.attends]
        memories = [cache.layer(index if layer.source is None else layer.source) for index, layer in layers]
        for memory, (_, layer) in zip(memories, layers):
            if not memory.is_initialized:
                memory.lazy_initialization(*[x.new_empty(1, layer.kv_heads, 1, size) for size in layer.stored_sizes])
        addresses = np.array([memory.addresses for memory in memories], np.int64).reshape(-1, 2)
        for where in self.memory_places:
            self.program.rows[where] = addresses
        self.kept_in = ref(cache), cache.num_moves, len(cache.layers)


def _heads_of(layer: LayerPlan) -> tuple[tuple[int, int, int], int]:
    """Return the arguments of `division` that depend on the layer."""
    heads, size, latent = layer.num_heads, layer.head_dim, layer.latent
    if latent is None:
        return (heads, layer.kv_heads, size), 0
    return (heads, parts_of_heads(heads), size), latent.turned_size


def _places(code: int, operators: list[int], names: list[str]) -> Places:
    return np.array(operators, np.int64)[:, None], [column(code, name) for name in names]


def _places_by(kinds: list[Any], code: int, operators: list[int], names: list[str]) -> dict[Any, Places]:
    """Return the places of fields by the kind of each operator."""
    by_kind = defaultdict[Any, list[int]](list)
    for kind, number in zip(kinds, operators):
        by_kind[kind].append(number)
    return {kind: _places(code, own, names) for kind, own in by_kind.items()}
