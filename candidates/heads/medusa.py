"""Medusa heads (Cai et al., arXiv 2401.10774): each predicts the token so many places behind the next one."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn
from torch.nn.functional import linear, silu
from transformers import PreTrainedModel

from .files import CONFIG, config_of, folder_of, read_tensors
from .learned import LearnedDrafter

_PREFIXES = ("medusa_head.", "medusa_heads.", "model.medusa_head.")  # of whole models
_OWN_HEADS = re.compile(r"(\d+)\.(\d+)\.(?:linear\.)?(weight|bias)")  # head, layer
_BLOCKS = re.compile(r"blocks\.(\d+)\.layers\.(\d+)\.(weight|bias)")
_OUTPUTS = re.compile(r"lm_heads?\.(?:(\d+)\.)?weight")


class MedusaHeads(LearnedDrafter):
    """
    K heads over the last hidden state behind the target's final norm. Head k computes

        x <- x + silu(W x + b)    for each of its residual layers, then    logits = U x

    Args:
        blocks (list of lists of (weight, bias)): Residual layers of every head, weights `[hidden, hidden]`.
        outputs (list of `torch.Tensor` of shape `[vocab, hidden]`): One for each head, or one for all.
        ids (`torch.Tensor` of shape `[vocab]`, *optional*): The token that each output stands for, where these are
            fewer than the target has.
        shares_output (`bool`): The output is the target's own.
    """

    def __init__(
        self,
        blocks: list[list[tuple[torch.Tensor, torch.Tensor | None]]],
        outputs: list[torch.Tensor],
        ids: torch.Tensor | None = None,
        shares_output: bool = False,
    ):
        super().__init__()
        self.name_or_path, self.shares_output = "", shares_output
        self.blocks = nn.ModuleList(nn.ModuleList(_linear(*layer) for layer in layers) for layers in blocks)
        self.outputs = nn.ParameterList(nn.Parameter(output, requires_grad=False) for output in outputs)
        self.register_buffer("ids", ids)

    @property
    def num_heads(self) -> int:
        return len(self.blocks)

    @property
    def dtype(self) -> torch.dtype:
        return self.outputs[0].dtype

    @property
    def device(self) -> torch.device:
        return self.outputs[0].device

    @torch.no_grad()
    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """Logits `[B, K, vocab]` from hidden states `[B, hidden]`."""
        if len(self.outputs) > 1:
            return torch.stack([self.logits_of(head, states) for head in range(self.num_heads)], dim=1)
        x = torch.stack([self._states_of(head, states) for head in range(self.num_heads)], dim=1)
        return linear(x.to(self.dtype), self.outputs[0])  # which is read once for all

    def logits_of(self, head: int, states: torch.Tensor) -> torch.Tensor:
        """One head's logits `[B, vocab]`."""
        output = self.outputs[head if len(self.outputs) > 1 else 0]
        return linear(self._states_of(head, states).to(output.dtype), output)

    def _states_of(self, head: int, states: torch.Tensor) -> torch.Tensor:
        """What the head's output is multiplied with, `[B, hidden]`."""
        x, layers = states, self.blocks[head]
        for layer in layers:  # type: ignore[attr-defined]
            x = x + silu(layer(x))
        return x

    def best(self, states: torch.Tensor, num: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The likeliest tokens of every head, best first, and their probabilities: `[B, K, num]` each."""
        logits = self(states.to(device=self.device, dtype=self.dtype)).float()
        best = logits.topk(min(num, logits.shape[-1]), dim=-1)
        probs = (best.values - logits.logsumexp(dim=-1, keepdim=True)).exp()
        tokens: Any = self.ids
        return best.indices if tokens is None else tokens[best.indices], probs

    def save_pretrained(self, folder: str | Path, **config: Any) -> None:
        """
        Writes `model.safetensors` and `config.json`, with further entries. The target's own output is not written.
        """
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        tensors: dict[str, torch.Tensor] = {}
        blocks: Any = self.blocks
        for head, layers in enumerate(blocks):
            for number, layer in enumerate(layers):
                tensors |= {f"blocks.{head}.layers.{number}.{name}": item for name, item in layer.state_dict().items()}
        if not self.shares_output:
            tensors |= {f"lm_heads.{head}.weight": item for head, item in enumerate(self.outputs)}
        ids: Any = self.ids
        tensors |= {} if ids is None else {"token_map": ids}
        save_file({name: item.detach().contiguous() for name, item in tensors.items()}, folder / "model.safetensors")
        sizes = {
            "medusa_num_heads": self.num_heads,
            "medusa_num_layers": len(blocks[0]),
            "hidden_size": self.outputs[0].shape[1],
            "vocab_size": self.outputs[0].shape[0],
            "original_lm_head": self.shares_output,
        }
        content = {"model_type": "medusa", "architectures": ["MedusaModel"]} | sizes | config
        (folder / CONFIG).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")

    @classmethod
    def from_pretrained(cls, name: str | Path, target: PreTrainedModel) -> "MedusaHeads":
        """
        Reads the published files of a folder or hub id: `medusa_lm_head.pt` or `.safetensors`, heads within a whole
        model, or blocks with outputs of their own or the target's. How many heads there are is read from the tensors,
        not from the config.

        Raises:
            ValueError: if the files hold no Medusa heads, or such for another target.
        """
        tensors = _without_prefix(read_tensors(folder_of(name)))
        blocks = _blocks(tensors)
        if not blocks:
            raise ValueError(f"{name} holds no Medusa heads: its tensors are named {sorted(tensors)[:5]} ...")
        own = _own_outputs(tensors)
        heads = cls(blocks, own or [_output_of(target)], _token_ids(tensors), shares_output=not own)
        heads.name_or_path = str(name)
        heads.check_fit(target)
        output: Any = target.get_output_embeddings()
        return heads.to(device=output.weight.device, dtype=target.dtype)

    def check_fit(self, target: PreTrainedModel) -> None:
        """Raises `ValueError` unless the heads are of this target's sizes."""
        config = target.config.get_text_config(decoder=True)
        hidden, vocab, name = config.hidden_size, config.vocab_size, self.name_or_path or "these heads"
        blocks: Any = self.blocks
        shapes = {tuple(layer.weight.shape) for layers in blocks for layer in layers}
        if not all(map(len, blocks)) or shapes - {(hidden, hidden)}:
            raise ValueError(f"{name}: residual layers {sorted(shapes)} do not fit a target of hidden size {hidden}.")
        sizes = {tuple(output.shape) for output in self.outputs}
        if any(width != hidden or num > vocab for num, width in sizes) or len(self.outputs) not in (1, self.num_heads):
            raise ValueError(
                f"{name}: {len(self.outputs)} output weights {sorted(sizes)} of {self.num_heads} heads do not fit a "
                f"target of hidden size {hidden} and {vocab} tokens."
            )
        ids: Any = self.ids
        if ids is not None and (len(ids) != len(self.outputs[0]) or not 0 <= int(ids.min()) <= int(ids.max()) < vocab):
            raise ValueError(f"{name}: `token_map` of {len(ids)} tokens does not fit {len(self.outputs[0])} outputs.")


def says_medusa(name: str, config: Mapping[str, Any] | None = None) -> bool:
    """Whether a folder or hub id says that it holds Medusa heads: by its config, or by the name of its file."""
    config = config_of(name) if config is None else config
    kinds = [str(config.get("model_type", "")), *map(str, config.get("architectures") or ())]
    says_so = "medusa_num_heads" in config or any("medusa" in kind.lower() for kind in kinds)
    return says_so or any(Path(name).glob("medusa_lm_head.*"))


def _linear(weight: torch.Tensor, bias: torch.Tensor | None) -> nn.Linear:
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias is not None, device="meta")
    layer.weight = nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        layer.bias = nn.Parameter(bias, requires_grad=False)
    return layer


