"""EAGLE's heads (Li et al., arXiv 2401.15077 and 2406.16858; EAGLE-3: arXiv 2503.01840): mostly one decoder layer."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from threading import Lock
from typing import Any
from weakref import WeakMethod

import torch
from torch import nn
from torch.nn.functional import embedding
from transformers import LlamaConfig, PreTrainedModel
from transformers.activations import ACT2FN
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from ....cpu.program import DTYPES
from ....cpu.quantized import Int8Linear
from ....cpu.quantized.product import has_right_kernels
from ....cpu.tensor_checks import has_sums_of_bits, sums_of_bits, version_of
from ....target_model.drafters.features import FeatureStep, Layers
from ....target_model.logits import LogitScaling
from ....target_model.written.decoder import WrittenDecoder
from ....target_model.written.inputs import Features
from ....target_model.written.parts import MLP, Called, Fused, Halves, Map, RMSNorm, written_activation, written_map
from ....target_model.written.plan import DecoderPlan, FeaturePlan, LayerPlan
from ....target_model.written.watch import Watch
from ..learned import FeatureDrafter
from .config import window_of
from .files import check_shapes, numbered, read, write

_lock = Lock()
_LEAST_ROUNDED = 2**20  # weights; fewer stay in a core's cache
_QUERY_KEY_VALUE, _GATE_UP = ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")


class EagleHeads(FeatureDrafter):
    """
    Decoder layers over tokens and features, mostly one. From the embedding e of the next token and the feature f the
    first computes, in EAGLE-1 and 2, whose features are the target's last hidden states after the final norm,

        x = fc [e, f]            h = layer(x)                              logits = head h

    and in EAGLE-3, whose features are f = fc [hidden states of some layers],

        x = [norm e, norm' f]    a = f + attention(x)    h = a + mlp(norm'' a)    logits = head norm''' h

    Further layers are a Llama's. h of the last one is the feature that further tokens of a draft go on from. Files of
    EAGLE-3.1 may have norms of the hidden states, of all (`norm_before_fc`) or of each (`fc_norm`), add to norm' f in
    place of f (`norm_before_residual`), and pass on norm''' h in place of h (`norm_output`). Those of P-EAGLE (arXiv
    2602.01469) have a `mask_hidden`, in place of hidden states that are not known: see `ParallelCandidates`.

    Args:
        config (`LlamaConfig`): Sizes of the layers.
        tensors (mapping of `str` to `torch.Tensor`): Weights and biases under the names of `files`.
        hidden_layers (sequence of `int`): See `TreeCandidateGenerator.hidden_layers`.
        target (`PreTrainedModel`): Lends its embeddings and its head, where there are none of the heads' own.

    Raises:
        ValueError: for tensors that are missing, or do not fit the target.
    """

    config: Any  # LlamaConfig, whose sizes are all filled in
    label = "eagle"

    def __init__(
        self,
        config: LlamaConfig,
        tensors: Mapping[str, torch.Tensor],
        hidden_layers: Sequence[int],
        target: PreTrainedModel,
    ):
        super().__init__()
        sizes = target.config.get_text_config(decoder=True)
        self.config, self.hidden_layers = config, tuple(hidden_layers)
        self.target_size, self.vocab_size = sizes.hidden_size, sizes.vocab_size
        check_shapes(config, tensors, len(self.hidden_layers), sizes)
        self.num_layers = config.num_hidden_layers
        names = {name.rpartition(".")[0] for name in tensors} - {""}
        self.parts = nn.ModuleDict({name: _module(tensors, name, config.rms_norm_eps) for name in sorted(names)})
        ids = tensors.get("d2t")
        self.register_buffer("token_ids", None if ids is None else ids.long() + torch.arange(len(ids)))
        mask = tensors.get("mask_hidden")
        self.mask_hidden = None if mask is None else nn.Parameter(mask.reshape(1, -1))
        if self.is_third:
            self.label = "eagle3" if mask is None else "peagle"
        # Read here, since configs take longer to look anything up than a norm takes.
        self._norms_residual = bool(getattr(config, "norm_before_residual", False))
        self._norms_output = bool(getattr(config, "norm_output", False))
        self._activation = ACT2FN[config.hidden_act]  # kept here, since written-out heads hold it weakly
        # The target's own are no part of this module: they move, and are saved, with the target.
        self._target_parts = target.get_input_embeddings(), target.get_output_embeddings()
        self._written: _WrittenHeads | None = None
        self._may_round = True  # until weights change, which those that are learnt do again and again

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without the written-out heads, whose programs hold addresses of these weights."""
        return self.__dict__ | {"_written": None}

    @classmethod
    def from_pretrained(
        cls, name: str | Path, target: PreTrainedModel, hidden_layers: Sequence[int] | None = None
    ) -> "EagleHeads":
        """
        Read the published files of a folder or hub id, of EAGLE's authors, SpecForge or speculators.

        Args:
            hidden_layers (sequence of `int`, *optional*): Hidden states that EAGLE-3 reads (2: the input of decoder
                layer 2), where the config lacks them or has wrong ones.

        Raises:
            ValueError: if the files hold no such heads, or such for another target.
        """
        config, tensors, layers = read(name, target, hidden_layers)
        try:
            heads = cls(config, tensors, layers, target)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
        return heads._placed(name, target).requires_grad_(False)

    def save_pretrained(self, folder: str | Path, **config: Any) -> None:
        """Write `model.safetensors` and `config.json`, with further entries, as the authors' own."""
        write(folder, self.config, self._tensors(), self.hidden_layers, self.vocab_size, config)

    @property
    def dtype(self) -> torch.dtype:
        return self.part("o_proj").weight.dtype

    @property
    def device(self) -> torch.device:
        return self.part("o_proj").weight.device

    @property
    def is_third(self) -> bool:
        """Return whether these are heads of EAGLE-3."""
        return "hidden_norm" in self.parts

    def part(self, name: str, layer: int = 0) -> Any:
        return self.parts[numbered(name, layer)]

    def _tensors(self) -> dict[str, torch.Tensor]:
        """Return all tensors under the names that the constructor takes."""
        tensors = {name.removeprefix("parts."): item for name, item in self.parts.state_dict().items()}
        ids, mask = self.token_ids, self.mask_hidden
        tensors |= {} if mask is None else {"mask_hidden": mask[None]}  # [1, 1, D], as in published files
        return tensors if ids is None else tensors | {"d2t": ids - torch.arange(len(ids), device=ids.device)}

    def check_fit(self, target: PreTrainedModel) -> None:
        sizes = target.config.get_text_config(decoder=True)
        if self.vocab_size != sizes.vocab_size:
            raise ValueError(f"Heads of a target of {self.vocab_size} tokens do not fit one of {sizes.vocab_size}.")
        check_shapes(self.config, self._tensors(), len(self.hidden_layers), sizes)

    # What the heads compute

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return embeddings `[..., hidden_size]` of tokens `[...]`."""
        if "embed_tokens" in self.parts:
            return embedding(tokens, self.part("embed_tokens").weight)
        own: Any = self._target_parts[0]
        return own(tokens.to(own.weight.device)).to(self.part("o_proj").weight)  # its device and dtype

    def combine(self, states: torch.Tensor) -> torch.Tensor:
        """Return features `[N, hidden_size]` of the target's hidden states `[N, layers * target's hidden_size]`."""
        if not self.is_third:
            return states
        if norms := self._states_norms:
            states = torch.cat([norm(part) for norm, part in zip(norms, states.chunk(len(norms), dim=-1))], dim=-1)
        return self.part("fc")(states)

    @property
    def _states_norms(self) -> list[nn.RMSNorm]:
        """Return the norm of all hidden states, or of each, or none."""
        names = ["input_norm", *(numbered("fc_norm", number) for number in range(len(self.hidden_layers)))]
        return [self.parts[name] for name in names if name in self.parts]  # type: ignore[misc]

    def inputs(self, embeds: torch.Tensor, features: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """
        Return the input of attention, `[..., 2 * hidden_size]` (EAGLE-1: half as wide), and the residual that its
        output is added to.
        """
        if self.is_third:
            normed = self.part("hidden_norm")(features)
            residual = normed if self._norms_residual else features
            return torch.cat([self.part("input_layernorm")(embeds), normed], dim=-1), residual
        x = self.part("fc")(torch.cat([embeds, features], dim=-1))
        return x, x

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return logits `[M, own vocab]` of the last layer's outputs `[M, hidden_size]`."""
        if "norm" in self.parts and not self._norms_output:
            hidden = self.part("norm")(hidden)
        logits: torch.Tensor = self.output(hidden)
        return logits

    @property
    def output(self) -> nn.Module:
        """The output layer: the heads' own, or the target's."""
        return self.part("lm_head") if "lm_head" in self.parts else self._target_parts[1]

    def layer_output(self, hidden: torch.Tensor, layer: int) -> torch.Tensor:
        """Return a layer's output for the sum of residual and attention."""
        normed = self.part("post_attention_layernorm", layer)(hidden)
        gate, up = (self.part(name, layer)(normed) for name in _GATE_UP)
        hidden = hidden + self.part("down_proj", layer)(self._activation(gate) * up)
        return self.part("norm")(hidden) if self._norms_output and layer == self.num_layers - 1 else hidden

    def rotary(self) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
        """Return a function from positions `[1, N]` to cosines and sines, like a model's own."""
        return LlamaRotaryEmbedding(self.config).to(self.device)

    def layers(self) -> Layers:
        if self._written is not None and not self._written.is_unchanged(thoroughly=True):
            self._written, self._may_round = None, False
        self._write_out()  # now rather than in a step: a GPU's host waits for what is copied to it
        return self._run

    def _run(self, features: Features, step: FeatureStep) -> tuple[torch.Tensor, torch.Tensor]:
        may_wait, step.cache.has_new_rows = not step.cache.has_new_rows, False
        return self._write_out(may_wait)(features, step)

    def _write_out(self, may_wait: bool = False) -> "_WrittenHeads":
        """Return the written-out heads, which are made anew where weights have moved; see `Watch` for `may_wait`."""
        written = self._written
        if written is None or not written.is_unchanged(may_wait=may_wait):
            with _lock:  # laying weights side by side frees memory whose addresses another thread's program may hold
                written = self._written
                if written is None or not written.is_unchanged():
                    self._may_round = self._may_round and written is None
                    written = self._written = _WrittenHeads(self)
        return written


_Rounded = dict[nn.Module, Int8Linear] | None  # copies of linear layers in int8, where the heads run in int8


class _WrittenHeads:
    """
    The heads written out as a decoder, as long as their weights stay where they are. Where they run in int8, they do so
    by copies of their weights, as long as these stay as they are.
    """

    def __init__(self, heads: EagleHeads):
        self._rounded: _Rounded = {} if _run_in_int8(heads) else None
        self._decoder = WrittenDecoder(_plan(heads, self._rounded))
        self._copied: list[Any] = [module.weight for module in self._rounded or ()]
        self._versions, self._sums = self._look(), self._look_closely()
        # Number of the hidden states that are further features.
        self._feature = -1 if heads._norms_output else heads.num_layers
        self.watch = Watch(heads, [heads.parts, *heads.parts.values(), heads.output, heads._target_parts[0]])

    def _look(self) -> list[int]:
        """Return the numbers of changes in place of the weights that were copied."""
        return [version_of(weight) for weight in self._copied]

    def _look_closely(self) -> list[torch.Tensor]:
        """Return sums of the bits of these weights, for changes that torch does not count."""
        return [sums_of_bits(weight) for weight in self._copied if has_sums_of_bits(weight)]

    def is_unchanged(self, thoroughly: bool = False, may_wait: bool = False) -> bool:
        """See `Watch.is_unchanged`."""
        if not self.watch.is_unchanged(thoroughly, may_wait) or self._look() != self._versions:
            return False
        return not thoroughly or all(map(torch.equal, self._look_closely(), self._sums))

    def __call__(self, features: Features, step: FeatureStep) -> tuple[torch.Tensor, torch.Tensor]:
        states: dict[int, torch.Tensor] = {}
        logits = self._decoder(step.layout, step.cache, states.__setitem__, {self._feature}, features)
        return step.kept(states[self._feature]), logits


def _run_in_int8(heads: EagleHeads) -> bool:
    """
    Return whether heads run in int8: those of a target in int8, and on a CPU that multiplies int8 all but small ones,
    since a level takes as long as reading its weights, and the target judges what they draft.
    """
    if isinstance(heads._target_parts[1], Int8Linear):
        return True
    num = sum(part.weight.numel() for part in heads.parts.values())  # type: ignore[operator,misc]
    is_served = heads.device.type == "cpu" and heads.dtype in DTYPES and has_right_kernels(heads.dtype)
    return heads._may_round and num >= _LEAST_ROUNDED and is_served


def _plan(heads: EagleHeads, rounded: _Rounded) -> DecoderPlan:
    output = _in_int8(heads.output, rounded) if "lm_head" in heads.parts else heads.output  # the target's is large
    own, embed = heads._target_parts[0], WeakMethod(heads.embed)
    looks_up = "embed_tokens" not in heads.parts and type(own) is nn.Embedding
    is_alike = looks_up and (own.weight.dtype, own.weight.device) == (heads.dtype, heads.device)
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
        embedding=Called(own) if is_alike else lambda tokens: embed()(tokens),  # type: ignore[misc]
        embedding_multiplier=1.0,
        rotary=heads.rotary(),
        rotary_types=(None,),
        layers=[_layer_plan(heads, rounded, layer) for layer in range(heads.num_layers)],
        final_norm=_norm(heads, "norm") or nn.Identity(),
        head=head,
        logit_scaling=LogitScaling(),
        fused=[],
        calls_modules=isinstance(head, Called),
        features=features,
    )


def _layer_plan(heads: EagleHeads, rounded: _Rounded, layer: int) -> LayerPlan:
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
        rotation=Halves(),
        layer_type=None,
    )


def _map(heads: EagleHeads, rounded: _Rounded, layer: int, *names: str) -> Map:
    written = written_map([_in_int8(heads.part(name, layer), rounded) for name in names])
    if isinstance(written, Fused):
        written.lay_side_by_side()
    return written


def _in_int8(module: nn.Module, rounded: _Rounded) -> nn.Module:
    """Return the module, or its copy in int8, which is added to `rounded`."""
    if rounded is None or type(module) is not nn.Linear:
        return module
    rounded[module] = Int8Linear(module.weight, module.bias)
    return rounded[module]


def _norm(heads: EagleHeads, name: str, layer: int = 0) -> RMSNorm | None:
    return _written_norm(heads, heads.part(name, layer)) if numbered(name, layer) in heads.parts else None


def _written_norm(heads: EagleHeads, norm: nn.Module) -> RMSNorm:
    return RMSNorm(norm, heads.config.rms_norm_eps, is_shifted=False)


def _module(tensors: Mapping[str, torch.Tensor], name: str, eps: float) -> nn.Module:
    """Return a linear map, or a norm where the weight has one dimension."""
    weight, bias = tensors[f"{name}.weight"], tensors.get(f"{name}.bias")
    module: nn.Module
    if weight.dim() == 1:
        module = nn.RMSNorm(len(weight), eps, device="meta")
    else:
        module = nn.Linear(weight.shape[1], weight.shape[0], bias is not None, device="meta")
        if bias is not None:
            module.bias = nn.Parameter(bias)
    module.weight = nn.Parameter(weight)
    return module
