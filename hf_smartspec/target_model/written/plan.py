"""The plan of a decoder: the roles of a model's modules, recognised by their names and shapes."""

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from ..attention.tree_attention import layer_window
from ..compat import shared_value
from ..forward_code import foreign_code, mentions, unknown_mentions
from ..logits import LogitScaling
from .delta import MAPS, DeltaPlan, delta_plan
from .mlps import MLP, CalledMLP, written_activation
from .norms import written_norm
from .parts import Called, Fused, Halves, Map, OwnRotation, is_plain_map, written_map, written_rotation

# Names of layers' norms: before attention, after it, before the MLP, after it. The first row that fits counts.
_NORMS = (
    ("input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm"),  # GLM 4
    ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"),  # Gemma
    (None, "post_attention_layernorm", None, "post_feedforward_layernorm"),  # OLMo 2
    ("input_layernorm", None, "post_attention_layernorm", None),  # Llama
    ("input_layernorm", None, None, None),  # Cohere, Phi: attention and MLP side by side
)
_QUERY_KEY_VALUE = (("q_proj", "k_proj", "v_proj"), ("qkv_proj",))
_ATTENTION_OUTPUT = ("o_proj", "dense")
_QUERY_NORM, _KEY_NORM = ("q_norm", "q_layernorm"), ("k_norm", "k_layernorm")
_MLP = (
    (("gate_proj", "up_proj"), "down_proj"),
    (("gate_up_proj",), "down_proj"),
    (("up_proj",), "down_proj"),
    (("c_fc",), "c_proj"),
    (("fc1",), "fc2"),
)
_MLPS = ("mlp", "block_sparse_moe", "feed_forward")
_ACTIVATION = ("act_fn", "activation_fn", "act")
_FINAL_NORM = ("norm", "final_layernorm")


# Attributes of modules and configs that are read here, beside those that forwards mention.
READ = frozenset(
    "attn_logit_softcapping clip_qkv embedding_multiplier eps final_logit_softcapping head_dim is_sliding layer_idx "
    "layer_types logit_scale logits_scaling num_attention_heads num_hidden_layers num_key_value_heads "
    "residual_multiplier scaling sliding_window use_rope variance_epsilon".split()
)


class UnknownStructureError(Exception):
    """Error for a model with parts that a plan cannot describe, or that computes otherwise than planned."""


@dataclass(eq=False)
class LayerPlan:
    """
    Plan of one layer. Norms are None where it has none; a layer without any norm before its MLP runs attention and MLP
    in parallel.
    """

    before_attention: Map | None
    after_attention: Map | None
    before_mlp: Map | None
    after_mlp: Map | None
    query_key_value: Map
    query_norm: Map | None
    key_norm: Map | None
    norms_heads: bool  # whether each head is normalized on its own
    attention_output: Map
    mlp: Map
    num_heads: int
    kv_heads: int
    head_dim: int
    scaling: float
    softcap: float | None
    window: int | None
    rotation: Halves | OwnRotation | None
    layer_type: str | None  # selects rotary embeddings, where types differ
    is_parallel: bool = False
    multiplier: float = 1.0  # of the outputs of attention and MLP
    has_gates: bool = False  # whether every head's query is followed by a gate of its output, before a sigmoid
    delta: DeltaPlan | None = None  # in place of attention


@dataclass(eq=False)
class FeaturePlan:
    """
    Plan of the input of heads that continue from features. From the embedding e of a token and the feature f before it,

        x = f    attention reads [embedding_norm e, feature_norm f]

    or, with a map of both, x = both [e, f], which attention reads, too.

    Args:
        states_norms (sequence of `Callable`): Norms of the target's hidden states, which lie side by side: one of all
            numbers, one of each state, or none.
        states_map (`Callable`, *optional*): Map from these to features; without a map, the states are features.
        adds_normed (`bool`): Whether x is `feature_norm f`.
    """

    states_norms: Sequence[Any]
    states_map: Map | None
    embedding_norm: Map | None
    feature_norm: Map | None
    both: Map | None
    adds_normed: bool


@dataclass(eq=False)
class DecoderPlan:
    """
    Plan of a causal language model, or of heads that continue from its features.

    Args:
        fused (`list`): Layers whose weights can be laid side by side.
        calls_modules (`bool`): Whether some modules, beside embeddings, are called as they are.
        features (`FeaturePlan`, *optional*): Input of the first layer, for heads.
    """

    embedding: Map
    embedding_multiplier: float
    rotary: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    rotary_types: tuple[str | None, ...]
    layers: list[LayerPlan]
    final_norm: Map
    head: Map
    logit_scaling: LogitScaling
    fused: list[Fused]
    calls_modules: bool = False
    features: FeaturePlan | None = None


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


