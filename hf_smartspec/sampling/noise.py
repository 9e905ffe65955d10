"""Gumbel noise that can be repeated: an arg max over scores plus noise is an exact sample."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from transformers import LogitsProcessor

from ..device import has_float64, send_together
from ..validate import check_seed
from .top import argmax

# Noise of a uniform variate of 52 bits never exceeds this, -log(-log(1 - 2**-53)).
_LARGEST_NOISE = 36.74

_CPU_BLOCK, _BLOCK = 2**16, 2**24  # entries of scores that are worked on at a time, on a CPU and elsewhere

_GOLDEN = 0x9E3779B97F4A7C15
_MULTIPLIERS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
_MASK = (1 << 64) - 1


def gumbel_noise(seed: int, position: int, tokens: torch.Tensor) -> torch.Tensor:
    """
    Standard Gumbel noise of the given tokens (int64, any shape) at one position of one request, float32.

    A counter-based generator: the noise of (seed, position, token) is the same whenever, wherever and beside whatever
    it is asked for. Token counters pass through the finaliser of SplitMix64 (Steele et al., 2014).
    """
    key = _keys([seed], [position])[0]
    if tokens.device.type == "cpu":  # numpy: a dozen small operations are dearer in torch, whose threads meet in each
        uniform = torch.from_numpy(_uniform_numpy(key, tokens.numpy()))
    else:
        uniform = _uniform_torch(_signed(int(key)), tokens)
    return _gumbel(uniform)


def uniform_noise(seeds: Sequence[int], positions: Sequence[int]) -> np.ndarray:
    """Uniform variates in the open interval (0, 1) of pairs of seeds and positions, float64 `[pairs]`."""
    return _uniform_numpy(_keys(seeds, positions), np.zeros(1, np.int64))


def _gumbel(uniform: torch.Tensor) -> torch.Tensor:
    """Noise from uniform variates in float64, which are overwritten; float32."""
    # In float64, since the upper tail, which decides who wins, is lost where float32 rounds the uniform to 1.
    return uniform.log_().neg_().log_().neg_().to(torch.float32)


def _keys(seeds: Sequence[int], positions: Sequence[int]) -> np.ndarray:
    """What every pair of a seed and a position adds to the counters, uint64 `[rows]`."""
    keys = [_mix_int(_mix_int(seed) ^ (position + 1)) for seed, position in zip(seeds, positions)]
    return np.array(keys, np.uint64)


def _uniform_numpy(keys: np.ndarray | np.uint64, tokens: np.ndarray) -> np.ndarray:
    """
    Uniform variates in the open interval (0, 1): the upper 52 bits of the hash, centred in their cell. With 53 bits the
    centre of the last cell would be rounded to 1, whose noise is infinite. Keys (uint64) and tokens are broadcast.
    """
    counters = (tokens.astype(np.uint64) + np.uint64(1)) * np.uint64(_GOLDEN) + keys
    for bits, multiplier in zip((30, 27), _MULTIPLIERS):
        counters ^= counters >> np.uint64(bits)  # in place: memory is what this costs
        counters *= np.uint64(multiplier)
    counters ^= counters >> np.uint64(31)
    counters >>= np.uint64(12)
    uniform = counters.astype(np.float64)
    uniform += 0.5
    uniform *= 2.0**-52
    return uniform


def _uniform_torch(keys: int | torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """The same on any device; torch has no unsigned arithmetic, so keys (int64) are signed and shifts are masked."""
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
    Scores `[rows, vocab_size]` plus the noise of each row's seed and position; rows without a seed stay as they are.
    Noise is added only to tokens that can still win: those that the processors left, and whose score, with the largest
    noise there is, exceeds that of the highest score with its own noise. No device is waited for.
    """
    noise = noise_keys(seeds, positions)
    if noise is None:
        return scores.clone()
    return add_noise(scores, NoiseKeys(*send_together(noise, scores.device)))


class NoiseKeys(NamedTuple):
    """What makes the noise of some lines of scores, wherever these are."""

    keys: torch.Tensor  # [noisy lines] int64
    lines: torch.Tensor  # [noisy lines] int64, which these are; [0] where it is all of them


def noise_keys(seeds: Sequence[int | None], positions: Sequence[int]) -> NoiseKeys | None:
    """Of each line's seed and position, on the host; None where no line has a seed."""
    lines = [line for line, seed in enumerate(seeds) if seed is not None]
    if not lines:
        return None
    keys = _keys([seed for seed in seeds if seed is not None], [positions[line] for line in lines])
    some = torch.tensor(lines if len(lines) < len(seeds) else [], dtype=torch.long)
    return NoiseKeys(torch.from_numpy(keys.view(np.int64)), some)


