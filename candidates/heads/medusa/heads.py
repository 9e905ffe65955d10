"""Medusa heads (Cai et al., arXiv 2401.10774): head k predicts the token k places after the next one."""

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

from ..files import CONFIG, check_numbers, config_of, folder_of, kinds_of, read_tensors
from ..learned import LearnedDrafter

_PREFIXES = ("medusa_head.", "medusa_heads.", "model.medusa_head.")  # of whole models
_OWN_HEADS = re.compile(r"(\d+)\.(\d+)\.(?:linear\.)?(weight|bias)")  # head, layer
_BLOCKS = re.compile(r"blocks\.(\d+)\.layers\.(\d+)\.(weight|bias)")
_OUTPUTS = re.compile(r"lm_heads?\.(?:(\d+)\.)?weight")
_OWN = re.compile(r"(\d+|blocks|lm_heads?)\..*")  # and scales of quantized ones


class MedusaHeads(LearnedDrafter):
    """
    K heads over the last hidden state after the target's final norm. Head k computes

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
        self.shares_output = shares_output
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
        """Return logits `[B, K, vocab]` for hidden states `[B, hidden]`."""
        if len(self.outputs) > 1:
            return torch.stack([self.logits_of(head, states) for head in range(self.num_heads)], dim=1)
        x = torch.stack([self._states_of(head, states) for head in range(self.num_heads)], dim=1)
        return linear(x.to(self.dtype), self.outputs[0])  # which is read once for all

    def logits_of(self, head: int, states: torch.Tensor) -> torch.Tensor:
        """Return one head's logits `[B, vocab]`."""
        output = self.outputs[head if len(self.outputs) > 1 else 0]
        return linear(self._states_of(head, states).to(output.dtype), output)

    def _states_of(self, head: int, states: torch.Tensor) -> torch.Tensor:
        """Return the input of a head's output layer, `[B, hidden]`."""
        x, layers = states, self.blocks[head]
        for layer in layers:  # type: ignore[attr-defined]
            x = x + silu(layer(x))
        return x

    def best(self, states: torch.Tensor, num: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the likeliest tokens of every head, best first, and their probabilities: `[B, K, num]` each."""
        logits = self(states.to(device=self.device, dtype=self.dtype)).float()
        best = logits.topk(min(num, logits.shape[-1]), dim=-1)
        probs = (best.values - logits.logsumexp(dim=-1, keepdim=True)).exp()
        tokens: Any = self.ids
        return best.indices if tokens is None else tokens[best.indices], probs

    def save_pretrained(self, folder: str | Path, **config: Any) -> None:
        """Write `model.safetensors` and `config.json`, with further entries. The target's own output is not written."""
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
        Read the published files of a folder or hub id: `medusa_lm_head.pt` or `.safetensors`, heads within a whole
        model, or blocks with outputs of their own or the target's. The number of heads is read from the tensors, not
        from the config, which may name fewer.

        Raises:
            ValueError: if the files hold no Medusa heads, not all of them, or such for another target.
        """
        tensors = _without_prefix(read_tensors(folder_of(name)))
        try:
            blocks, own = _parts(tensors, config_of(str(name)))
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
        heads = cls(blocks, own or [_output_of(target)], _token_ids(tensors), shares_output=not own)
        return heads._placed(name, target)

    def check_fit(self, target: PreTrainedModel) -> None:
        """Raise `ValueError` unless the heads have this target's sizes."""
        config = target.config.get_text_config(decoder=True)
        hidden, vocab, name = config.hidden_size, config.vocab_size, self.name_or_path or "these heads"
        blocks: Any = self.blocks
        shapes = {tuple(layer.weight.shape) for layers in blocks for layer in layers}
        if not all(map(len, blocks)) or shapes - {(hidden, hidden)}:
            raise ValueError(f"{name}: residual layers {sorted(shapes)} do not fit a target of hidden size {hidden}.")
        sizes = {tuple(output.shape) for output in self.outputs}
        is_right = len(sizes) == 1 and len(self.outputs) in (1, self.num_heads)
        if not is_right or any(width != hidden or num > vocab for num, width in sizes):
            raise ValueError(
                f"{name}: {len(self.outputs)} output weights {sorted(sizes)} of {self.num_heads} heads do not fit a "
                f"target of hidden size {hidden} and {vocab} tokens."
            )
        ids: Any = self.ids
        if ids is None and not self.shares_output and (num := len(self.outputs[0])) < vocab:
            raise ValueError(f"{name}: outputs of {num} tokens lack a `token_map`, which names those of {vocab}.")
        if ids is not None and (len(ids) != len(self.outputs[0]) or not 0 <= int(ids.min()) <= int(ids.max()) < vocab):
            raise ValueError(f"{name}: `token_map` of {len(ids)} tokens does not fit {len(self.outputs[0])} outputs.")


def is_medusa_checkpoint(name: str, config: Mapping[str, Any] | None = None) -> bool:
    """Return whether a folder or hub id holds Medusa heads, by its config or by the name of its file."""
    config = config_of(name) if config is None else config
    is_named = "medusa_num_heads" in config or any("medusa" in kind for kind in kinds_of(config))
    return is_named or any(Path(name).glob("medusa_lm_head.*"))


def _linear(weight: torch.Tensor, bias: torch.Tensor | None) -> nn.Linear:
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias is not None, device="meta")
    layer.weight = nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        layer.bias = nn.Parameter(bias, requires_grad=False)
    return layer