class _Recognition:
    """Pass through a model, with notes of the modules that the plan bypasses and the parameters that it uses."""

    def __init__(self, model: PreTrainedModel):
        self.model: Any = model
        self.config: Any = model.config.get_text_config(decoder=True)
        self.bypassed: list[nn.Module] = []
        self.known: set[int] = set()  # parameters, by id
        self.bodies: list[nn.Module] = []  # layers, their attention and their MLPs
        self.fused: list[Fused] = []
        self.calls_modules = False

    def plan(self) -> DecoderPlan:
        decoder: Any = self.model.get_decoder()
        if decoder is None or not isinstance(getattr(decoder, "layers", None), nn.ModuleList):
            raise UnknownStructureError("no list of layers")
        self._bypass(*_path(self.model, decoder), decoder, decoder.layers)
        if getattr(self.config, "clip_qkv", None) is not None:
            raise UnknownStructureError("values are clipped")
        rotary, embedding = self._child(decoder, "rotary_emb"), self._called(decoder, "embed_tokens")
        layers = [self._layer(layer) for layer in decoder.layers[: self.config.num_hidden_layers]]
        takes_types = "layer_type" in inspect.signature(type(rotary).forward).parameters
        if not takes_types:
            for layer in layers:
                layer.layer_type = None
        norm, head = self._first(decoder, _FINAL_NORM), self.model.get_output_embeddings()
        if head is None:
            raise UnknownStructureError("no head")
        plan = DecoderPlan(
            embedding=Called(embedding),
            embedding_multiplier=float(getattr(decoder, "embedding_multiplier", 1.0)),
            rotary=Called(rotary),
            rotary_types=tuple(dict.fromkeys(layer.layer_type for layer in layers if layer.rotation is not None)),
            layers=layers,
            final_norm=self._norm(norm),
            head=self._map([head]),
            logit_scaling=LogitScaling.of(self.model),
            fused=self.fused,
            calls_modules=self.calls_modules,
        )
        self._check_parameters(decoder, decoder.layers[len(layers) :])
        self._check_forwards(decoder, *self.bodies)
        return plan

    def _layer(self, layer: Any) -> LayerPlan:
        is_recurrent = "linear_attn" in layer._modules
        attention: Any = self._child(layer, "linear_attn" if is_recurrent else "self_attn")
        mlp = self._first(layer, _MLPS)
        self._bypass(layer, attention)
        self.bodies += layer, attention
        names = next((row for row in _NORMS if set(row) <= {None, *layer._modules}), None)
        if names is None:
            raise UnknownStructureError("norms")
        norms = [None if name is None else self._norm(self._child(layer, name)) for name in names]
        delta = self._delta(attention) if is_recurrent else None
        maps = (
            MAPS
            if delta
            else next((names for names in _QUERY_KEY_VALUE if all(name in attention._modules for name in names)), None)
        )
        if maps is None:
            raise UnknownStructureError("attention")
        query, key = self._optional(attention, _QUERY_NORM), self._optional(attention, _KEY_NORM)
        heads = (0, 0, 0) if delta else self._heads(attention)
        self._bypass(*(module for module in layer.modules() if isinstance(module, nn.Dropout)))
        config = getattr(attention, "config", self.config)
        window = getattr(attention, "sliding_window", shared_value(config, "sliding_window"))
        types, index = shared_value(config, "layer_types"), getattr(attention, "layer_idx", None)
        return LayerPlan(
            before_attention=norms[0],
            after_attention=norms[1],
            before_mlp=norms[2],
            after_mlp=norms[3],
            query_key_value=self._map([self._child(attention, name) for name in maps]),
            query_norm=None if query is None else self._norm(query),
            key_norm=None if key is None else self._norm(key),
            norms_heads=query is not None and query.weight.numel() == heads[2],
            attention_output=self._map([self._first(attention, ("out_proj",) if delta else _ATTENTION_OUTPUT)]),
            mlp=self._mlp(mlp),
            num_heads=heads[0],
            kv_heads=heads[1],
            head_dim=heads[2],
            scaling=1.0 if delta else float(getattr(attention, "scaling", heads[2] ** -0.5)),
            softcap=getattr(attention, "attn_logit_softcapping", None),
            window=layer_window(attention, window),
            rotation=written_rotation(attention) if not delta and _rotates(attention) else None,
            layer_type=types[index] if types and index is not None else None,
            is_parallel=names[1:] == (None, None, None),
            multiplier=float(getattr(layer, "residual_multiplier", 1.0)),
            has_gates=not delta and self._has_gates(attention, heads),
            delta=delta,
        )

    def _delta(self, module: Any) -> DeltaPlan:
        """Return the plan of a gated delta rule, without its maps."""
        # Of GPUs, bfloat16 has not been tried out.
        dtypes = (torch.float32, torch.bfloat16) if self.model.device.type == "cpu" else (torch.float32,)
        plan = delta_plan(module) if self.model.dtype in dtypes else None
        if plan is None:
            raise UnknownStructureError("recurrent layers")
        self._bypass(module.conv1d, module.norm)
        for item in (module.conv1d, module.norm):
            self._know(item)
        self.known |= {id(module.A_log), id(module.dt_bias)}
        return plan

    @staticmethod
    def _has_gates(attention: Any, heads: tuple[int, int, int]) -> bool:
        """Return whether the map of queries has as many outputs again, for gates (Qwen3.5, Qwen3-Next)."""
        outputs = getattr(getattr(attention, "q_proj", None), "out_features", 0)
        return outputs == 2 * heads[0] * heads[2]

    def _heads(self, attention: Any) -> tuple[int, int, int]:
        """Return the numbers of heads and key/value heads, and the dimensions of each."""
        config = getattr(attention, "config", self.config)
        num_heads, size = config.num_attention_heads, getattr(attention, "head_dim", None)
        kv_heads = shared_value(config, "num_key_value_heads") or num_heads
        if not isinstance(size, int):
            raise UnknownStructureError("heads")
        return num_heads, kv_heads, size

    def _mlp(self, mlp: nn.Module) -> Map:
        """Return an MLP of a known kind; others, such as mixtures of experts, are called as they are."""
        names = next((row for row in _MLP if {*row[0], row[1]} <= set(mlp._modules)), None)
        activation = self._optional(mlp, _ACTIVATION)
        if names is None or activation is None or len(list(mlp.children())) > len(names[0]) + 2:
            self._know(mlp)
            self.calls_modules = True
            return CalledMLP(mlp)
        inputs, output = names
        self.bodies.append(mlp)
        self._bypass(mlp, *([activation] if isinstance(activation, nn.Module) else []))
        fused = self._map([self._child(mlp, name) for name in inputs])
        is_gated = inputs[0] in ("gate_proj", "gate_up_proj")
        return MLP(fused, written_activation(activation), self._map([self._child(mlp, output)]), is_gated)

    # Notes

    def _bypass(self, *modules: nn.Module) -> None:
        self.bypassed += modules

    def _know(self, module: nn.Module) -> None:
        self.known |= {id(parameter) for parameter in module.parameters()}

    def _norm(self, module: nn.Module) -> Map:
        self._know(module)
        norm = written_norm(module)
        if isinstance(norm, Called):
            self.calls_modules = True
        else:
            self._bypass(module)
        return norm

    def _map(self, modules: Sequence[nn.Module]) -> Map:
        for module in modules:
            self._know(module)
        self._bypass(*filter(is_plain_map, modules))
        self.calls_modules |= not all(map(is_plain_map, modules))
        written = written_map(modules)
        self.fused += [written] if isinstance(written, Fused) else []
        return written

    def _child(self, module: nn.Module, name: str) -> nn.Module:
        child = module._modules.get(name)
        if child is None:
            raise UnknownStructureError(name)
        return child

    def _called(self, module: nn.Module, name: str) -> nn.Module:
        self._know(self._child(module, name))
        return self._child(module, name)

    def _first(self, module: nn.Module, names: Sequence[str]) -> Any:
        found = self._optional(module, names)
        if found is None:
            raise UnknownStructureError(" or ".join(names))
        return found

    @staticmethod
    def _optional(module: nn.Module, names: Sequence[str]) -> Any:
        return next((found for name in names if (found := getattr(module, name, None)) is not None), None)

    def _check_forwards(self, *known: nn.Module) -> None:
        """Refuse modules whose forward has code that the plan does not reproduce."""
        foreign = foreign_code({type(module) for module in (self.model, *self.bypassed)})
        if reason := foreign or unknown_mentions({type(module) for module in known}):
            raise UnknownStructureError(reason)

    def _check_parameters(self, decoder: nn.Module, unused: Sequence[nn.Module]) -> None:
        """Refuse a decoder with parameters that the plan does not use."""
        left = {id(parameter) for parameter in decoder.parameters()} - self.known
        left -= {id(parameter) for layer in unused for parameter in layer.parameters()}
        if left or any(id(item) not in self.known for item in _own_parameters([self.model, *self.bypassed])):
            raise UnknownStructureError("further parameters")


def _rotates(attention: Any) -> bool:
    """Return whether queries and keys are rotated; those of EXAONE 4's layers without a window are not."""
    is_global = "is_sliding" in mentions(type(attention)) and not attention.is_sliding
    return getattr(attention, "use_rope", True) and not (is_global and attention.sliding_window is not None)


def _path(model: nn.Module, decoder: nn.Module) -> list[nn.Module]:
    """Return the modules between a model and its decoder."""
    return [module for module in model.modules() if module not in (model, decoder) and decoder in module.modules()]


def _own_parameters(modules: Sequence[nn.Module]) -> Iterator[torch.Tensor]:
    """Yield the parameters that modules with children have themselves (scales, sinks, ...)."""
    for module in modules:
        if module._modules:
            yield from (parameter for parameter in module._parameters.values() if parameter is not None)
