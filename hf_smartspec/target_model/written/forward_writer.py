"""Writer of a decoder's forward: its compiled operators, and the memory that they share."""

from typing import Any

import torch

from ...cpu.compact import CompactWeights
from ...cpu.few_tokens import ROWS
from ...cpu.kernels import gates as codes_of_gates
from ...cpu.kernels import program as codes
from ...cpu.kernels.multiply import part_rows, scratch_size, tokens_at_once
from ...cpu.program import ON_TOKENS
from ...cpu.quantized.native import Rounded, blocks_of, code_of, num_groups
from ...cpu.screening import Screen, ScreenOperators
from ...cpu.threads import share_of
from .attention_program import gate_outputs, multiply_queries
from .experts import Experts
from .experts_program import ExpertOperators
from .latent_program import LatentOperators
from .layer_inputs import LayerInput
from .mixed_mlps import MixedMLP, mlps_of
from .mlps import MLP, XIELU
from .plan import DecoderPlan, LayerPlan, absent, products_of
from .query_factors import QueryFactors
from .recurrences import in_common, operators_of
from .rotation_program import last_norms, places, width_of
from .rotations import Rotation


class ForwardWriter:
    """
    Writer of the operators of a forward of up to `room` tokens. That of heads begins with the target's hidden states
    if it `reads_states`, or else with features. With a `screen` of the head, it ends with the best tokens in place of
    logits. Of tokens that are not kept, the last layer computes queries, keys and values only; the last layers, if
    they have no keys and values of their own, compute nothing for these. Weights are read from their `compact` copies,
    where there are any.
    """

    def __init__(
        self,
        plan: DecoderPlan,
        x: torch.Tensor,
        room: int,
        num_threads: int,
        layers: frozenset[int],
        reads_states: bool,
        screen: Screen | None = None,
        compact: CompactWeights | None = None,
    ):
        self.plan, self.room, self.num_threads, self.layers = plan, room, num_threads, layers
        self.dtype, self.size = x.dtype, x.shape[1]
        self.compact = {} if compact is None else compact.copies
        self.operators: list[tuple[int, dict[str, float]]] = []
        self.on_all: list[int] = []  # operators on all tokens
        self.on_kept: list[int] = []  # operators on the tokens that are kept, which come last
        self.times: dict[int, int] = {}  # operators that have several lines for each token, and how many
        self.gathers: dict[int, str] = {}  # operators that read these among all, and which field says where
        self.memory: list[torch.Tensor] = []
        self.recurrent = operators_of(plan.layers)
        self.rotated: list[int] = []  # operators of each kind
        self.attending: list[int] = []
        self.multiplied: list[int] = []
        self.kept: dict[int, int] = {}  # by layer, the operators that store hidden states
        self.factors: dict[int, QueryFactors] = {}  # operators that multiply by these
        self.inputs: dict[int, int] = {}  # operators that multiply by inputs of layers, and how many bytes in
        self._write(reads_states, screen)

    def _write(self, reads_states: bool, screen: Screen | None) -> None:
        self.x, self.normed, self.out = (self.new(self.size) for _ in range(3))
        self.embedded = self.given = self.x  # what tokens are copied to, and features
        groups = [num_groups(item.shape[1]) for item in products_of(self.plan) if item.whole().scale is not None]
        groups += [] if screen is None else [num_groups(self.size)]
        self.rounded = Rounded(self.room, max(groups, default=0))  # for products of quantized weights
        layers = self.plan.layers
        self.queries = self.new(max(layer.num_heads * layer.head_dim for layer in layers))
        sizes = [layer.recurrence.num_outputs for layer in layers if layer.recurrence is not None]
        self.recurred = self.new(max(sizes, default=0), torch.float32)
        self.attended = self.new(max([*sizes, self.queries.shape[1]]))
        maps: list[Any] = [item.query_key_value for item in layers if item.attends or in_common(item.recurrence)]
        equal: list[Any] = [layer for layer in layers if layer.has_equal_values]  # of these, norms fill `states`
        self.states = self.new(max([*(item.shape[0] for item in maps), *map(width_of, equal)], default=0))
        gate_maps: list[Any] = [layer.output_gates for layer in layers if layer.output_gates is not None]
        self.gates = self.new(max([item.shape[0] for item in gate_maps], default=0))
        self.raw = self.new(max([layer.query_key_value.shape[0] for layer in equal], default=0))
        parts = mlps_of(layers)
        mlps: list[Any] = [part for part in parts if isinstance(part, MLP)]
        mlps += [part.shared[0] for part in parts if isinstance(part, Experts) and part.shared]
        gates: list[Any] = [layer.layer_input.gate for layer in layers if layer.layer_input is not None]
        sizes = [gate.shape[0] for gate in gates]
        self.hidden = self.new(max([*sizes, *(mlp.inputs.shape[0] for mlp in mlps)], default=0))
        self.activated = self.new(max([*sizes, *(mlp.output.shape[1] for mlp in mlps)], default=0))
        self.experts = ExpertOperators(self) if any(isinstance(part, Experts) for part in parts) else None
        has_two = any(layer.is_parallel or isinstance(layer.mlp, MixedMLP) for layer in layers)
        self.beside = self.new(self.size if has_two else 0)
        self.latents = LatentOperators(self) if any(layer.latent is not None for layer in layers) else None
        self.pending: tuple[torch.Tensor, float] | None = None  # what is to be added to `x`
        normed = None if self.plan.features is None else self._first_input(self.plan.features, reads_states)
        first = self._first_kept
        for index, layer in enumerate(layers):
            if index in self.layers:
                self.kept[index] = self._sum()
            if index == first and not layer.stores:
                self._keep_tokens()
            self._write_layer(index, layer, None if index else normed, index == first and layer.stores)
        if len(layers) in self.layers:
            self.kept[len(layers)] = self._sum()
        if -1 in self.layers:
            self._settle()
            self.kept[-1] = self._norm(self.plan.final_norm, self.x, self.x)
        if not self.gathers:
            self._keep_tokens()
        self._norm(self.plan.final_norm, self.x, self.normed)
        head: Any = self.plan.head
        self.screening: ScreenOperators | None = None
        if screen is None:  # outputs are set later
            self.head = self.multiply(head, self.normed, self.normed)
        else:
            self.screening = ScreenOperators(screen, head.whole().weight, self.normed, self.rounded, self.add)

    @property
    def _first_kept(self) -> int:
        """
        Return the first layer that may leave out tokens that are not kept: neither later layers nor those who ask for
        hidden states need more of it. Of heads nobody asks.
        """
        layers, last = self.plan.layers, len(self.plan.layers) - 1
        first = next((index for index in range(last, -1, -1) if layers[index].stores), -1) + 1
        if first > last and layers[last].recurrence is not None:
            return last + 1
        asked = self.layers if self.plan.features is None else frozenset[int]()
        return last + 1 if -1 in asked else max([min(first, last), *asked])

    def new(self, size: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return memory for `size` numbers of each token."""
        self.memory.append(torch.empty(self.room, size, dtype=dtype or self.dtype, device="cpu"))
        return self.memory[-1]

    def add(self, code: int, /, **fields: float) -> int:
        """Append an operator; return its number."""
        number = len(self.operators)
        self.operators.append((code, fields))
        if code in ON_TOKENS:
            (self.on_kept if self.gathers else self.on_all).append(number)
        return number

    def _settle(self) -> None:
        """Add to `x` what is pending."""
        if self.pending is not None:
            self._sum()

    def _sum(self, times: torch.Tensor | None = None) -> int:
        """
        Write an operator that adds to `x` what is pending, multiplies it, and copies it to its outputs, where they are
        set.
        """
        added, factor = self.pending or (None, 1.0)
        self.pending = None
        fields = {name: 0 if item is None else item.data_ptr() for name, item in (("added", added), ("times", times))}
        return self.add(codes.ADD, size=self.size, x=self.x.data_ptr(), factor=factor, **fields)

    def _keep_tokens(self) -> None:
        """Go on with the tokens that are kept, as a new `x`."""
        self.gathers[len(self.operators)] = "lines"  # first, as from this operator on all are on these tokens
        number, kept = self._sum(), self.new(self.size)
        self.operators[number][1]["outputs"] = kept.data_ptr()
        self.x = kept

    def _kept(self, x: torch.Tensor) -> torch.Tensor:
        """Return `[room, size]` of the tokens that are kept."""
        kept = self.new(self.size)
        number = self.add(codes.ADD, size=self.size, x=x.data_ptr(), outputs=kept.data_ptr())
        self.gathers[number] = "lines"
        return kept

    def _norm(self, norm: Any, x: torch.Tensor, outputs: torch.Tensor) -> int:
        """Normalize tokens of `size` numbers; `x` after what is pending was added to it."""
        fields: dict[str, float] = {"x": x.data_ptr(), "outputs": outputs.data_ptr()}
        if x is self.x and self.pending is not None:
            fields |= {"added": self.pending[0].data_ptr(), "factor": self.pending[1]}
            self.pending = None
        return self.norm_vectors(norm, 1, (self.size, self.size), **fields)

    def norm_vectors(self, norm: Any, vectors: int, strides: tuple[int, int], /, **fields: float) -> int:
        weight, bias = norm.weights()
        own = {
            "size": norm.shape[0],
            "vector_stride": norm.shape[0],
            "in_stride": strides[0],
            "out_stride": strides[1],
            "form": norm.form,
            "weight": weight.data_ptr(),
            "bias": 0 if bias is None else bias.data_ptr(),
            "eps": norm.eps,
        }
        return self.add(codes.NORM, vectors=vectors, **own | fields)

    def multiply(self, item: Any, x: torch.Tensor, outputs: torch.Tensor) -> int:
        """Write a product; return the number of its last operator."""
        weight, bias, scale = item.whole()
        num_outputs, num_inputs = item.shape
        fields = {
            "num_outputs": num_outputs,
            "weight": weight.data_ptr(),
            "bias": 0 if bias is None else bias.data_ptr(),
            "outputs": outputs.data_ptr(),
        }
        if scale is not None:
            code = code_of(weight)
            self.add(codes.LEVELS, size=num_inputs, tokens=x.data_ptr(), **self.rounded.written())
            fields |= {"num_groups": weight.shape[1], "share": blocks_of(num_outputs, num_inputs)}
            return self.add(code, scales=scale.data_ptr(), **fields, **self.rounded.read_by(code))
        at_once = tokens_at_once(self.room, num_inputs, self.dtype.itemsize)
        size = scratch_size(self.room, num_inputs, self.dtype.itemsize)
        rows = part_rows(num_outputs, num_inputs, self.dtype.itemsize, self.num_threads)
        fields |= {"at_once": at_once, "scratch_size": size, "part_rows": rows}
        share = share_of(num_outputs, num_inputs, ROWS)
        code, copy = codes.MULTIPLY, self.compact.get(weight.data_ptr())
        if copy is not None and self.dtype is torch.bfloat16:
            fields["packed"] = copy.data_ptr()
        elif copy is not None:
            code, fields["weight"] = codes.NARROW, copy.data_ptr()
        number = self.add(code, num_inputs=num_inputs, share=share, tokens=x.data_ptr(), **fields)
        self.multiplied.append(number)
        return number

    def _first_input(self, plan: Any, reads_states: bool) -> torch.Tensor:
        """Write `first_input`; return the input of attention. The features become `x`."""
        features = self.out if plan.adds_normed else self.x
        self.embedded, self.given, both = self.new(self.size), features, self.new(2 * self.size)
        if reads_states:
            self.given = self.new(plan.states_map.shape[1])
            place = self.given.data_ptr()
            for norm in plan.states_norms:
                self.norm_vectors(norm, 1, (self.given.shape[1],) * 2, x=place, outputs=place)
                place += norm.shape[0] * self.given.itemsize
            self.multiply(plan.states_map, self.given, features)
        if plan.adds_normed:
            self._norm(plan.feature_norm, features, self.x)
        halves = both.data_ptr(), both.data_ptr() + self.size * both.itemsize
        for norm, x, place in zip((plan.embedding_norm, plan.feature_norm), (self.embedded, features), halves):
            self.norm_vectors(norm, 1, (self.size, 2 * self.size), x=x.data_ptr(), outputs=place)
        return both

    def _write_layer(self, index: int, plan: LayerPlan, normed: torch.Tensor | None, keeps: bool) -> None:
        """Write a layer; if it `keeps`, what comes after keys and values is of the tokens that are kept."""
        if plan.query_key_value is absent:
            self._write_mlp(plan)
            return
        normed = self._input(plan.before_attention) if normed is None else normed
        if plan.recurrence is None:
            self._write_attention(plan, normed, keeps)
        else:
            recurrence: Any = plan.recurrence
            self.recurrent.add(self, recurrence, plan.query_key_value, normed)
            self.multiply(plan.attention_output, self.attended, self.out)
        if plan.is_parallel:
            self._write_parallel_mlp(plan, normed, keeps)
            return
        if plan.after_attention is not None:
            self._norm(plan.after_attention, self.out, self.out)
        self.pending = self.out, plan.multiplier
        if plan.mlp is not absent:
            self._write_mlp(plan)
        if plan.layer_input is not None:
            self._write_layer_input(index, plan.layer_input)
        if plan.factor is not None:
            self._sum(plan.factor.number())

    def _write_mlp(self, plan: LayerPlan) -> None:
        """Write the MLP after what is pending; its outputs are pending then."""
        self.write_mlp(plan.mlp, self._input(plan.before_mlp), self.out)
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

    def _write_attention(self, plan: LayerPlan, normed: torch.Tensor, keeps: bool) -> None:
        if plan.latent is not None:
            assert self.latents is not None
            self.latents.add(plan, normed, keeps)
            return
        heads, kv_heads, size = plan.num_heads, plan.kv_heads, plan.head_dim
        maps: Any = plan.query_key_value
        raw = self.raw if plan.has_equal_values else self.states
        self.multiply(maps, normed, raw)
        step, stride = 2 if plan.has_gates else 1, width_of(plan)  # to the next query, and to the next token's
        values = step * heads + kv_heads
        for norm, first, place, number, apart in (
            (plan.query_norm, 0, 0, heads, step),
            (plan.key_norm, step * heads, step * heads, kv_heads, 1),
            (plan.value_norm, step * heads if plan.has_equal_values else values, values, kv_heads, 1),
        ):
            if norm is not None and (norm is plan.value_norm or not plan.norms_last):
                number = number if plan.norms_heads else 1
                fields = {
                    "x": raw.data_ptr() + first * size * raw.itemsize,
                    "outputs": self.states.data_ptr() + place * size * raw.itemsize,
                    "vector_stride": apart * size,
                }
                self.norm_vectors(norm, number, (maps.shape[0], stride), **fields)
        self.rotated.append(
            self.add(
                codes.ROTATE,
                heads=heads,
                kv_heads=plan.num_stored,
                size=size,
                states=self.states.data_ptr(),
                queries=self.queries.data_ptr(),
                is_interleaved=isinstance(plan.rotation, Rotation) and plan.rotation.code,
                **places(plan),
                **last_norms(plan),
            )
        )
        if plan.query_factors is not None:
            multiply_queries(self, plan.query_factors, heads * size)
        if keeps:
            self._keep_tokens()
        gates = {}
        if plan.has_gates:
            gates = {"gates": self.states.data_ptr() + size * self.states.itemsize, "gate_stride": stride}
        sinks = 0 if plan.sinks is None else plan.sinks.numbers().data_ptr()
        attention = self.add(
            codes.ATTEND,
            kv_heads=kv_heads,
            groups=heads // kv_heads,
            size=size,
            queries=self.queries.data_ptr(),
            outputs=self.attended.data_ptr(),
            sinks=sinks,
            scale=plan.scaling,
            cap=plan.softcap or 0.0,
            **gates,
        )
        self.attending.append(attention)
        if keeps:
            self.gathers[attention] = "places"
        if plan.output_gates is not None:
            gate_outputs(self, plan, self._kept(normed) if keeps else normed)
        self.multiply(plan.attention_output, self.attended, self.out)

    def _write_layer_input(self, index: int, plan: LayerInput) -> None:
        """Write what a layer adds last."""
        gate, projection, inputs = plan.gate, plan.projection, self.plan.layer_inputs
        assert inputs is not None
        self._settle()
        self.multiply(gate, self.x, self.hidden)
        size, hidden, activated = inputs.size, self.hidden.data_ptr(), self.activated.data_ptr()
        fields: dict[str, Any] = {"activation": plan.activation, "is_gated": False, "size": size}
        self.add(codes.GATE, inputs=hidden, outputs=activated, **fields)
        strides = {"x_stride": size, "factor_stride": inputs.num_layers * size}
        number = self.add(codes.TIMES, size=size, x=activated, outputs=hidden, **strides)
        self.inputs[number] = index * size * self.hidden.itemsize
        if self.gathers:
            self.gathers[number] = "lines"
        self.multiply(projection, self.hidden, self.out)
        self._norm(plan.norm, self.out, self.out)
        self.pending = self.out, 1.0

    def _write_parallel_mlp(self, plan: LayerPlan, normed: torch.Tensor, keeps: bool) -> None:
        """Write the MLP beside attention, whose input was `normed`; both are pending then."""
        if plan.before_mlp is not None:
            normed = self._input(plan.before_mlp)
        elif keeps:
            normed = self._kept(normed)
        self.write_mlp(plan.mlp, normed, self.beside)
        self.add(codes.ADD, size=self.size, x=self.out.data_ptr(), added=self.beside.data_ptr(), factor=1.0)
        self.pending = self.out, 1.0

    def write_mlp(self, mlp: Any, x: torch.Tensor, outputs: torch.Tensor) -> None:
        """Write an MLP, a mixture of experts, or both."""
        if isinstance(mlp, Experts | MixedMLP):
            assert self.experts is not None
            write = self.experts.add if isinstance(mlp, Experts) else self.experts.add_mixed
            write(mlp, x, outputs)  # type: ignore[arg-type]
            return
        self.multiply(mlp.inputs, x, self.hidden)
        fields = _activation_of(mlp) | {"is_gated": mlp.is_gated, "size": mlp.output.shape[1]}
        self.add(codes.GATE, inputs=self.hidden.data_ptr(), outputs=self.activated.data_ptr(), **fields)
        self.multiply(mlp.output, self.activated, outputs)


def _activation_of(mlp: MLP) -> dict[str, Any]:
    """Return the fields of an MLP's activation."""
    if not isinstance(mlp.activation, XIELU):
        return {"activation": mlp.activation}
    places = [item.data_ptr() for item in mlp.activation.numbers()]
    return {"activation": codes_of_gates.XIELU, **dict(zip(("positive", "negative", "slope", "top"), places))}
