"""The tokens of a line of scores that may have the highest score with noise."""

import math

import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba import types

from ...jit import compiled_for, inner
from ...jit.pointers import ahead, float32_at
from ...jit.writing import written

_BLOCK = 1024  # tokens that are ruled out at once

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_FIRST, _SECOND = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_30, _27, _31, _12, _ONE = np.uint64(30), np.uint64(27), np.uint64(31), np.uint64(12), np.uint64(1)
_ALL, _UNIT = np.uint64(2**52 - 1), 2.0**-52  # bits of a hash, and the distance of variates
_LOG2 = 0.6931471805599454  # rounded up
_LARGEST = 64.0  # more than all noise
_ROUNDING = 2.0**-20  # more than what float32 rounds off, relative to scores and noise


@written(types.int64, types.uint64)
def _leading_zeros(builder, number):
    return builder.ctlz(number, ir.Constant(ir.IntType(1), 0))


@compiled_for("i8 i8 u8 i8 i8:1")
def likely_picks(address, vocab_size, key, best, tokens):
    """
    Find the tokens of a line of scores that may have the highest score with noise, in spite of rounding.

    Args:
        address (int64): Where the scores lie, `[vocab_size]` float32.
        key (uint64): What is added to the counters of tokens: the number of a seed and a position (`noise._keys`).
        best (int64): The token with the highest score, which is finite.
        tokens (`[k]` int64): Receives the tokens, in ascending order.

    Returns:
        The number of tokens; k + 1 if there are more than k.
    """
    scores = float32_at(address)
    highest = scores[best] + _noise(_hash(best, key))
    margin = (abs(highest) + _LARGEST) * _ROUNDING
    num = 0
    for begin in range(0, vocab_size, _BLOCK):
        end = min(begin + _BLOCK, vocab_size)
        if not _may_exceed(ahead(scores, begin), begin, end, key, np.float32(highest - margin)):
            continue
        for token in range(begin, end):
            hashed = _hash(token, key)
            if scores[token] + _bound(hashed) < highest - margin:
                continue
            noisy = scores[token] + _noise(hashed)
            highest = max(highest, noisy)
            if noisy < highest - margin:
                continue
            if num == len(tokens):
                num = _likely(scores, key, highest - margin, tokens, num)
                if num == len(tokens):
                    return num + 1
            tokens[num] = token
            num += 1
    return _likely(scores, key, highest - margin, tokens, num)


@inner
def _may_exceed(scores, begin, end, key, least):
    """Return whether the noise of tokens from `begin` to `end` may lift one of their scores to `least`."""
    num = 0
    for index in range(end - begin):
        num += scores[index] + np.float32(_bound(_hash(begin + index, key))) >= least
    return num > 0


@inner
def _likely(scores, key, least, tokens, num):
    """Keep those of `num` tokens whose score with noise is at least `least`; return their number."""
    kept = 0
    for index in range(num):
        token = tokens[index]
        if scores[token] + _noise(_hash(token, key)) >= least:
            tokens[kept] = token
            kept += 1
    return kept


@inner
def _hash(token, key):
    """Return the upper 52 bits of a token's hash, of which `noise._uniform_numpy` makes a variate."""
    counter = (np.uint64(token) + _ONE) * _GOLDEN + np.uint64(key)  # arguments are int64
    counter = (counter ^ (counter >> _30)) * _FIRST
    counter = (counter ^ (counter >> _27)) * _SECOND
    return (counter ^ (counter >> _31)) >> _12


@inner
def _noise(hashed):
    return -math.log(-math.log((np.float64(hashed) + 0.5) * _UNIT))


@inner
def _bound(hashed):
    """Return an upper bound of noise: -log(1 - u) of a uniform variate u, with 1 - u rounded down to a power of two."""
    return (_leading_zeros(_ALL ^ np.uint64(hashed)) - 11) * _LOG2
