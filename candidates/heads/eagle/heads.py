"""EAGLE's heads (Li et al., arXiv 2401.15077 and 2406.16858; EAGLE-3: arXiv 2503.01840): mostly one decoder layer."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from threading import Lock
from typing import Any

import torch
from torch import nn
from torch.nn.functional import embedding
from transformers import LlamaConfig, PreTrainedModel
from transformers.activations import ACT2FN
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from ....target_model.drafters.features import FeatureStep, Layers
from ....target_model.written.inputs import Features
from ..learned import FeatureDrafter
from .files import check_shapes, numbered, read, write
from .written import WrittenHeads

_lock = Lock()


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
        self._written: WrittenHeads | None = None
        self._may_round = True  # until they change: those that learn do so again and again, and rounding takes long

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
        gate, up = (self.part(name, layer)(normed) for name in ("gate_proj", "up_proj"))
        hidden = hidden + self.part("down_proj", layer)(self._activation(gate) * up)
        return self.part("norm")(hidden) if self._norms_output and layer == self.num_layers - 1 else hidden

    def rotary(self) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
        """Return a function from positions `[1, N]` to cosines and sines, like a model's own."""
        return LlamaRotaryEmbedding(self.config).to(self.device)

    def layers(self) -> Layers:
        self._write_out(thoroughly=True)  # now rather than in a step: a GPU's host waits for what is copied to it
        return self._run

    def _run(self, features: Features, step: FeatureStep) -> tuple[torch.Tensor, torch.Tensor]:
        may_wait, step.cache.has_new_rows = not step.cache.has_new_rows, False
        return self._write_out(may_wait=may_wait)(features, step)

    def _write_out(self, thoroughly: bool = False, may_wait: bool = False) -> WrittenHeads:
        """Return the written-out heads, which are made anew where weights have moved; see `Watch` for the arguments."""
        written = self._written
        if written is None or not written.is_unchanged(thoroughly, may_wait):
            with _lock:  # laying weights side by side frees memory whose addresses another thread's program may hold
                written = self._written
                if written is None or not written.is_unchanged(thoroughly):
                    if written is not None and written.kind == (self.dtype, self.device):
                        self._may_round = False
                    written = self._written = WrittenHeads(self)
        return written


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