def add_noise(scores: torch.Tensor, noise: NoiseKeys) -> torch.Tensor:
    """`add_gumbel_noise`, from keys that are where the scores are."""
    if not has_float64(scores.device):  # which noise is exact in
        return add_noise(scores.cpu(), NoiseKeys(*(item.cpu() for item in noise))).to(scores.device)
    if not len(noise.lines):
        return _noisy(scores.clone(), noise.keys)
    return scores.index_copy(0, noise.lines, _noisy(scores.index_select(0, noise.lines), noise.keys))


def _noisy(scores: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Adds noise in place, to a few lines at a time, so that what it takes stays in the cache or is soon free again."""
    is_on_cpu = scores.device.type == "cpu"
    add, num = (_add_sparsely, _CPU_BLOCK) if is_on_cpu else (_add_densely, _BLOCK)
    num = max(num // scores.shape[1], 1)
    for first in range(0, len(scores), num):
        add(scores[first : first + num], keys[first : first + num, None])
    return scores


def _add_densely(scores: torch.Tensor, keys: torch.Tensor) -> None:
    """Makes all tokens' noise, of which those take theirs that can win."""
    tokens = torch.arange(scores.shape[1], device=scores.device)
    noise = _gumbel(_uniform_torch(keys, tokens))
    best = scores.argmax(dim=-1, keepdim=True)
    keep = _can_win(scores, scores.gather(1, best) + noise.gather(1, best))
    scores.copy_(torch.where(keep, scores + noise, scores))


def _add_sparsely(scores: torch.Tensor, signed_keys: torch.Tensor) -> None:
    """Finds out first which tokens can win; on a CPU nobody waits for that."""
    keys, best = signed_keys.numpy().view(np.uint64), np.array(argmax(scores))[:, None]
    noise = _gumbel(torch.from_numpy(_uniform_numpy(keys, best)))
    keep = _can_win(scores, scores.gather(1, torch.from_numpy(best)) + noise)
    places = keep.numpy().ravel().nonzero()[0]
    if 2 * len(places) > keep.numel():  # nearly all: picking them out costs more than it saves
        noise = _gumbel(torch.from_numpy(_uniform_numpy(keys, np.arange(scores.shape[1]))))
        scores.copy_(torch.where(keep, scores + noise, scores))
    elif len(places):
        lines, tokens = np.divmod(places, scores.shape[1])
        noise = _gumbel(torch.from_numpy(_uniform_numpy(keys[lines, 0], tokens)))
        scores.view(-1)[torch.from_numpy(places)] += noise


def _can_win(scores: torch.Tensor, best: torch.Tensor) -> torch.Tensor:
    """Which tokens may be picked, given the highest scores with their noise, `[rows, 1]`."""
    return (scores >= best - _LARGEST_NOISE) & (scores > -torch.inf)


def _mix_int(value: int) -> int:
    """SplitMix64's output function on one Python integer; also how row seeds are derived."""
    value = (value + _GOLDEN) & _MASK
    value = ((value ^ (value >> 30)) * _MULTIPLIERS[0]) & _MASK
    value = ((value ^ (value >> 27)) * _MULTIPLIERS[1]) & _MASK
    return value ^ (value >> 31)


def row_seed(seed: int, row: int) -> int:
    """The seed of row `row` of a batch that was given one seed; row 0 keeps the seed itself."""
    return seed if row == 0 else _mix_int(_mix_int(seed) + row)


def draft_seed(seed: int) -> int:
    """The seed with which a draft samples by itself, when its tokens are verified by rejection."""
    return seed ^ 0x5EED_D4AF


class SeededGumbelLogitsProcessor(LogitsProcessor):
    """
    Adds seeded Gumbel noise to the scores, so that the arg max is a sample (the Gumbel-max trick) that depends on
    nothing but (seed, row, number of generated tokens, token).

    It is the reference for this library's sampling: plain `generate(do_sample=False, logits_processor=[..., this])`
    returns the tokens that `generate(do_sample=True, assistant=..., seed=seed)` returns. Put it last, behind the
    warpers (temperature, top-k, ...), which `do_sample=False` does not add by itself.

    Args:
        seed (`int` or sequence of `int`): One seed for the batch, from which each row derives its own, or one per row.

    It notices the start of a generation by itself (its input is not one token longer than before); use one object per
    `generate` call if you continue a text token by token.
    """

    def __init__(self, seed: int | Sequence[int]):
        check_seed(seed)
        self.seed = [int(value) for value in seed] if isinstance(seed, Sequence) else int(seed)
        self._prompt_length = self._length = -1
        self._is_bound = False

    def seed_of(self, row: int) -> int:
        return row_seed(self.seed, row) if isinstance(self.seed, int) else self.seed[row]

    def for_row(self, row: int, prompt_length: int) -> "SeededGumbelLogitsProcessor":
        """The same noise for one row of the batch on its own, bound to a prompt of `prompt_length` tokens."""
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
