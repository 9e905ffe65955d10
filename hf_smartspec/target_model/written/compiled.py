"""A written-out decoder as one compiled program: all layers in one call, on a CPU."""

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ...cpu.attention import division, has_attention
from ...cpu.few_tokens import ROWS, most_tokens, widens
from ...cpu.gates import has_gates
from ...cpu.kernels import program as codes
from ...cpu.kernels.multiply import tokens_at_once, wide_size
from ...cpu.norms import has_norms
from ...cpu.program import DTYPES, Program
from ...cpu.tensor_checks import is_plain
from ...cpu.threads import share_of
from ..attention.seen_lines import has_few_tokens, lines_of
from ..cache.slot_cache import SlotCache
from ..layout.step_layout import StepLayout
from .parts import MLP, Fused, Halves, RMSNorm, gate_of
from .plan import DecoderPlan, LayerPlan

Tables = tuple[torch.Tensor, torch.Tensor]
_LEAST = 16  # tokens for which programs have room
# Fields that are set before every forward.
_ROTATE = "keys values lines dim cos sin".split()
_ATTEND = "keys values scratch num_runs parts scratch_size runs firsts counts nodes bits prefixes prefix_counts".split()


@dataclass
class _Weights:
    """Address of the weight of a product, of its bias (or 0), and the numbers of its outputs and inputs."""

    weight: int
    bias: int
    num_outputs: int
    num_inputs: int


class CompiledDecoder:
    """
    The forward of a decoder by its plan, in one call of compiled code: the results of `WrittenDecoder`, bit for bit.

    Args:
        plan (`DecoderPlan`): A plan that passes `can_compile`.
    """

    def __init__(self, plan: DecoderPlan):
        self.plan = plan
        self.dtype = _dtype(plan)
        self._free: defaultdict[tuple, list[_Forward]] = defaultdict(list)  # by what they are built for

    def serves(self, layout: StepLayout) -> bool:
        """Return whether compiled code computes this forward: few tokens, with attention over their own rows."""
        return (
            is_plain(layout.tokens)
            and layout.tokens.shape[1] <= most_tokens(self.dtype)
            and layout.encoded is None
            and not layout.is_padded  # as on GPUs
            and all(has_few_tokens(part, window) for window in self._windows for part in layout.parts)
        )

    @property
    def _windows(self) -> set[int | None]:
        return {layer.window for layer in self.plan.layers}

    def run(
        self,
        x: torch.Tensor,
        layout: StepLayout,
        cache: SlotCache,
        tables: Mapping[str | None, Tables],
        layers: frozenset[int] = frozenset(),
        keep: Callable[[int, torch.Tensor], None] | None = None,
    ) -> torch.Tensor:
        """
        Run all layers, the final norm and the head.

        Args:
            x (`torch.Tensor` of shape `[N, hidden_size]`): Embeddings, which are not changed.
            tables (mapping): Rotary embeddings, from `WrittenDecoder.tables`.
            layers (set of `int`), keep (`Callable`): Layers whose hidden states are passed on, as in `WrittenDecoder`.

        Returns:
            `torch.Tensor` of shape `[M, vocab_size]`.
        """
        room = max(_LEAST, 1 << (len(x) - 1).bit_length())
        key = room, torch.get_num_threads(), layers
        try:  # each thread has a forward of its own
            forward = self._free[key].pop()
        except IndexError:
            forward = _Forward(self.plan, x, *key)
        try:
            return forward(x, layout, cache, tables, keep)
        finally:
            self._free[key].append(forward)


def can_compile(plan: DecoderPlan) -> bool:
    """Return whether all parts of a decoder are of kinds that there is compiled code for."""
    dtype = _dtype(plan)
    if dtype not in DTYPES or plan.calls_modules or _weights(plan.head) is None or not _is_norm(plan.final_norm):
        return False
    if not all([has_norms(dtype), has_attention(dtype), has_gates(dtype)]):
        return False
    return all(map(_can_compile_layer, plan.layers))


