"""EAGLE's heads written out as a decoder, in int8 where that drafts faster."""

from typing import Any
from weakref import WeakMethod

import torch
from torch import nn

from ....cpu.kernels.norms import PLAIN
from ....cpu.program import DTYPES
from ....cpu.quantized import Int8Linear
from ....cpu.quantized.product import has_right_kernels
from ....cpu.tensor_checks import has_sums_of_bits, sums_of_bits, version_of
from ....target_model.cache.free_memory import free_bytes
from ....target_model.drafters.features import FeatureStep
from ....target_model.logits import LogitScaling
from ....target_model.written.decoder import WrittenDecoder
from ....target_model.written.inputs import Features
from ....target_model.written.mlps import MLP, written_activation
from ....target_model.written.norms import Norm
from ....target_model.written.parts import Called, Fused, Map, written_map
from ....target_model.written.plan import DecoderPlan, FeaturePlan, LayerPlan
from ....target_model.written.rotations import Rotation
from ....target_model.written.watch import Watch
from .config import window_of
from .files import numbered

Heads = Any  # an `EagleHeads`, whose module imports this one
_LEAST_ROUNDED = 2**20  # weights; fewer stay in a core's cache
_MOST_MEMORY = 0.5  # of the free memory that copies take
_QUERY_KEY_VALUE, _GATE_UP = ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")
_Rounded = dict[nn.Module, Int8Linear] | None  # copies of linear layers in int8, where the heads run in int8


class WrittenHeads:
    """
    Heads of EAGLE written out as a decoder, as long as their weights stay where they are. Where they run in int8, they
    do so by copies of their weights, as long as these stay as they are.
    """

    def __init__(self, heads: Heads):
        self.kind, in_int8 = (heads.dtype, heads.device), _run_in_int8(heads)
        self._copied = [item for layer in _linear_layers(heads) for item in layer.parameters()] if in_int8 else []
        # First, since another thread may change weights meanwhile.
        self._versions, self._bits = self._look(), self._look_closely()
        self._rounded: _Rounded = {} if in_int8 else None
        self._decoder = WrittenDecoder(_plan(heads, self._rounded))
        # Number of the hidden states that are further features.
        self._feature = -1 if heads._norms_output else heads.num_layers
        self.watch = Watch(heads, [heads.parts, *heads.parts.values(), heads.output, heads._target_parts[0]])

    def _look(self) -> list[int]:
        """Return the numbers of changes in place of what was copied."""
        return [version_of(item) for item in self._copied]

    def _look_closely(self) -> list[torch.Tensor]:
        """Return sums of the bits of what was copied, or small ones as they are, for changes torch does not count."""
        return [_bits_of(item) for item in self._copied]

    def is_unchanged(self, thoroughly: bool = False, may_wait: bool = False) -> bool:
        """See `Watch.is_unchanged`; changes in place, by torch's count, are noticed at once."""
        if not self.watch.is_unchanged(thoroughly, may_wait) or self._look() != self._versions:
            return False
        self._decoder.look_at_copies(thoroughly)
        return not thoroughly or all(map(torch.equal, self._look_closely(), self._bits))

    def __call__(self, features: Features, step: FeatureStep) -> tuple[torch.Tensor, torch.Tensor]:
        states: dict[int, torch.Tensor] = {}
        logits = self._decoder(step.layout, step.cache, states.__setitem__, {self._feature}, features)
        return step.kept(states[self._feature]), logits


def _run_in_int8(heads: Heads) -> bool:
    """
    Return whether heads run in int8: those of a target in int8, and on a CPU that multiplies int8 all but small ones,
    since a level takes as long as reading its weights, and the target judges what they draft.
    """
    if isinstance(heads._target_parts[1], Int8Linear):
        return True
    weights = [layer.weight for layer in _linear_layers(heads)]
    num = sum(weight.numel() for weight in weights)
    return (
        heads._may_round
        and heads.device.type == "cpu"
        and heads.dtype in DTYPES
        and not any(weight.is_inference() for weight in weights)  # whose changes torch does not count
        and _LEAST_ROUNDED <= num <= _MOST_MEMORY * free_bytes(heads.device)
        and has_right_kernels(heads.dtype)
    )


