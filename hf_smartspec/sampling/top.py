"""The best tokens of every line of scores, found faster on CPUs than by torch."""

from typing import NamedTuple

import numpy as np
import torch

from ..device import fetch_together

_BLOCK = 128  # tokens whose maximum is taken first
_LINES = 8  # converted to float32 at a time


def argmax(scores: torch.Tensor) -> list[int]:
    """Return the arg max of every line of `[rows, vocab_size]`; ties go to the lowest token, as in `torch.argmax`."""
    if scores.device.type == "cpu":
        # numpy's arg max is vectorised, torch's on the CPU is not: 6 times faster for 40 lines of 32,000. A few lines
        # at a time, so that converted lines are still in the cache.
        parts = [scores] if scores.dtype == torch.float32 else scores.split(_LINES)
        return [token for part in parts for token in part.float().numpy().argmax(axis=-1).tolist()]
    return _rounded(scores).argmax(dim=-1).tolist()


def _rounded(scores: torch.Tensor) -> torch.Tensor:
    """Round scores in float64 to float32, as `generate` does without speculation."""
    return scores.float() if scores.dtype == torch.float64 else scores


def top_tokens(scores: torch.Tensor, count: int) -> torch.Tensor:
    """
    Return the `count` best tokens of every line of `[rows, vocab_size]`, best first (all, if there are fewer), int64
    `[rows, count]`. On a CPU, `torch.topk` runs only on those blocks of the vocabulary with the highest maxima, since
    block maxima are vectorised and `topk` is not.
    """
    num_rows, vocab_size = scores.shape
    num_blocks = vocab_size // _BLOCK
    if scores.device.type != "cpu" or count >= num_blocks:
        return scores.topk(min(count, vocab_size), dim=-1).indices
    maxima = scores[:, : num_blocks * _BLOCK].unflatten(1, (num_blocks, _BLOCK)).amax(dim=-1)
    blocks = maxima.topk(count, dim=-1).indices
    tokens = (blocks[:, :, None] * _BLOCK + torch.arange(_BLOCK)).flatten(1)
    rest = torch.arange(num_blocks * _BLOCK, vocab_size).expand(num_rows, -1)
    tokens = torch.cat([tokens, rest], dim=1)
    return tokens.gather(1, scores.gather(1, tokens).topk(count, dim=-1).indices)


class Top(NamedTuple):
    """
    Best tokens of lines of scores.

    Args:
        argmax (list of `int`): Best token of every line; ties go to the lowest token. Empty if not asked for.
        tokens (`np.ndarray` of shape `[rows, count]`, integers): The best tokens of the first lines, best first.
        shares (`np.ndarray` of shape `[rows, count]`, float32): Probabilities of `tokens`, normalised over these alone.
    """

    argmax: list[int]
    tokens: np.ndarray
    shares: np.ndarray


def best_of(scores: torch.Tensor, count: int, num_lines: int, with_argmax: bool) -> Top:
    """
    Return the `count` best tokens of the first `num_lines` lines of `[rows, vocab_size]`, and the arg max of every
    line, with one wait for their device.
    """
    first = scores[:num_lines]
    tokens = top_tokens(first, count)
    shares = first.gather(1, tokens).float().softmax(dim=-1)
    if scores.device.type == "cpu" or not with_argmax:
        return Top(argmax(scores) if with_argmax else [], *fetch_together([tokens, shares]))
    best, *top = fetch_together([_rounded(scores).argmax(dim=-1), tokens, shares])
    return Top(best.tolist(), *top)


def likeliest_tokens(scores: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Return the `count` best tokens of every line of `[rows, vocab_size]` (float32), best first, and their probabilities,
    both `[rows, count]`. No device is waited for.
    """
    if count == 1:
        on_cpu = scores.device.type == "cpu"
        tokens = torch.tensor(argmax(scores))[:, None] if on_cpu else scores.argmax(dim=-1, keepdim=True)
    else:
        tokens = top_tokens(scores, count)
    # torch has one fused kernel for softmax, which is cheaper than the best scores and a log-sum-exp.
    return tokens, scores.softmax(dim=-1).gather(1, tokens)