def _can_compile_layer(plan: LayerPlan) -> bool:
    norms = plan.before_attention, plan.after_attention, plan.before_mlp, plan.after_mlp, plan.query_norm, plan.key_norm
    mlp = plan.mlp
    return (
        all(norm is None or _is_norm(norm) for norm in norms)
        and plan.softcap is None
        and (plan.rotation is None or isinstance(plan.rotation, Halves))
        and not plan.head_dim % 16
        and isinstance(mlp, MLP)
        and mlp.is_gated
        and gate_of(mlp.activation) is not None
        and all(
            _weights(item) is not None for item in (plan.query_key_value, plan.attention_output, mlp.inputs, mlp.output)
        )
    )


def _is_norm(norm: Any) -> bool:
    return isinstance(norm, RMSNorm) and not norm.shape[0] % 16


def _dtype(plan: DecoderPlan) -> torch.dtype:
    return next(iter(plan.embedding.module.parameters())).dtype


def _weights(item: Any) -> _Weights | None:
    """Return where the weights of a product lie; None where they do not lie side by side as plain numbers."""
    found = item.whole() if isinstance(item, Fused) else None
    if found is None:
        return None
    weight, bias = found
    is_plain = weight.is_cpu and weight.dtype in DTYPES and weight.is_contiguous() and not weight.shape[1] % 16
    if not is_plain or (bias is not None and (bias.dtype is not weight.dtype or not bias.is_contiguous())):
        return None
    return _Weights(weight.data_ptr(), 0 if bias is None else bias.data_ptr(), *weight.shape)


def _placed(item: Any) -> _Weights:
    found = _weights(item)
    assert found is not None, "checked by `can_compile`"
    return found