def _linear_layers(heads: Heads) -> list[nn.Linear]:
    """Return the heads' own linear layers."""
    own = [(name, part) for name, part in heads.parts.items() if name != "embed_tokens"]
    return [part for _, part in own if isinstance(part, nn.Linear)]


def _bits_of(parameter: torch.Tensor) -> torch.Tensor:
    """Return what differs where the bits of a weight or a bias do."""
    if parameter.dim() == 2 and parameter.is_contiguous() and has_sums_of_bits(parameter):
        return sums_of_bits(parameter)
    return parameter.detach().clone()


def _plan(heads: Heads, rounded: _Rounded) -> DecoderPlan:
    # A copy of the target's own output layer would take much memory.
    output = _in_int8(heads.output, rounded) if "lm_head" in heads.parts else heads.output
    is_third, head = heads.is_third, written_map([output])
    features = FeaturePlan(
        states_norms=[_written_norm(heads, norm) for norm in heads._states_norms],
        states_map=_map(heads, rounded, 0, "fc") if is_third else None,
        embedding_norm=_norm(heads, "input_layernorm"),
        feature_norm=_norm(heads, "hidden_norm"),
        both=None if is_third else _map(heads, rounded, 0, "fc"),
        adds_normed=heads._norms_residual,
    )
    return DecoderPlan(
        embedding=_embedding(heads),
        embedding_multiplier=1.0,
        rotary=heads.rotary(),
        rotary_types=(None,),
        layers=[_layer_plan(heads, rounded, layer) for layer in range(heads.num_layers)],
        final_norm=_norm(heads, "norm") or nn.Identity(),
        head=head,
        logit_scaling=LogitScaling(),
        laid_out=[],
        calls_modules=isinstance(head, Called),
        features=features,
    )


def _embedding(heads: Heads) -> Map:
    """Return the target's embeddings as they are where heads would only call them, which takes longer."""
    own, embed = heads._target_parts[0], WeakMethod(heads.embed)
    is_own = "embed_tokens" in heads.parts or type(own) is not nn.Embedding
    if not is_own and (own.weight.dtype, own.weight.device) == (heads.dtype, heads.device):
        return Called(own)
    return lambda tokens: embed()(tokens)  # type: ignore[misc]


def _layer_plan(heads: Heads, rounded: _Rounded, layer: int) -> LayerPlan:
    config = heads.config
    activation = written_activation(heads._activation)
    inputs, output = _map(heads, rounded, layer, *_GATE_UP), _map(heads, rounded, layer, "down_proj")
    mlp = MLP(inputs, activation, output, is_gated=True)
    return LayerPlan(
        before_attention=_norm(heads, "input_layernorm", layer) if layer else None,  # the first has a `FeaturePlan`
        after_attention=None,
        before_mlp=_norm(heads, "post_attention_layernorm", layer),
        after_mlp=None,
        query_key_value=_map(heads, rounded, layer, *_QUERY_KEY_VALUE),
        query_norm=_norm(heads, "q_norm", layer),
        key_norm=_norm(heads, "k_norm", layer),
        norms_heads=True,
        attention_output=_map(heads, rounded, layer, "o_proj"),
        mlp=mlp,
        num_heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        scaling=config.head_dim**-0.5,
        softcap=None,
        window=window_of(config, layer),
        rotation=Rotation(),
        layer_type=None,
    )


def _map(heads: Heads, rounded: _Rounded, layer: int, *names: str) -> Map:
    written = written_map([_in_int8(heads.part(name, layer), rounded) for name in names])
    if isinstance(written, Fused):
        written.lay_out()
    return written


def _in_int8(module: nn.Module, rounded: _Rounded) -> nn.Module:
    """Return the module, or its copy in int8, which is added to `rounded`."""
    if rounded is None or type(module) is not nn.Linear:
        return module
    rounded[module] = Int8Linear(module.weight, module.bias)
    return rounded[module]


def _norm(heads: Heads, name: str, layer: int = 0) -> Norm | None:
    return _written_norm(heads, heads.part(name, layer)) if numbered(name, layer) in heads.parts else None


def _written_norm(heads: Heads, norm: nn.Module) -> Norm:
    return Norm(norm, heads.config.rms_norm_eps, PLAIN)