def _without_prefix(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the heads' own tensors out of those of a whole model, under their names without it."""
    for prefix in _PREFIXES:
        if any(name.startswith(prefix) for name in tensors):
            return {name.removeprefix(prefix): item for name, item in tensors.items() if name.startswith(prefix)}
    return dict(tensors)


def _parts(
    tensors: Mapping[str, torch.Tensor], config: Mapping[str, Any]
) -> tuple[list[list[tuple[torch.Tensor, torch.Tensor | None]]], list[torch.Tensor]]:
    """Return residual layers and outputs, see `_blocks` and `_own_outputs`."""
    check_numbers({name: item for name, item in tensors.items() if _OWN.fullmatch(name)})
    blocks = _blocks(tensors)
    if not blocks:
        raise ValueError(f"it holds no Medusa heads: its tensors are named {sorted(tensors)[:5]} ...")
    key = "num_heads" if config.get("model_type") == "medusa" and "num_heads" in config else "medusa_num_heads"
    wanted = config.get(key)
    if isinstance(wanted, int) and wanted > len(blocks):
        raise ValueError(f"it holds {len(blocks)} Medusa heads, and `{key}` is {wanted}")
    return blocks, _own_outputs(tensors, len(blocks), len(blocks[0]))


def _blocks(tensors: Mapping[str, torch.Tensor]) -> list[list[tuple[torch.Tensor, torch.Tensor | None]]]:
    """
    Return weight and bias of the residual layers of each head.

    Raises:
        ValueError: unless all heads have the same layers.
    """
    found: dict[tuple[int, int], dict[str, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        match = _BLOCKS.fullmatch(name) or (_OWN_HEADS.fullmatch(name) if ".linear." in name else None)
        if match:
            found.setdefault((int(match[1]), int(match[2])), {})[match[3]] = tensor
    num_heads, num_layers = (1 + max([place[item] for place in found], default=-1) for item in (0, 1))
    needed = {kind for layer in found.values() for kind in layer} | {"weight"}
    for head in range(num_heads):
        for layer in range(num_layers):
            if missing := needed - found.get((head, layer), {}).keys():
                raise ValueError(f"Medusa heads lack the {max(missing)} of layer {layer} of head {head}")
    return [
        [(found[head, layer]["weight"], found[head, layer].get("bias")) for layer in range(num_layers)]
        for head in range(num_heads)
    ]


def _own_outputs(tensors: Mapping[str, torch.Tensor], num_heads: int, num_layers: int) -> list[torch.Tensor]:
    """
    Return the output of each head, or one of all heads; an empty list where these use the target's.

    Raises:
        ValueError: for outputs of some heads only.
    """
    for pattern in (_OWN_HEADS, _OUTPUTS):
        own = {
            int(match[1] or 0): (tensor, int(match[2]) if pattern is _OWN_HEADS else num_layers)
            for name, tensor in tensors.items()
            if ".linear." not in name and (match := pattern.fullmatch(name))
        }
        is_one = pattern is _OUTPUTS and set(own) == {0}
        if own and not is_one and set(own) != set(range(num_heads)):
            raise ValueError(f"of {num_heads} Medusa heads, there are outputs of {sorted(own)} only")
        if wrong := [head for head, (_, layer) in own.items() if layer != num_layers]:
            raise ValueError(f"the output of Medusa head {wrong[0]} does not follow its {num_layers} layers")
        if own:
            return [own[head][0] for head in sorted(own)]
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