class _Forward:
    """A program for up to `room` tokens, with its own memory; one thread at a time runs it."""

    def __init__(self, plan: DecoderPlan, x: torch.Tensor, room: int, num_threads: int, layers: frozenset[int]):
        self.plan, self.room, self.num_threads, self.layers = plan, room, num_threads, layers
        self.operators: list[tuple[int, dict[str, float]]] = []
        self.sized: list[int] = []  # operators on all tokens
        self.memory: list[torch.Tensor] = []
        self.rotated: list[int] = []  # operators of each kind
        self.attending: list[int] = []
        self.multiplied: list[int] = []
        self.kept: dict[int, int] = {}  # by layer, the operators that store hidden states
        self.dtype, self.size = x.dtype, x.shape[1]
        self._write()
        self.program = Program(self.dtype, self.operators)
        self._index()

    # --- Writing the program

    def _write(self) -> None:
        self.x, self.normed, self.out, self.beside = (self._new(self.size) for _ in range(4))
        layers = self.plan.layers
        self.queries = self._new(max(layer.num_heads * layer.head_dim for layer in layers))
        self.attended = self._new(max(layer.num_heads * layer.head_dim for layer in layers))
        self.states = self._new(max((layer.num_heads + 2 * layer.kv_heads) * layer.head_dim for layer in layers))
        mlps: list[Any] = [layer.mlp for layer in layers]
        self.hidden = self._new(max(_placed(mlp.inputs).num_outputs for mlp in mlps))
        self.gated = self._new(self.hidden.shape[1] // 2)
        self.pending: tuple[torch.Tensor, float] | None = None  # what is to be added to `x`
        for index, layer in enumerate(layers):
            if index in self.layers:
                self._store(index)
            self._write_layer(layer)
        if len(layers) in self.layers:
            self._store(len(layers))
        if -1 in self.layers:
            self._settle()
            self.kept[-1] = self._norm(self.plan.final_norm, self.x, self.x)
        self.last_norm = self._norm(self.plan.final_norm, self.x, self.normed)
        self.sized.remove(self.last_norm)
        self.head = self._multiply(self.plan.head, self.normed, self.normed)  # outputs are set later
        self.sized.remove(self.head)

    def _new(self, size: int) -> torch.Tensor:
        self.memory.append(torch.empty(self.room, size, dtype=self.dtype, device="cpu"))
        return self.memory[-1]

    def _add(self, code: int, **fields: float) -> int:
        self.operators.append((code, fields))
        self.sized.append(len(self.operators) - 1)
        return len(self.operators) - 1

    def _settle(self) -> None:
        """Add to `x` what is pending."""
        if self.pending is not None:
            added, factor = self.pending
            addresses = {"x": self.x.data_ptr(), "added": added.data_ptr(), "outputs": self.x.data_ptr()}
            self._add(codes.ADD, size=self.size, factor=factor, **addresses)
            self.pending = None

    def _store(self, index: int) -> None:
        self._settle()
        self.kept[index] = self._add(codes.ADD, size=self.size, x=self.x.data_ptr(), factor=1.0)

    def _norm(self, norm: Any, x: torch.Tensor, outputs: torch.Tensor) -> int:
        """Normalize tokens of `size` numbers; `x` after what is pending was added to it."""
        fields: dict[str, float] = {"x": x.data_ptr(), "outputs": outputs.data_ptr()}
        if x is self.x and self.pending is not None:
            fields |= {"added": self.pending[0].data_ptr(), "factor": self.pending[1]}
            self.pending = None
        return self._norm_vectors(norm, 1, self.size, **fields)

    def _norm_vectors(self, norm: Any, vectors: int, stride: int, **fields: float) -> int:
        return self._add(
            codes.NORM,
            vectors=vectors,
            size=norm.shape[0],
            in_stride=stride,
            out_stride=stride,
            is_shifted=norm.is_shifted,
            weight=norm.weight().data_ptr(),
            eps=norm.eps,
            **fields,
        )

    def _multiply(self, item: Any, x: torch.Tensor, outputs: torch.Tensor) -> int:
        weights = _placed(item)
        at_once = tokens_at_once(self.room, weights.num_inputs)
        number = self._add(
            codes.MULTIPLY,
            num_inputs=weights.num_inputs,
            num_outputs=weights.num_outputs,
            share=share_of(weights.num_outputs, weights.num_inputs, ROWS),
            at_once=at_once,
            weight=weights.weight,
            tokens=x.data_ptr(),
            bias=weights.bias,
            outputs=outputs.data_ptr(),
            wide_size=wide_size(at_once, weights.num_inputs),
        )
        self.multiplied.append(number)
        return number

    def _write_layer(self, plan: LayerPlan) -> None:
        normed = self._input(plan.before_attention)
        self._write_attention(plan, normed)
        if plan.after_attention is not None:
            self._norm(plan.after_attention, self.out, self.out)
        attended = self.out
        if plan.is_parallel:
            self._write_mlp(plan, normed, self.beside)
            addresses = {"x": attended.data_ptr(), "added": self.beside.data_ptr(), "outputs": attended.data_ptr()}
            self._add(codes.ADD, size=self.size, factor=1.0, **addresses)
            self.pending = attended, 1.0
            return
        self.pending = attended, plan.multiplier
        self._write_mlp(plan, self._input(plan.before_mlp), self.out)
        if plan.after_mlp is not None:
            self._norm(plan.after_mlp, self.out, self.out)
        self.pending = self.out, plan.multiplier

    def _input(self, norm: Any) -> torch.Tensor:
        """Return the input of attention or of an MLP: `x`, or `normed`."""
        if norm is None:
            self._settle()
            return self.x
        self._norm(norm, self.x, self.normed)
        return self.normed

    def _write_attention(self, plan: LayerPlan, normed: torch.Tensor) -> None:
        heads, kv_heads, size = plan.num_heads, plan.kv_heads, plan.head_dim
        self._multiply(plan.query_key_value, normed, self.states)
        stride = (heads + 2 * kv_heads) * size
        for norm, first, number in ((plan.query_norm, 0, heads), (plan.key_norm, heads, kv_heads)):
            if norm is not None:
                place = self.states.data_ptr() + first * size * self.states.itemsize
                self._norm_vectors(norm, number if plan.norms_heads else 1, stride, x=place, outputs=place)
        fields = {"states": self.states.data_ptr(), "queries": self.queries.data_ptr()}
        self.rotated.append(self._add(codes.ROTATE, heads=heads, kv_heads=kv_heads, size=size, **fields))
        attention = self._add(
            codes.ATTEND,
            kv_heads=kv_heads,
            groups=heads // kv_heads,
            size=size,
            queries=self.queries.data_ptr(),
            outputs=self.attended.data_ptr(),
            scale=plan.scaling,
        )
        self.sized.remove(attention)
        self.attending.append(attention)
        self._multiply(plan.attention_output, self.attended, self.out)

    def _write_mlp(self, plan: LayerPlan, x: torch.Tensor, outputs: torch.Tensor) -> None:
        mlp: Any = plan.mlp
        activation = gate_of(mlp.activation)
        assert activation is not None
        self._multiply(mlp.inputs, x, self.hidden)
        self._add(
            codes.GATE,
            size=_placed(mlp.inputs).num_outputs // 2,
            activation=activation,
            inputs=self.hidden.data_ptr(),
            outputs=self.gated.data_ptr(),
        )
        self._multiply(mlp.output, self.gated, outputs)

    # --- Running it

    def _index(self) -> None:
        """Note where the fields are that are set before every forward."""
        column, rows = self.program.column, self.program.rows
        self.num_tokens = rows[:, column(codes.ADD, "num_tokens")]
        self.wide = column(codes.MULTIPLY, "wide")
        self.most_wide = max(int(rows[number, column(codes.MULTIPLY, "wide_size")]) for number in self.multiplied)
        self.rotate = np.array(self.rotated)[:, None], [column(codes.ROTATE, name) for name in _ROTATE]
        self.attend = np.array(self.attending)[:, None], [column(codes.ATTEND, name) for name in _ATTEND]
        self.vocab_size = int(rows[self.head, column(codes.MULTIPLY, "num_outputs")])

    def __call__(
        self,
        x: torch.Tensor,
        layout: StepLayout,
        cache: SlotCache,
        tables: Mapping[str | None, Tables],
        keep: Callable[[int, torch.Tensor], None] | None,
    ) -> torch.Tensor:
        num, program, lines = len(x), self.program, layout.kept
        self.x[:num].copy_(x)
        num_kept = num if lines is None else len(lines)
        logits, scratch = x.new_empty(num_kept, self.vocab_size), self._set_places(x, layout, cache, tables)
        kept = [x.new_empty(num, self.size) for _ in self.kept]
        for number, states in zip(self.kept.values(), kept):
            program.set(number, "outputs", states.data_ptr())
        self.num_tokens[self.sized], self.num_tokens[[self.last_norm, self.head]] = num, num_kept
        program.set(self.last_norm, "lines", 0 if lines is None else lines.data_ptr())
        program.set(self.head, "outputs", logits.data_ptr())
        program.run(self.num_threads)
        del scratch  # until here, only its addresses were known
        for layer, states in zip(self.kept, kept):
            assert keep is not None, "`layers` come with `keep`"
            keep(layer, states)
        return logits

    def _set_places(
        self, x: torch.Tensor, layout: StepLayout, cache: SlotCache, tables: Mapping[str | None, Tables]
    ) -> list[torch.Tensor]:
        """Set the memory of layers, what tokens attend to, and rotary embeddings; return what must stay meanwhile."""
        layers, rows = self.plan.layers, self.program.rows
        memories = [cache.layer(index) for index in range(len(layers))]
        for memory, layer in zip(memories, layers):
            if not memory.is_initialized:
                empty = x.new_empty(1, layer.kv_heads, 1, layer.head_dim)
                memory.lazy_initialization(empty, empty)
        places = [(memory.keys.data_ptr(), memory.values.data_ptr()) for memory in memories]

        held = [part.contiguous() for pair in tables.values() for part in pair]
        factors = {
            name: (cos.shape[-1], cos.data_ptr(), sin.data_ptr())
            for name, cos, sin in zip(tables, held[::2], held[1::2])
        }
        lines = layout.lines.data_ptr()
        rows[self.rotate] = [
            (*place, lines, *(factors[layer.layer_type] if layer.rotation is not None else (0, 0, 0)))
            for layer, place in zip(layers, places)
        ]

        kinds = [(layer.window, layer.num_heads, layer.kv_heads, layer.head_dim) for layer in layers]
        settings, most = {}, 0
        for kind in dict.fromkeys(kinds):
            window, heads, kv_heads, head_dim = kind
            seen = lines_of(layout, layout.parts, window)
            parts, size = division(seen, heads, kv_heads, head_dim, self.num_threads)
            settings[kind] = len(seen.runs) - 1, parts, size, *seen.addresses
            most = max(most, size)
        held.append(x.new_empty(self.num_threads * most, dtype=torch.float32))
        scratch = held[-1].data_ptr()
        rows[self.attend] = [(*place, scratch, *settings[kind]) for kind, place in zip(kinds, places)]

        if widens(self.dtype, len(x)):
            held.append(x.new_empty(self.num_threads * self.most_wide, dtype=torch.float32))
            rows[self.multiplied, self.wide] = held[-1].data_ptr()
        else:
            rows[self.multiplied, self.wide] = 0
        return held