def _without_prefix(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The heads' own tensors of a whole model, as they are named without it."""
    for prefix in _PREFIXES:
        if any(name.startswith(prefix) for name in tensors):
            return {name.removeprefix(prefix): item for name, item in tensors.items() if name.startswith(prefix)}
    return dict(tensors)


def _blocks(tensors: Mapping[str, torch.Tensor]) -> list[list[tuple[torch.Tensor, torch.Tensor | None]]]:
    """Weight and bias of the residual layers of each head."""
    found: dict[tuple[int, int], dict[str, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        match = _BLOCKS.fullmatch(name) or (_OWN_HEADS.fullmatch(name) if ".linear." in name else None)
        if match:
            found.setdefault((int(match[1]), int(match[2])), {})[match[3]] = tensor
    if incomplete := [place for place, tensor in found.items() if "weight" not in tensor]:
        raise ValueError(f"Medusa heads without the weight of layer {incomplete[0][1]} of head {incomplete[0][0]}.")
    num_heads = 1 + max([head for head, _ in found], default=-1)
    layers = [sorted(layer for number, layer in found if number == head) for head in range(num_heads)]
    return [
        [(found[head, layer]["weight"], found[head, layer].get("bias")) for layer in own]
        for head, own in enumerate(layers)
    ]


def _own_outputs(tensors: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
    """Of each head, or one of all; none where these use the target's."""
    for pattern in (_OWN_HEADS, _OUTPUTS):
        own = {
            int(match[1] or 0): tensor
            for name, tensor in tensors.items()
            if ".linear." not in name and (match := pattern.fullmatch(name))
        }
        if own:
            return [own[head] for head in sorted(own)]
    return []


def _output_of(target: PreTrainedModel) -> torch.Tensor:
    embeddings: Any = target.get_output_embeddings()
    if not embeddings.weight.is_floating_point():
        raise ValueError("The heads use the target's own output, which is quantized: take heads that have outputs.")
    output: torch.Tensor = embeddings.weight.detach()
    return output


def _token_ids(tensors: Mapping[str, torch.Tensor]) -> torch.Tensor | None:
    ids = tensors.get("token_map")
    return None if ids is None else ids.long()
