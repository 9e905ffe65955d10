"""The best tokens of every line of scores, found faster on CPUs than by torch."""

from typing import NamedTuple

import numpy as np
import torch

from ..device import fetch_together
from .kernels.best import find_best, find_likeliest

# Bits of infinity, and integers as wide as the scores.
_BITS = {
    torch.float32: (0x7F800000, torch.int32),
    torch.bfloat16: (0x7F80, torch.int16),
    torch.float16: (0x7C00, torch.int16),
}


def argmax(scores: torch.Tensor) -> list[int]:
    """Return the arg max of every line of `[rows, vocab_size]`; ties go to the lowest token, as in `torch.argmax`."""
    scores = _rounded(scores)
    if _is_compiled(scores):
        return _best(scores, 1)[:, 0].tolist()
    return scores.argmax(dim=-1).tolist()


def _rounded(scores: torch.Tensor) -> torch.Tensor:
    """Round scores in float64 to float32, as `generate` does without speculation."""
    return scores.float() if scores.dtype == torch.float64 else scores


def top_tokens(scores: torch.Tensor, count: int) -> torch.Tensor:
    """
    Return the `count` best tokens of every line of `[rows, vocab_size]`, best first (all, if there are fewer), int64
    `[rows, count]`.
    """
    count = min(count, scores.shape[1])
    if _is_compiled(scores):
        return torch.from_numpy(_best(scores, count))
    return scores.argmax(dim=-1, keepdim=True) if count == 1 else scores.topk(count, dim=-1).indices


def _is_compiled(scores: torch.Tensor) -> bool:
    return scores.device.type == "cpu" and scores.dtype in _BITS


def _best(scores: torch.Tensor, count: int) -> np.ndarray:
    """Return `top_tokens` of scores on the CPU; ties go to the lowest token."""
    infinity, integers = _BITS[scores.dtype]
    best = np.empty((len(scores), count), np.int64)
    if count:
        own = scores.detach() if scores.requires_grad else scores
        find_best(own.contiguous().view(integers).numpy(), infinity, best)
    return best


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
    if not with_argmax:
        return Top([], *fetch_together([tokens, shares]))
    if _is_compiled(scores):
        return Top(tokens[:, 0].tolist() + argmax(scores[num_lines:]), tokens.numpy(), shares.numpy())
    best, *top = fetch_together([_rounded(scores).argmax(dim=-1), tokens, shares])
    return Top(best.tolist(), *top)


def best_by_bounds(
    scores: torch.Tensor, bounds: np.ndarray, chunk: int, count: int, num_lines: int
) -> tuple[np.ndarray, np.ndarray]:
    """
    Return `tokens` and `shares` of `Top` for scores on the CPU, of which `bounds` show where the best ones are.

    Args:
        scores (`torch.Tensor` of shape `[rows, vocab_size]`, float32): Contiguous and finite.
        bounds (`np.ndarray` of shape `[rows, chunks]`, float32): No score of a chunk of tokens exceeds its bound.
        chunk (`int`): Tokens in a chunk; the last one may have fewer.
    """
    rows, vocab_size = scores.shape
    num_lines, count = min(num_lines, rows), min(count, vocab_size)
    best, shares = np.empty((num_lines, count), np.int64), np.empty((num_lines, count), np.float32)
    if count:
        first, (infinity, integers) = scores[:num_lines], _BITS[torch.float32]
        find_likeliest(first.numpy(), first.view(integers).numpy(), infinity, bounds[:num_lines], chunk, best, shares)
    return best, shares


def likeliest_tokens(scores: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Return the `count` best tokens of every line of `[rows, vocab_size]` (float32), best first, and their probabilities,
    both `[rows, count]`. No device is waited for.
    """
    tokens = top_tokens(scores, count)
    # torch has one fused kernel for softmax, which is cheaper than the best scores and a log-sum-exp.
    return tokens, scores.softmax(dim=-1).gather(1, tokens)
