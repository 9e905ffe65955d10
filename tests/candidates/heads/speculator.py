"""MLP speculators as their authors' code computes and stores them, written down anew in plain torch."""

import json
import math
from pathlib import Path

import torch
from safetensors.torch import save_file

NUM_STEPS = 3


def random_speculator(hidden: int, vocab: int, inner: int = 24, is_tied: bool = False, seed: int = 0):
    """Of every step: embedding, projection, norm (scale, shift), head."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(shape, generator=generator) / shape[-1] ** 0.5

    steps = [
        (normal(vocab, inner), normal(inner, hidden if number == 0 else inner), (1 + normal(inner), normal(inner)),
         normal(vocab, inner) * 3)
        for number in range(NUM_STEPS)
    ]  # fmt: skip
    if is_tied:
        first, second = steps[0], steps[1]
        steps = [(first[0], (first if number == 0 else second)[1], *first[2:]) for number in range(NUM_STEPS)]
    return steps


def logits_along(steps, state: torch.Tensor, tokens, scales_input: bool = False) -> list[torch.Tensor]:
    """Of one request: the logits `[vocab]` behind each of the tokens `[<= steps]`, the state `[hidden]` before them."""
    if scales_input:
        state = state / math.sqrt(state.square().mean() + 1e-6) / math.sqrt(2)
    state_weight = 2.0 ** (-0.5 / len(steps))
    found = []
    for (table, projection, (scale, shift), head), token in zip(steps, tokens):
        token_weight = math.sqrt((1 - state_weight**2) * len(scale) / 2)
        sum_ = projection @ state + table[token] * token_weight / state_weight
        x = sum_ / math.sqrt(sum_.square().mean() + 1e-6) * scale + shift
        state = x * 0.5 * (1 + torch.erf(x / math.sqrt(2)))
        found.append(head @ state)
    return found


def write(steps, folder: Path, scales_input: bool = False, is_tied: bool = False, stores_tied: bool = False) -> None:
    """Files of the published layout; tied weights once, or, with `stores_tied`, for every step."""
    tensors = {}
    for number, (table, projection, (scale, shift), head) in enumerate(steps):
        once = {"emb": {"weight": table}, "ln": {"weight": scale, "bias": shift}, "head": {"weight": head}}
        parts = ({} if is_tied and number and not stores_tied else once) | {"proj": {"weight": projection}}
        if is_tied and number > 1 and not stores_tied:
            parts = {}
        tensors |= {
            f"speculator.{part}.{number}.{name}": item.clone()
            for part, items in parts.items()
            for name, item in items.items()
        }
    save_file(tensors, folder / "model.safetensors")
    vocab, inner = steps[0][0].shape
    config = {
        "architectures": ["MLPSpeculatorPreTrainedModel"],
        "model_type": "mlp_speculator",
        "n_predict": len(steps),
        "emb_dim": steps[0][1].shape[1],
        "inner_dim": inner,
        "vocab_size": vocab,
        "tie_weights": is_tied,
        "scale_input": scales_input,
        "n_candidates": 5,
        "top_k_tokens_per_head": [4, 3, 2],
    }
    (folder / "config.json").write_text(json.dumps(config))
