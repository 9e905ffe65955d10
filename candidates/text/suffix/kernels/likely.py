"""
The target's likeliest tokens after a token, and after two (Token Recycling, Luo et al., 2024), in tables that every
verified token fills, and compiled code reads.
"""

import numpy as np

from .....jit import compiled_for, inner

# A line of the table has what the target last found likely after some tokens: a hash of these (0: the line is empty),
# the bins of the shares of the likeliest tokens, four bits each, and these tokens, best first.
NUM_LIKELY = 6
LINE = 2 + NUM_LIKELY
_AFTER_ONE, _AFTER_TWO = 1 << 13, 1 << 14  # lines
NUM_LINES = _AFTER_ONE + _AFTER_TWO

_LEAST_SHARES = (0.97, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.14, 0.09, 0.05, 0.03, 0.015)  # of bins
MEAN_SHARES = (0.98, 0.93, 0.85, 0.75, 0.65, 0.55, 0.45, 0.35, 0.25, 0.17, 0.11, 0.07, 0.04, 0.02, 0.01)
NUM_BINS = len(MEAN_SHARES)
LEAST_LIKELY = 12  # bin of the least share that makes a candidate
_SPREAD, _MIX_IN, _KEY = 0x9E3779B1, 0x85EBCA6B, 0x7FFFFFFF


def new_lines(num_namespaces: int) -> np.ndarray:
    """Return empty tables: `[namespaces, NUM_LINES, LINE]` int32."""
    return np.zeros((num_namespaces, NUM_LINES, LINE), np.int32)


@inner
def _one_key(token):
    return (token + 2) & _KEY  # not 0, also where there is no token (-1)


@inner
def _two_key(before, token):
    return (before * _MIX_IN ^ (token + 1) * _SPREAD) >> 7 & _KEY | 1


@inner
def _one_line(key):
    return key * _SPREAD >> 15 & _AFTER_ONE - 1


@inner
def _two_line(key):
    return _AFTER_ONE + (key * _SPREAD >> 15 & _AFTER_TWO - 1)


@compiled_for("i4:2 i8:1 i8:1 i8:2 f4:2")
def write_lines(lines, before, tokens, following, shares):
    """
    Write the likeliest tokens after tokens to a table; where two tokens share a line, the last one counts.

    Args:
        lines (int32 `[NUM_LINES, LINE]`): The table.
        before, tokens (int64 `[n]`): The tokens, and those before them (-1: there is none).
        following (int64 `[n, k]`), shares (float32 `[n, k]`): Likeliest next tokens, best first, and their shares. The
            first `NUM_LIKELY` are kept.
    """
    number = min(following.shape[1], NUM_LIKELY)
    for place in range(len(tokens)):
        one, two = _one_key(tokens[place]), _two_key(before[place], tokens[place])
        for key, line in ((one, lines[_one_line(one)]), (two, lines[_two_line(two)])):
            line[0], bins = key, 0
            for rank in range(NUM_LIKELY):
                kept, likely = NUM_BINS, 0
                if rank < number:
                    kept, likely = 0, following[place, rank]
                    while kept < len(_LEAST_SHARES) and not shares[place, rank] >= _LEAST_SHARES[kept]:  # nor NaN
                        kept += 1
                bins |= kept << 4 * rank
                line[2 + rank] = likely
            line[1] = bins


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
