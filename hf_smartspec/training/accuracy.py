"""Top-k accuracy of drafters on held-out texts."""

from collections.abc import Callable, Iterator, Sequence

import torch

from .texts import Text, collate

TOP = (1, 3, 8)

# From ids and labels `[rows, length]`, yields for each token of a draft the drafter's likeliest tokens
# `[n, up to max(TOP)]`, the likeliest first, and the right ones `[n]`.
Guesses = Callable[[torch.Tensor, torch.Tensor], Iterator[tuple[torch.Tensor, torch.Tensor]]]


def accuracy(
    guesses: Guesses, num_tokens: int, texts: Sequence[Text], max_length: int, batch_size: int, device: torch.device
) -> list[dict[int, float]]:
    """
    Return, for each of `num_tokens` tokens of a draft, the share of places where the right token is among the drafter's
    1, 3 or 8 likeliest.
    """
    hits, counts = torch.zeros(num_tokens, len(TOP)), torch.zeros(num_tokens)
    for start in range(0, len(texts), batch_size):
        batch = collate([item.example(max_length) for item in texts[start : start + batch_size]])
        ids, labels = (batch[name].to(device) for name in ("input_ids", "labels"))
        for place, (best, wanted) in enumerate(guesses(ids, labels)):
            right = best == wanted[:, None]
            hits[place] += torch.stack([right[:, :num].any(1).sum() for num in TOP]).cpu()
            counts[place] += len(wanted)
    return [dict(zip(TOP, row)) for row in (hits / counts[:, None].clamp(min=1)).tolist()]


def likeliest(logits: torch.Tensor) -> torch.Tensor:
    """Return the likeliest tokens `[n, up to max(TOP)]` by logits `[n, vocab]`, the likeliest first."""
    return logits.topk(min(max(TOP), logits.shape[-1]), dim=-1).indices
