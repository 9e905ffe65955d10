"""
The target's likeliest tokens after a token, and after two (Token Recycling, Luo et al., 2024), in tables that every
verified token fills, and compiled code reads.
"""

from typing import Any

import numpy as np

from .....jit import inner

# A line of the table has what the target last found likely after some tokens: a hash of these (0: the line is empty),
# the bins of the shares of the likeliest tokens, four bits each, and these tokens, best first.
NUM_LIKELY = 6
LINE = 2 + NUM_LIKELY
_AFTER_ONE, _AFTER_TWO = 1 << 13, 1 << 14  # lines
NUM_LINES = _AFTER_ONE + _AFTER_TWO

_LEAST_SHARES = np.array([0.97, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.14, 0.09, 0.05, 0.03, 0.015])  # of bins
MEAN_SHARES = (0.98, 0.93, 0.85, 0.75, 0.65, 0.55, 0.45, 0.35, 0.25, 0.17, 0.11, 0.07, 0.04, 0.02, 0.01)
NUM_BINS = len(MEAN_SHARES)
LEAST_LIKELY = 12  # bin of the least share that makes a candidate
_SHIFTS = 4 * np.arange(NUM_LIKELY)
_SPREAD, _MIX_IN, _KEY = 0x9E3779B1, 0x85EBCA6B, 0x7FFFFFFF


def new_lines(num_namespaces: int) -> np.ndarray:
    """Return empty tables: `[namespaces, NUM_LINES, LINE]` int32."""
    return np.zeros((num_namespaces, NUM_LINES, LINE), np.int32)


def lines_of(
    before: np.ndarray, tokens: np.ndarray, following: np.ndarray, shares: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """
    Return the lines of the likeliest tokens after tokens; where two tokens share a line, the last one counts.

    Args:
        before, tokens (`np.ndarray` of shape `[n]`, int64): The tokens, and those before them (-1: there is none).
        following, shares (`np.ndarray` of shape `[n, k]`): Likeliest next tokens, best first, and their shares. The
            first `NUM_LIKELY` are kept.

    Returns:
        Their numbers, `[2 * n]`, and the lines, int32 `[2 * n, LINE]`.
    """
    number = min(following.shape[1], NUM_LIKELY)
    bins = np.full((len(tokens), NUM_LIKELY), NUM_BINS)
    bins[:, :number] = np.searchsorted(-_LEAST_SHARES, -shares[:, :number])
    keys = np.stack([_key_of_one(tokens), _key_of_two(before, tokens)])
    lines = np.zeros((2, len(tokens), LINE), np.int32)
    lines[:, :, 0], lines[:, :, 1] = keys, (bins << _SHIFTS).sum(axis=1)
    lines[:, :, 2 : 2 + number] = following[:, :number]
    numbers = np.concatenate([_line_of_one(keys[0]), _line_of_two(keys[1])])
    return numbers, lines.reshape(-1, LINE)


# Of arrays, and in compiled code of numbers.


def _key_of_one(token: Any) -> Any:
    return (token + 2) & _KEY  # not 0, also where there is no token (-1)


def _key_of_two(before: Any, token: Any) -> Any:
    return (before * _MIX_IN ^ (token + 1) * _SPREAD) >> 7 & _KEY | 1


def _line_of_one(key: Any) -> Any:
    return key * _SPREAD >> 15 & _AFTER_ONE - 1


def _line_of_two(key: Any) -> Any:
    return _AFTER_ONE + (key * _SPREAD >> 15 & _AFTER_TWO - 1)


_one_key, _two_key, _one_line, _two_line = [
    inner(item) for item in (_key_of_one, _key_of_two, _line_of_one, _line_of_two)
]


@inner
def after_one(lines, token):
    """Return where the line for a token begins; -1 if the table does not have it."""
    key = _one_key(np.int64(token))
    at = _one_line(key) * LINE
    return at if lines[at] == key else -1


@inner
def after_two(lines, before, token):
    """Return where the line for two tokens begins; -1 if the table does not have it."""
    key = _two_key(np.int64(before), np.int64(token))
    at = _two_line(key) * LINE
    return at if lines[at] == key else -1
