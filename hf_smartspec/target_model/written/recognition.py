"""Recognition of a model's plan, by the names and shapes of its modules."""

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from ..attention.tree_attention import layer_window
from ..compat import shared_value
from ..forward_code import mentions
from ..logits import LogitScaling
from .latent import Expansion, LatentPlan, is_expansion
from .layer_inputs import Factor, LayerInput, LayerInputs
from .mixed_mlps import MixedMLP
from .mlp_notes import MLPNotes
from .mlps import written_activation
from .modules import dropouts, path
from .names import (
    ACTIVATION,
    ALONE,
    ATTENTION,
    ATTENTION_OUTPUT,
    BY_HEAD,
    COMPRESS,
    EMBEDDING,
    EQUAL_VALUES,
    FINAL_NORM,
    IMAGE_NEWLINE,
    KEY_NORM,
    LATENT,
    LAYERS,
    MULTIPLIER,
    NORMED_EMBEDDINGS,
    NORMS,
    OUTPUT_GATES,
    POSITIONS,
    QUERY_KEY_VALUE,
    QUERY_NORM,
    QUERY_ONLY,
    RECURRENT,
    ROTARY,
    STATE_SPACE,
    VALUE_NORM,
)
from .norms import has_parameters
from .parts import Called, Map, Positions, Sinks
from .placeholders import placeholders_of
from .plan import DecoderPlan, LayerPlan, UnknownStructureError, absent
from .query_factors import QueryFactors, query_factors
from .recurrences import Recurrence, parts_of, recurrence_of
from .rotation_order import RotationOrder, rotation_order
from .rotations import written_rotation


def layers_of(decoder: Any) -> Any:
    """
    Return the layers of a decoder.

    Raises:
        UnknownStructureError: if it has none.
    """
    modules = {} if decoder is None else decoder._modules
    found = next((modules[name] for name in LAYERS if name in modules), None)
    if not isinstance(found, nn.ModuleList):
        raise UnknownStructureError("no list of layers")
    return found


def make_plan(model: PreTrainedModel) -> tuple[DecoderPlan, list[nn.Module]]:
    """
    Recognise the parts of a model. The model is not changed, and no hooks are called.

    Returns:
        `DecoderPlan`, and the modules below the model itself whose own forward is not called.

    Raises:
        UnknownStructureError: if a part of the decoder is of an unknown kind.
    """
    recognition = _Recognition(model)
    return recognition.plan(), list(dict.fromkeys(recognition.bypassed))


