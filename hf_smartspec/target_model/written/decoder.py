"""The forward of a planned decoder: few calls, no modules in between, on packed tokens."""

from collections.abc import Callable, Collection, Mapping
from functools import cached_property
from typing import Any

import torch
from torch import nn

from ...cpu.few_tokens import ANY, most_tokens
from ...cpu.gates import can_gate, sigmoid_gated, sigmoid_gated_by_torch
from ...cpu.screening import Picks
from ...gpu.elementwise import can_rotate, rotate_and_write
from ...log import get_logger
from ..attention.tree_attention import packed_attention
from ..cache.slot_cache import SlotCache
from ..cache.slot_layer import SlotLayer
from ..layout.step_layout import StepLayout
from ..logits import LogitScaling
from ..recurrent.cache import StateCache
from .compiled import CompiledDecoder, can_compile
from .inputs import DecoderInput, Features, Tables
from .latent_layer import attend_to_latents
from .parts import Transposed, is_bare, module_of
from .plan import DecoderPlan, FeaturePlan, LayerPlan, absent
from .rotary_tables import RotaryTables
from .rotations import Rotation

logger = get_logger(__name__)

_TYPICAL_TREE = 64  # nodes; trees of more than a window's tokens are attended to with masks


class WrittenDecoder:
    """
    Forward of a decoder by its plan, with the results of the model's own forward (up to the rounding of matrix products
    of other shapes).

    Args:
        plan (`DecoderPlan`): Plan of the model.
        whole (`WrittenDecoder`, *optional*): The decoder that this one is a part of, whose copies of weights it uses.
    """

    def __init__(self, plan: DecoderPlan, whole: "WrittenDecoder | None" = None):
        self.plan, self._whole = plan, whole
        self._is_tried = False  # whether the compiled program was found to agree
        is_known = all(isinstance(layer.rotation, Rotation | None) for layer in plan.layers)
        rotary = module_of(plan.rotary)
        self._known = RotaryTables(rotary) if is_known and isinstance(rotary, nn.Module) else None

    @cached_property
    def _compiled(self) -> CompiledDecoder | None:
        """One program for all layers, where there is compiled code for them."""
        whole = None if self._whole is None else self._whole._compiled
        return CompiledDecoder(self.plan, whole) if can_compile(self.plan) else None

    @property
    def is_reproducible(self) -> bool:
        """
        Return whether the numbers of a token depend on its text alone: not on what is computed beside it, nor on how
        the text is cut into forwards.
        """
        compiled, windows = self._compiled, {layer.window for layer in self.plan.layers}
        is_determined = all(window is None or window >= _TYPICAL_TREE for window in windows)
        # Limits of prompts' time steps round all tokens of a forward otherwise.
        is_determined &= not any(layer.recurrence and layer.recurrence.is_limited for layer in self.plan.layers)
        return compiled is not None and most_tokens(compiled.dtype) == ANY and is_determined

    def __call__(
        self,
        layout: StepLayout,
        cache: SlotCache,
        keep: Callable[[int, torch.Tensor], None] | None = None,
        layers: Collection[int] | None = None,
        features: Features | None = None,
    ) -> Any:
        """
        Run the decoder.

        Args:
            layout (`StepLayout`): Layout of N tokens, of which M are kept.
            cache (`SlotCache`): Where their keys and values are stored.
            keep (`Callable`, *optional*): Called with the hidden states `[N, hidden_size]` before every layer, after
                the last, and, as layer -1, after the final norm; the last two of heads may be 0 for tokens not kept.
            layers (collection of `int`, *optional*): The layers that `keep` is called with, at least; all if not given.
            features (`Features`, *optional*): The features of all tokens, for heads.

        Returns:
            `torch.Tensor` of shape `[M, vocab_size]`, in the model's dtype; or `Picks`, where the layout asks for no
            more (`StepLayout.best_only`) and they are found faster.
        """
        # Not in inference mode if modules are called: they may keep what they compute, and be trained later.
        with torch.no_grad() if self.plan.calls_modules else torch.inference_mode():
            tokens = self.read(layout.tokens)
            x = self.embed(tokens, layout.positions)
            inputs = self.layer_inputs(tokens, x)
            given = DecoderInput(x, layout, cache, self.tables(x, layout.positions), features, inputs)
            compiled = self._compiled
            if compiled is None or (keep is not None and layers is None) or not compiled.serves(layout, cache):
                return self._run(given, keep)
            if self._is_tried:
                found = compiled.run(given, frozenset(layers or ()), keep, layout.best_only and not self._scales)
                return found if isinstance(found, Picks) else self.plan.logit_scaling.apply(found)
            return self._try(compiled, given, keep)

    def _try(
        self, compiled: CompiledDecoder, given: DecoderInput, keep: Callable[[int, torch.Tensor], None] | None
    ) -> torch.Tensor:
        """Run layer by layer, and compare the program with it, which should give every bit of that."""
        compiled.look_at_copies()  # which another decoder may share
        found, reason = None, "its results differ"
        restore = given.cache.remember() if isinstance(given.cache, StateCache) else None
        try:
            found = self.plan.logit_scaling.apply(compiled.run(given))
        except Exception as error:  # compilers raise errors of many types
            reason = repr(error)
        if restore is not None:
            restore()
        expected = self._run(given, keep)  # second, so that its keys and values stay in the cache
        self._is_tried = found is not None and torch.allclose(found, expected, rtol=0.0, atol=0.0, equal_nan=True)
        if not self._is_tried:
            self.__dict__["_compiled"] = None
            logger.warning_once(f"Forwards run layer by layer: the compiled program cannot be used ({reason}).")
        return expected

    def _run(self, given: DecoderInput, keep: Callable[[int, torch.Tensor], None] | None) -> torch.Tensor:
        """Run layer by layer."""
        (x, layout, cache, tables, features, inputs), plan, lines = given, self.plan, given.layout.kept
        normed = None
        if plan.features is not None and features is not None:
            normed, x = first_input(plan.features, x, features)
        for index, layer in enumerate(plan.layers):
            if keep is not None:
                keep(index, x)
            memory = cache.layer(index if layer.source is None else layer.source)
            own = None if inputs is None else inputs[:, index]
            x = run_layer(layer, x, layout, memory, tables, None if index else normed, own)
        if keep is not None:
            keep(len(plan.layers), x)
            x = plan.final_norm(x)
            keep(-1, x)
            return self.logits(x if lines is None else x[lines])
        return self.logits(plan.final_norm(x if lines is None else x[lines]))

    def read(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the tokens whose embeddings the decoder reads, `[1, N]` like the given ones."""
        return tokens if self.plan.placeholders is None else self.plan.placeholders(tokens)

    def embed(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Look up tokens, and positions where they are learnt, `[1, N]` each; return `[N, hidden_size]`."""
        module = module_of(self.plan.embedding)
        if type(module) is nn.Embedding and module.max_norm is None and is_bare(module):  # a call takes much longer
            x = torch.embedding(module.weight, tokens[0])
        else:
            x = self.plan.embedding(tokens)[0]
        if self.plan.embedding_multiplier != 1.0:
            x = x * self.plan.embedding_multiplier
        if self.plan.embedding_norm is not None:
            x = self.plan.embedding_norm(x)
        return x if self.plan.positions is None else x + self.plan.positions(positions[0])

    def layer_inputs(self, tokens: torch.Tensor, x: torch.Tensor) -> torch.Tensor | None:
        """Return inputs of layers `[N, num_layers, size]`, where they have any, from tokens `[1, N]` and embeddings."""
        return None if self.plan.layer_inputs is None else self.plan.layer_inputs(tokens, x)

    def tables(self, x: torch.Tensor, positions: torch.Tensor) -> Mapping[str | None, Tables]:
        """
        Compute rotary embeddings by type of layer, in the form that the type's rotation takes.

        Args:
            x (`torch.Tensor` of shape `[N, hidden_size]`): A tensor with the dtype and device of the result.
            positions (`torch.Tensor` of shape `[1, N]`): Positions of the tokens.
        """
        rotary = module_of(self.plan.rotary)
        if rotary is None:
            return {}
        if self._known is None or not is_bare(rotary):
            return self._computed_tables(x, positions)
        return self._known(self._computed_tables, rotary, x, positions)

    def _computed_tables(self, x: torch.Tensor, positions: torch.Tensor) -> Mapping[str | None, Tables]:
        tables, rotary = {}, self.plan.rotary
        assert rotary is not None
        for name in self.plan.rotary_types:
            arguments: tuple[Any, ...] = () if name is None else (name,)
            found = rotary(x[None], positions, *arguments)
            cos, sin = (found.real, found.imag) if isinstance(found, torch.Tensor) else found  # complex (DeepSeek V2)
            rotation = next(item.rotation for item in self.plan.layers if item.rotation and item.layer_type == name)
            tables[name] = rotation.tables(cos, sin)
        return tables

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """Compute logits `[M, vocab_size]` from hidden states `[M, hidden_size]` after the final norm."""
        return self.plan.logit_scaling.apply(self.plan.head(x))

    @cached_property
    def _scales(self) -> bool:
        """Return whether logits are scaled, which may round different ones to the same."""
        return self.plan.logit_scaling != LogitScaling()

    def look_at_copies(self, thoroughly: bool = False) -> None:
        """
        Renew or forget copies of weights that have changed in place, by torch's count, or thoroughly in any way, and
        then rotary tables, too. Forwards do not look at weights, none of which is in the processor's cache.
        """
        for maps in self.plan.laid_out:
            if isinstance(maps, Transposed):
                maps.look(thoroughly)
        if (compiled := self.__dict__.get("_compiled")) is not None:
            compiled.look_at_copies(thoroughly)
        if thoroughly and self._known is not None:
            self._known.check(module_of(self.plan.rotary))


def first_input(plan: FeaturePlan, embeds: torch.Tensor, features: Features) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the input of the first layer's attention, and `x`, for embeddings `[N, hidden_size]`."""
    values = features.values
    if features.are_states:
        if plan.states_norms:
            parts = values.split([norm.shape[0] for norm in plan.states_norms], dim=-1)
            values = torch.cat([norm(part.contiguous()) for norm, part in zip(plan.states_norms, parts)], dim=-1)
        values = values if plan.states_map is None else plan.states_map(values)
    if plan.both is not None:
        x = plan.both(torch.cat([embeds, values], dim=-1))
        return x, x
    assert plan.embedding_norm is not None and plan.feature_norm is not None
    normed = plan.feature_norm(values)
    return torch.cat([plan.embedding_norm(embeds), normed], dim=-1), normed if plan.adds_normed else values


def run_layer(
    plan: LayerPlan,
    x: torch.Tensor,
    layout: StepLayout,
    memory: SlotLayer,
    tables: Mapping[str | None, Tables],
    normed: torch.Tensor | None = None,
    own_input: torch.Tensor | None = None,
) -> torch.Tensor:
    """
    Run one layer on `x` of shape `[N, hidden_size]`, which is not changed; return its output of the same shape.
    `normed` is the input of attention, where that is not `x` after its norm; `own_input`, `[N, size]`, that of
    `LayerInput`.
    """
    if plan.query_key_value is absent:
        return _add_mlp(plan, x)
    if normed is None:
        normed = x if plan.before_attention is None else plan.before_attention(x)
    if plan.recurrence is None:
        attended = attend(plan, normed, layout, memory, tables)
    else:
        assert isinstance(memory.cache, StateCache)
        attended = plan.attention_output(plan.recurrence.run(plan.query_key_value, normed, memory.cache))
    if plan.after_attention is not None:
        attended = plan.after_attention(attended)
    if plan.is_parallel:
        return attended.add_(plan.mlp(normed if plan.before_mlp is None else plan.before_mlp(x))).add_(x)
    x = _add(plan, x, attended)
    if plan.mlp is not absent:
        x = _add_mlp(plan, x)
    if plan.layer_input is not None:
        assert own_input is not None, "the decoder has inputs of layers"
        x = plan.layer_input(x, own_input).add_(x)
    return x if plan.factor is None else x.mul_(plan.factor.number())


def _add_mlp(plan: LayerPlan, x: torch.Tensor) -> torch.Tensor:
    out = plan.mlp(x if plan.before_mlp is None else plan.before_mlp(x))
    return _add(plan, x, out if plan.after_mlp is None else plan.after_mlp(out))


def _add(plan: LayerPlan, x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    if plan.multiplier != 1.0:
        out = out * plan.multiplier
    return out.add_(x)


def attend(
    plan: LayerPlan, x: torch.Tensor, layout: StepLayout, memory: SlotLayer, tables: Mapping[str | None, Tables]
) -> torch.Tensor:
    """
    Run a layer's attention on `x` of shape `[N, hidden_size]`, after its norm; keys and values are written to `memory`,
    or are there.
    """
    if plan.latent is not None:
        return attend_to_latents(plan, plan.latent, x, layout, memory, tables)
    num, heads, both = len(x), plan.num_heads, plan.num_heads + plan.num_stored
    states = plan.query_key_value(x)
    if plan.has_gates:
        pairs, others = states.split([2 * heads * plan.head_dim, 2 * plan.kv_heads * plan.head_dim], dim=1)
        queries, gates = pairs.view(num, heads, 2, plan.head_dim).unbind(2)
        states = torch.cat([queries.reshape(num, -1), others], dim=1)
    if plan.has_equal_values:
        states = torch.cat([states, states[:, heads * plan.head_dim :]], dim=1)
    states = states.view(num, both + plan.num_stored, plan.head_dim)
    if plan.is_by_head:
        *queries_keys, values = states.unflatten(1, (heads, 3)).unbind(2)
        rotated = torch.cat(queries_keys, dim=1)
    else:
        rotated, values = states[:, :both], states[:, both:]
    if plan.has_norms and not plan.norms_last:
        rotated = _normed(plan, rotated)
    if plan.value_norm is not None:
        values = plan.value_norm(values)
    keys, values = _rotate_and_write(plan, rotated, values, memory, tables)
    if plan.query_factors is not None:
        rotated[:, :heads].mul_(plan.query_factors(layout.positions[0], x.dtype)[:, None, None])
    sinks = None if plan.sinks is None else plan.sinks.numbers()
    output = packed_attention(
        rotated[:, :heads], keys, values, layout, plan.window, plan.scaling, plan.softcap, sinks=sinks
    )
    if plan.has_gates:
        output = output * gates.contiguous().sigmoid()
    output = output.reshape(num, heads * plan.head_dim)
    return plan.attention_output(output if plan.output_gates is None else _gated(output, plan.output_gates(x)))


def _gated(output: torch.Tensor, gates: torch.Tensor) -> torch.Tensor:
    can_run = output.is_contiguous() and can_gate(output) and can_gate(gates)
    return sigmoid_gated(output, gates) if can_run else sigmoid_gated_by_torch(output, gates)


def _rotate_and_write(
    plan: LayerPlan,
    rotated: torch.Tensor,
    values: torch.Tensor,
    memory: SlotLayer,
    tables: Mapping[str | None, Tables],
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Rotate queries and keys in place, `[N, heads + kv_heads, head_dim]`, and normalize them if norms come last; write
    keys and values, if the layer has any, and return the memory.
    """
    heads = plan.num_heads
    if plan.rotation is not None:
        cos_sin = tables[plan.layer_type]
        is_of_halves = isinstance(plan.rotation, Rotation) and not plan.rotation.is_interleaved
        if memory.is_initialized and is_of_halves and plan.source is None and not plan.norms_last:
            memories = memory.keys, memory.values
            if can_rotate(rotated, values, cos_sin, memories):
                rotate_and_write(rotated, values, cos_sin, heads, memories, memory.lines)
                return memories
        dim = cos_sin[0].shape[-1]
        plan.rotation.rotate(rotated if dim == plan.head_dim else rotated[..., :dim], heads, cos_sin)
    if plan.has_norms and plan.norms_last:
        rotated.copy_(_normed(plan, rotated))
    return memory.write(rotated[:, heads:], values) if plan.source is None else (memory.keys, memory.values)


def _normed(plan: LayerPlan, states: torch.Tensor) -> torch.Tensor:
    """Return queries and keys `[N, heads + num_stored, head_dim]` after their norms."""
    parts = states[:, : plan.num_heads], states[:, plan.num_heads :]
    if not plan.norms_heads:
        parts = parts[0].flatten(1), parts[1].flatten(1)
    normed = [norm(part) for norm, part in zip((plan.query_norm, plan.key_norm), parts) if norm is not None]
    return torch.cat(normed, dim=1).view(states.shape)
