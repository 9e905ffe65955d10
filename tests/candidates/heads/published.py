"""Medusa heads as their authors' code computes and stores them, written down anew in plain torch."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

NUM_HEADS = 3


def random_heads(hidden: int, vocab: int, num_layers: int = 1, has_bias: bool = True, seed: int = 0):
    """Of every head: its residual layers (weight, bias), and its output."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(shape, generator=generator) / shape[-1] ** 0.5

    return [
        ([(normal(hidden, hidden), normal(hidden) if has_bias else None) for _ in range(num_layers)],
         normal(vocab, hidden))
        for _ in range(NUM_HEADS)
    ]  # fmt: skip


def logits_of(heads, states: torch.Tensor) -> torch.Tensor:
    """`[heads, B, vocab]`: `nn.Sequential(ResBlock, ..., nn.Linear)` for each head."""
    found = []
    for layers, output in heads:
        x = states
        for weight, bias in layers:
            y = x @ weight.T + (0 if bias is None else bias)
            x = x + y * torch.sigmoid(y)
        found.append(x @ output.T)
    return torch.stack(found)


def _pickled(heads, folder: Path) -> None:
    """`medusa_lm_head.pt`, with a config that names fewer heads than there are, as published ones do."""
    tensors = {}
    for head, (layers, output) in enumerate(heads):
        for number, (weight, bias) in enumerate(layers):
            tensors[f"{head}.{number}.linear.weight"] = weight
            if bias is not None:
                tensors[f"{head}.{number}.linear.bias"] = bias
        tensors[f"{head}.{len(layers)}.weight"] = output
    torch.save(tensors, folder / "medusa_lm_head.pt")
    config = {"medusa_num_heads": 2, "medusa_num_layers": len(heads[0][0]), "base_model_name_or_path": "someone/target"}
    (folder / "config.json").write_text(json.dumps(config))


def _safe(heads, folder: Path) -> None:
    _pickled(heads, folder)
    save_file(torch.load(folder / "medusa_lm_head.pt", weights_only=True), folder / "medusa_lm_head.safetensors")
    (folder / "medusa_lm_head.pt").write_bytes(b"not to be looked at")
    (folder / "config.json").unlink()


def _in_model(heads, folder: Path) -> None:
    """Beside the target's own tensors."""
    _pickled(heads, folder)
    own = torch.load(folder / "medusa_lm_head.pt", weights_only=True)
    (folder / "medusa_lm_head.pt").unlink()
    others = {"model.embed_tokens.weight": torch.zeros(4, 4), "0.0.linear.weight": torch.zeros(4, 4)}
    save_file({f"medusa_head.{name}": item for name, item in own.items()} | others, folder / "model.safetensors")


def _blocks(heads, folder: Path) -> None:
    tensors = {}
    for head, (layers, output) in enumerate(heads):
        for number, (weight, bias) in enumerate(layers):
            tensors[f"blocks.{head}.layers.{number}.weight"] = weight
            if bias is not None:
                tensors[f"blocks.{head}.layers.{number}.bias"] = bias
        tensors[f"lm_heads.{head}.weight"] = output
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"model_type": "medusa", "architectures": ["MedusaModel"]}))


LAYOUTS = {"pickled": _pickled, "safetensors": _safe, "in a model": _in_model, "blocks": _blocks}