class _Recognition(MLPNotes):
    """Pass through a model."""

    def __init__(self, model: PreTrainedModel):
        super().__init__(model)
        self.query_factors: dict[tuple[type, int], QueryFactors | None] = {}  # by kind, and the id of their config

    def plan(self) -> DecoderPlan:
        decoder: Any = self.model.get_decoder()
        all_layers = layers_of(decoder)
        around = path(self.model, decoder)
        self._bypass(*around, decoder, all_layers, *dropouts(decoder.children()))
        self.known |= {id(module._parameters.get(IMAGE_NEWLINE)) for module in around}
        if getattr(self.config, "use_bidirectional_attention", None) in (True, "all"):
            raise UnknownStructureError("tokens attend to later ones")
        if getattr(self.config, "clip_qkv", None) is not None:
            raise UnknownStructureError("values are clipped")
        if getattr(decoder, "layerdrop", 0.0):
            raise UnknownStructureError("layers are left out in training")
        rotary, embedding = self._optional(decoder, ROTARY), self._first(decoder, EMBEDDING)
        self._know(embedding)
        positions = self._positions(decoder)
        layers = [self._layer(layer) for layer in all_layers[: self.config.num_hidden_layers]]
        _set_sources(layers)
        if rotary is None:
            for layer in layers:
                layer.rotation = None
        if rotary is None or "layer_type" not in inspect.signature(type(rotary).forward).parameters:
            for layer in layers:
                layer.layer_type = None
        norm, head = self._first(decoder, FINAL_NORM), self.model.get_output_embeddings()
        if head is None:
            raise UnknownStructureError("no head")
        plan = DecoderPlan(
            embedding=Called(embedding),
            embedding_multiplier=_embedding_multiplier(decoder, self.config),
            rotary=None if rotary is None else Called(rotary),
            rotary_types=tuple(dict.fromkeys(layer.layer_type for layer in layers if layer.rotation is not None)),
            layers=layers,
            final_norm=self._norm(norm),
            head=self._map([head]),
            logit_scaling=LogitScaling.of(self.model),
            laid_out=self.laid_out,
            calls_modules=self.calls_modules,
            positions=positions,
            layer_inputs=self._layer_inputs(decoder),
            placeholders=placeholders_of(self.model, around),
            embedding_norm=self._norm(norm) if type(decoder).__name__ in NORMED_EMBEDDINGS else None,
        )
        self._check_parameters(decoder, all_layers[len(layers) :])
        self._check_forwards(decoder, *self.bodies)
        return plan

    def _positions(self, decoder: nn.Module) -> Positions | None:
        module = self._optional(decoder, POSITIONS)
        if module is None:
            return None
        if not isinstance(module, nn.Embedding) or module.max_norm is not None:
            raise UnknownStructureError("embeddings of positions")
        self._know(module)
        self._bypass(module)
        self.bodies += [] if type(module) is nn.Embedding else [module]
        return Positions(module)

    def _layer(self, layer: Any) -> LayerPlan:
        is_alone = any(name in layer._modules for name in ALONE)
        if getattr(layer, "residual_in_fp32", False) and self.model.dtype.itemsize < 4:
            raise UnknownStructureError("sums in float32")
        if is_alone and not {*STATE_SPACE, *QUERY_KEY_VALUE[0]} & {*_own_names(self._first(layer, ALONE))}:
            return self._lone_mlp(layer)
        attention: Any = self._first(layer, (*RECURRENT, *ATTENTION, *ALONE))
        self._bypass(layer, attention)
        self.bodies += layer, attention
        names = next((row for row in NORMS if set(row) <= {None, *layer._modules}), None)
        if names is None or not getattr(layer, "do_layer_norm_before", True):
            raise UnknownStructureError("norms")
        norms = [None if name is None else self._norm_or_none(self._child(layer, name)) for name in names]
        is_recurrent = any(name in layer._modules for name in RECURRENT) or {*STATE_SPACE} <= {*attention._parameters}
        latent = self._latent(attention) if COMPRESS[0] in attention._modules else None
        recurrence = self._recurrence(attention) if is_recurrent else None
        maps = next((row for row in QUERY_KEY_VALUE if all(name in attention._modules for name in row)), None)
        if latent is not None:
            maps = COMPRESS
        if maps is None:
            raise UnknownStructureError("attention")
        query, key = self._optional(attention, QUERY_NORM), self._optional(attention, KEY_NORM)
        value = self._optional(attention, VALUE_NORM)
        heads = (0, 0, 0) if is_recurrent else self._heads(attention, latent)
        order = RotationOrder(False, False) if is_recurrent else rotation_order(attention, query)
        self._bypass(*dropouts(layer.modules()))
        config = getattr(attention, "config", self.config)
        window = getattr(attention, "sliding_window", shared_value(config, "sliding_window"))
        types, index = shared_value(config, "layer_types"), getattr(attention, "layer_idx", None)
        for norm in (query, key):
            if norm is not None and has_parameters(norm) and getattr(norm._parameters.get("weight"), "ndim", 0) != 1:
                raise UnknownStructureError("norms of heads")
        # Norms without a weight are told by the trial from those of all heads together.
        norms_heads = query is not None and (not has_parameters(query) or query.weight.numel() == heads[2])
        like = torch.empty(heads[2], dtype=self.model.dtype, device=self.model.device)
        if (maps == EQUAL_VALUES and None in (key, value)) or (value is not None and not norms_heads):
            raise UnknownStructureError("values")
        mlp = absent if is_alone else self._mlp(layer)
        if "experts" in layer._modules:
            mlp, norms[2] = self._mixed_mlp(layer, mlp, norms[2]), None
        is_parallel = names[1:] == (None, None, None) or getattr(layer, "use_parallel_residual", False)
        is_parallel = is_parallel and not is_alone
        multiplier = float(next((getattr(layer, name) for name in MULTIPLIER if hasattr(layer, name)), 1.0))
        if is_parallel and (norms[1] or norms[3] or multiplier != 1.0 or isinstance(mlp, MixedMLP)):
            raise UnknownStructureError("norms, factors or experts of parallel outputs")
        if maps == BY_HEAD and (query or key):
            raise UnknownStructureError("norms of heads")
        return LayerPlan(
            before_attention=norms[0],
            after_attention=norms[1],
            before_mlp=norms[2],
            after_mlp=norms[3],
            query_key_value=self._map([self._child(attention, name) for name in maps]),
            query_norm=None if query is None else self._norm(query, like),
            key_norm=None if key is None else self._norm(key, like),
            norms_heads=norms_heads,
            norms_last=order.norms_last,
            attention_output=self._map([self._first(attention, ATTENTION_OUTPUT)]),
            mlp=mlp,
            num_heads=heads[0],
            kv_heads=heads[1],
            head_dim=heads[2],
            scaling=1.0 if is_recurrent else float(getattr(attention, "scaling", heads[2] ** -0.5)),
            softcap=getattr(attention, "attn_logit_softcapping", None),
            window=layer_window(attention, window),
            rotation=written_rotation(attention) if order.rotates else None,
            layer_type=types[index] if types and index is not None else None,
            is_parallel=is_parallel,
            is_by_head=maps == BY_HEAD,
            multiplier=multiplier,
            has_gates=not is_recurrent and latent is None and self._has_gates(attention, heads),
            recurrence=recurrence,
            value_norm=None if value is None else self._norm(value, like),
            has_equal_values=maps == EQUAL_VALUES,
            source=-1 if maps == QUERY_ONLY else None,
            layer_input=self._layer_input(layer),
            factor=Factor(layer, "layer_scalar") if "layer_scalar" in layer._buffers else None,
            sinks=self._sinks(attention),
            latent=latent,
            output_gates=self._output_gates(attention, heads),
            query_factors=self.query_factors.setdefault((type(attention), id(config)), query_factors(attention)),
        )

    def _lone_mlp(self, layer: Any) -> LayerPlan:
        """Return the plan of a layer that is an MLP alone (Nemotron-H)."""
        self._bypass(layer)
        self.bodies.append(layer)
        return LayerPlan(
            before_attention=None,
            after_attention=None,
            before_mlp=self._norm(self._child(layer, "norm")),
            after_mlp=None,
            query_key_value=absent,
            query_norm=None,
            key_norm=None,
            norms_heads=False,
            attention_output=absent,
            mlp=self._mlp(layer),
            num_heads=0,
            kv_heads=0,
            head_dim=0,
            scaling=1.0,
            softcap=None,
            window=None,
            rotation=None,
            layer_type=None,
        )

    def _latent(self, attention: Any) -> LatentPlan:
        """Return the plan of attention to latents, of which keys and values are made."""
        config, expansion = attention.config, attention._modules.get("kv_b_proj")
        sizes = [getattr(attention, name) for name in ("qk_nope_head_dim", "v_head_dim", "qk_rope_head_dim")]
        down = attention._modules.get("q_a_proj")
        names = ("q_proj",) if down is None else ("q_b_proj",)
        is_plain = {*attention._modules} <= LATENT and not any(attention._parameters.values())
        is_plain = is_plain and "expand_kv" in mentions(type(attention))  # else caches hold keys and values
        if not is_plain or not is_expansion(expansion) or shared_value(config, "sliding_window") is not None:
            raise UnknownStructureError("attention to latents")
        self._know(expansion)
        self._bypass(expansion)
        return LatentPlan(
            down=None if down is None else self._map([down]),
            down_norm=None if down is None else self._norm(self._child(attention, "q_a_layernorm")),
            queries=self._map([self._child(attention, name) for name in names]),
            norm=self._norm(self._child(attention, "kv_a_layernorm")),
            expansion=Expansion(expansion, config.num_attention_heads, *sizes[:2]),
            turned_size=sizes[2],
        )

    def _sinks(self, attention: Any) -> Sinks | None:
        sinks = attention._parameters.get("sinks")
        self.known.add(id(sinks))
        return None if sinks is None else Sinks(attention)

    def _layer_inputs(self, decoder: Any) -> LayerInputs | None:
        """Return the inputs of layers beside hidden states (Gemma 4)."""
        size = getattr(decoder, "hidden_size_per_layer_input", None)
        if not size or "embed_tokens_per_layer" not in decoder._modules:
            return None
        embedding = self._child(decoder, "embed_tokens_per_layer")
        self._know(embedding)
        projection = self._map([self._child(decoder, "per_layer_model_projection")])
        norm = self._norm(self._child(decoder, "per_layer_projection_norm"))
        factors = float(decoder.per_layer_model_projection_scale), float(decoder.per_layer_input_scale)
        return LayerInputs(Called(embedding), projection, norm, factors, self.config.num_hidden_layers, size)

    def _layer_input(self, layer: Any) -> LayerInput | None:
        """Return what the layer adds last, from an input of its own."""
        if "per_layer_input_gate" not in layer._modules:
            return None
        names = "per_layer_input_gate", "per_layer_projection"
        gate, projection = (self._map([self._child(layer, name)]) for name in names)
        activation = self._first(layer, ACTIVATION)
        self._bypass(*([activation] if isinstance(activation, nn.Module) else []))
        norm = self._norm(self._child(layer, "post_per_layer_input_norm"))
        return LayerInput(gate, written_activation(activation), projection, norm)

    def _recurrence(self, module: Any) -> Recurrence:
        """Return the plan of what stands in place of attention, without its maps."""
        plan = recurrence_of(module, self.model.dtype)
        if plan is None:
            raise UnknownStructureError("recurrent layers")
        for item in parts_of(module, plan):
            self._bypass(item)
            self._know(item)
        self.known |= {id(parameter) for parameter in module._parameters.values()}
        return plan

    @staticmethod
    def _has_gates(attention: Any, heads: tuple[int, int, int]) -> bool:
        """Return whether the map of queries has as many outputs again, for gates (Qwen3.5, Qwen3-Next)."""
        outputs = getattr(getattr(attention, "q_proj", None), "out_features", 0)
        return outputs == 2 * heads[0] * heads[2]

    def _norm_or_none(self, module: nn.Module) -> Map | None:
        if type(module) is nn.Identity:
            self._bypass(module)
            return None
        return self._norm(module)

    def _output_gates(self, attention: Any, heads: tuple[int, int, int]) -> Map | None:
        """Return the map to gates of attention's outputs, if it has one (LFM3, AFMoE)."""
        module = attention._modules.get(OUTPUT_GATES.get(type(attention).__name__))
        if module is None:
            return None
        if getattr(module, "out_features", None) not in (heads[0], heads[0] * heads[2]):
            raise UnknownStructureError("gates")
        return self._map([module])

    def _heads(self, attention: Any, latent: LatentPlan | None = None) -> tuple[int, int, int]:
        """Return the numbers of heads and key/value heads, and the dimensions of each."""
        config = getattr(attention, "config", self.config)
        if latent is not None:
            return latent.expansion.heads, 1, latent.expansion.rank
        num_heads, size = config.num_attention_heads, self._optional(attention, ("head_dim", "head_size"))
        kv_heads = shared_value(config, "num_key_value_heads")
        if not kv_heads:  # layers may differ (Gemma 4)
            kv_heads = num_heads // getattr(attention, "num_key_value_groups", 1)
        if any(name in attention._modules for name in ("c_attn", *BY_HEAD)):  # whatever the config says
            kv_heads = num_heads
        if not isinstance(size, int):
            raise UnknownStructureError("heads")
        return num_heads, kv_heads, size


def _own_names(module: nn.Module) -> list[str]:
    return [*module._modules, *module._parameters]


def _embedding_multiplier(decoder: Any, config: Any) -> float:
    if "mup_enabled" in mentions(type(decoder)):  # AFMoE
        return float(config.hidden_size**0.5) if config.mup_enabled else 1.0
    return float(getattr(decoder, "embedding_multiplier", 1.0))


def _set_sources(layers: Sequence[LayerPlan]) -> None:
    """Set the numbers of the layers whose keys and values others attend to: the last of their type that stores any."""
    found: dict[str | None, int] = {}
    for index, layer in enumerate(layers):
        if layer.source is None:
            found[layer.layer_type] = index
        elif layer.layer_type not in found:
            raise UnknownStructureError("keys and values")
        else:
            layer.source = found[layer.layer_type]
