"""Repeatable Gumbel noise: the arg max of scores plus noise is an exact sample."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from transformers import LogitsProcessor

from ..device import fetch_together, has_float64, send_together
from ..validate import check_seed
from .kernels.noise import likely_picks
from .top import argmax

# Upper bound of the noise of a uniform variate of 52 bits: -log(-log(1 - 2**-53)).
_LARGEST_NOISE = 36.74

NO_TOKEN = -1  # in place of a sample of scores that have none

_MOST_LIKELY = 8  # tokens that may be the highest but for rounding
_CPU_BLOCK, _BLOCK = 2**16, 2**24  # scores processed at a time, on a CPU and on other devices

_GOLDEN = 0x9E3779B97F4A7C15
_MULTIPLIERS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
_MASK = (1 << 64) - 1


def gumbel_noise(seed: int, position: int, tokens: torch.Tensor) -> torch.Tensor:
    """
    Return standard Gumbel noise of tokens at one position of one request.

    The generator is counter-based: the noise of (seed, position, token) does not depend on when, on which device or
    with which other tokens it is computed. Token counters pass through the finaliser of SplitMix64 (Steele et al.,
    2014).

    Args:
        tokens (`torch.Tensor`, int64): Token ids, of any shape.

    Returns:
        `torch.Tensor` of the shape of `tokens`, float32.
    """
    key = _keys([seed], [position])[0]
    if tokens.device.type == "cpu":  # numpy, since torch synchronises its threads in each of a dozen small operations
        uniform = torch.from_numpy(_uniform_numpy(key, tokens.numpy()))
    else:
        uniform = _uniform_torch(_signed(int(key)), tokens)
    return _gumbel(uniform)


def uniform_noise(seeds: Sequence[int], positions: Sequence[int]) -> np.ndarray:
    """Return uniform variates in the open interval (0, 1) of pairs of seeds and positions, float64 `[pairs]`."""
    return _uniform_numpy(_keys(seeds, positions), np.zeros(1, np.int64))


def _gumbel(uniform: torch.Tensor) -> torch.Tensor:
    """Return noise (float32) made from uniform variates (float64), which are overwritten."""
    # In float64: float32 rounds the largest variates to 1 and so loses the upper tail, which decides which token wins.
    return uniform.log_().neg_().log_().neg_().to(torch.float32)


def _keys(seeds: Sequence[int], positions: Sequence[int]) -> np.ndarray:
    """Return the number that each pair of a seed and a position adds to the counters, uint64 `[rows]`."""
    keys = [_mix_int(_mix_int(seed) ^ (position + 1)) for seed, position in zip(seeds, positions)]
    return np.array(keys, np.uint64)


def _uniform_numpy(keys: np.ndarray | np.uint64, tokens: np.ndarray) -> np.ndarray:
    """
    Return uniform variates in the open interval (0, 1): the upper 52 bits of the hash, centred in their cell. With 53
    bits the centre of the last cell would be rounded to 1, whose noise is infinite. Keys (uint64) and tokens broadcast.
    """
    counters = (tokens.astype(np.uint64) + np.uint64(1)) * np.uint64(_GOLDEN) + keys
    for bits, multiplier in zip((30, 27), _MULTIPLIERS):
        counters ^= counters >> np.uint64(bits)  # in place, since memory traffic dominates the cost
        counters *= np.uint64(multiplier)
    counters ^= counters >> np.uint64(31)
    counters >>= np.uint64(12)
    uniform = counters.astype(np.float64)
    uniform += 0.5
    uniform *= 2.0**-52
    return uniform


def _uniform_torch(keys: int | torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """
    Return the variates of `_uniform_numpy` on any device. torch has no unsigned arithmetic, so keys are int64 and
    shifts are masked.
    """
    counters = (tokens + 1) * _signed(_GOLDEN) + keys
    counters = (counters ^ _shift(counters, 30)) * _signed(_MULTIPLIERS[0])
    counters = (counters ^ _shift(counters, 27)) * _signed(_MULTIPLIERS[1])
    counters = counters ^ _shift(counters, 31)
    return (_shift(counters, 12).to(torch.float64) + 0.5) * 2.0**-52


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


def _shift(values: torch.Tensor, bits: int) -> torch.Tensor:
    return (values >> bits) & ((1 << (64 - bits)) - 1)


def add_gumbel_noise(scores: torch.Tensor, seeds: Sequence[int | None], positions: Sequence[int]) -> torch.Tensor:
    """
    Add the noise of each row's seed and position to scores `[rows, vocab_size]`; rows without a seed stay as they are.
    Only tokens that can still win get noise: those that the processors left, and whose score plus the largest possible
    noise exceeds the score plus noise of the best-scored token. Returns a new tensor; no device is waited for.
    """
    noise = noise_keys(seeds, positions)
    return scores.clone() if noise is None else add_noise(scores, noise)


def noisy_argmax(scores: torch.Tensor, seeds: Sequence[int | None], positions: Sequence[int]) -> list[int]:
    """
    Return `argmax(add_gumbel_noise(...))`, and `NO_TOKEN` for rows with a seed whose highest score is infinite or NaN:
    softmax makes no probabilities of these, so that `torch.multinomial` raises. On a CPU, compiled code finds the few
    tokens, mostly one, that are the highest but for rounding, and only their noise is made.
    """
    if scores.device.type != "cpu" or scores.dtype != torch.float32:
        noisy = add_gumbel_noise(scores, seeds, positions).float()
        best = noisy.argmax(dim=-1, keepdim=True)
        tokens, highest = (item[:, 0].tolist() for item in fetch_together([best, noisy.gather(1, best)]))
        return [
            token if seed is None or math.isfinite(score) else NO_TOKEN
            for token, score, seed in zip(tokens, highest, seeds)
        ]
    scores, picks = scores.contiguous(), argmax(scores)
    for line, (seed, position) in enumerate(zip(seeds, positions)):
        if seed is not None:
            picks[line] = _noisy_pick(scores[line], seed, position, picks[line])
    return picks


def _noisy_pick(scores: torch.Tensor, seed: int, position: int, best: int) -> int:
    """Return `noisy_argmax` of a line with a seed; `best` is its arg max without noise."""
    if not math.isfinite(scores[best]):
        return NO_TOKEN
    tokens = np.empty(_MOST_LIKELY, np.int64)
    num = likely_picks(scores.data_ptr(), len(scores), _keys([seed], [position])[0], best, tokens)
    if num == 1:
        return int(tokens[0])
    if num > len(tokens):
        return argmax(add_gumbel_noise(scores[None], [seed], [position]))[0]
    own = torch.from_numpy(tokens[:num])
    return int(tokens[argmax((scores[own] + gumbel_noise(seed, position, own))[None])[0]])


class NoiseKeys(NamedTuple):
    """Keys of the noise of some lines of scores, on the host or on a device."""

    keys: torch.Tensor  # [noisy lines] int64
    lines: torch.Tensor  # [noisy lines] int64, their indices; [0] where all lines are noisy


def noise_keys(seeds: Sequence[int | None], positions: Sequence[int]) -> NoiseKeys | None:
    """Return the keys of each line's seed and position, on the host; None where no line has a seed."""
    lines = [line for line, seed in enumerate(seeds) if seed is not None]
    if not lines:
        return None
    keys = _keys([seed for seed in seeds if seed is not None], [positions[line] for line in lines])
    some = torch.tensor(lines if len(lines) < len(seeds) else [], dtype=torch.long)
    return NoiseKeys(torch.from_numpy(keys.view(np.int64)), some)


def add_noise(scores: torch.Tensor, noise: NoiseKeys, ids: torch.Tensor | None = None) -> torch.Tensor:
    """
    Return `add_gumbel_noise` of scores, from keys on the host or on the same device. Where the columns of scores are
    not all tokens in order, `ids` `[columns]` (int64) says which tokens they are.
    """
    if not has_float64(scores.device):  # the noise is computed in float64
        ids = None if ids is None else ids.cpu()
        return add_noise(scores.cpu(), NoiseKeys(*(item.cpu() for item in noise)), ids).to(scores.device)
    if noise.keys.device.type == "cpu":
        noise = NoiseKeys(*send_together(noise, scores.device))
    if not len(noise.lines):
        return _noisy(scores.clone(), noise.keys, ids)
    return scores.index_copy(0, noise.lines, _noisy(scores.index_select(0, noise.lines), noise.keys, ids))


def _noisy(scores: torch.Tensor, keys: torch.Tensor, ids: torch.Tensor | None) -> torch.Tensor:
    """Add noise in place, to a few lines at a time, so that temporary tensors stay in the cache or are soon freed."""
    is_on_cpu = scores.device.type == "cpu"
    add, num = (_add_sparsely, _CPU_BLOCK) if is_on_cpu else (_add_densely, _BLOCK)
    num = max(num // scores.shape[1], 1)
    ids = torch.arange(scores.shape[1], device=scores.device) if ids is None else ids
    for first in range(0, len(scores), num):
        add(scores[first : first + num], keys[first : first + num, None], ids)
    return scores


def _add_densely(scores: torch.Tensor, keys: torch.Tensor, ids: torch.Tensor) -> None:
    """Make the noise of all tokens, and add it to those that can win."""
    noise = _gumbel(_uniform_torch(keys, ids))
    best = scores.argmax(dim=-1, keepdim=True)
    keep = _can_win(scores, scores.gather(1, best) + noise.gather(1, best))
    scores.copy_(torch.where(keep, scores + noise, scores))


def _add_sparsely(scores: torch.Tensor, signed_keys: torch.Tensor, ids: torch.Tensor) -> None:
    """Find the tokens that can win, and make noise for these alone; on a CPU, reading them back costs no wait."""
    keys, best, tokens = signed_keys.numpy().view(np.uint64), np.array(argmax(scores))[:, None], ids.numpy()
    noise = _gumbel(torch.from_numpy(_uniform_numpy(keys, tokens[best])))
    keep = _can_win(scores, scores.gather(1, torch.from_numpy(best)) + noise)
    places = keep.numpy().ravel().nonzero()[0]
    if 2 * len(places) > keep.numel():  # nearly all: gathering them costs more than it saves
        noise = _gumbel(torch.from_numpy(_uniform_numpy(keys, tokens)))
        scores.copy_(torch.where(keep, scores + noise, scores))
    elif len(places):
        lines, columns = np.divmod(places, scores.shape[1])
        noise = _gumbel(torch.from_numpy(_uniform_numpy(keys[lines, 0], tokens[columns])))
        scores.view(-1)[torch.from_numpy(places)] += noise


def _can_win(scores: torch.Tensor, best: torch.Tensor) -> torch.Tensor:
    """Return which tokens may be picked, bool `[rows, vocab_size]`, given the best scores plus noise, `[rows, 1]`."""
    return (scores >= best - _LARGEST_NOISE) & (scores > -torch.inf)


def _mix_int(value: int) -> int:
    """Return SplitMix64's output for one Python integer; row seeds are derived by it as well."""
    value = (value + _GOLDEN) & _MASK
    value = ((value ^ (value >> 30)) * _MULTIPLIERS[0]) & _MASK
    value = ((value ^ (value >> 27)) * _MULTIPLIERS[1]) & _MASK
    return value ^ (value >> 31)


def row_seed(seed: int, row: int) -> int:
    """Return the seed of row `row` of a batch that was given one seed; row 0 keeps the seed itself."""
    return seed if row == 0 else _mix_int(_mix_int(seed) + row)


def draft_seed(seed: int) -> int:
    """Return the seed of a drafter's own sampling, used when its tokens are verified by rejection sampling."""
    return seed ^ 0x5EED_D4AF


class SeededGumbelLogitsProcessor(LogitsProcessor):
    """
    Logits processor that adds seeded Gumbel noise, so that the arg max is a sample (the Gumbel-max trick) that
    depends only on (seed, row, number of generated tokens, token).

    This processor is the reference for the library's sampling: `generate(do_sample=False, logits_processor=[...,
    this])` without speculation returns the tokens that `generate(do_sample=True, assistant=..., seed=seed)` returns.
    Put it last, after the warpers (temperature, top-k, ...), which `do_sample=False` does not add by itself.

    Args:
        seed (`int` or sequence of `int`): One seed for the batch, from which each row derives its own, or one per row.

    The processor detects the start of a generation by itself: its input is not one token longer than in the call
    before. If you continue a text token by token, use one object per `generate` call.
    """

    def __init__(self, seed: int | Sequence[int]):
        check_seed(seed)
        self.seed = [int(value) for value in seed] if isinstance(seed, Sequence) else int(seed)
        self._prompt_length = self._length = -1
        self._is_bound = False

    def seed_of(self, row: int) -> int:
        return row_seed(self.seed, row) if isinstance(self.seed, int) else self.seed[row]

    def for_row(self, row: int, prompt_length: int) -> "SeededGumbelLogitsProcessor":
        """Return a processor of the same noise for one row alone, bound to a prompt of `prompt_length` tokens."""
        single = SeededGumbelLogitsProcessor([self.seed_of(row)])
        single._prompt_length, single._is_bound = prompt_length, True
        return single

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        length = input_ids.shape[1]
        if not self._is_bound and length != self._length + 1:
            self._prompt_length = length
        self._length = length
        seeds = [self.seed_of(row) for row in range(len(scores))]
        return add_gumbel_noise(scores, seeds, [length - self._prompt_length] * len(scores))  # type: ignore[return-value]
