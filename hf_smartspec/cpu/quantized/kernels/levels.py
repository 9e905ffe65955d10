"""Rounding of tokens to int8."""

import numpy as np

from ....jit import callback, inner
from ....jit.pointers import ahead, int64_at, take
from . import arguments as at
from .arguments import FLOAT32, load
from .dots import LINE, OFFSET
from .memory import (
    bits_of,
    float_of,
    load_int32,
    load_int64,
    nearest,
    store_float32,
    store_int8,
    store_int32,
)
from .tiles import SIDE

_ONE_STEP = np.float32(1 / 127)
_LEAST_STEP = np.float32(1e-30)
_ALL_BUT_SIGN, _INFINITE = 0x7FFFFFFF, 0x7F800000


@callback
def to_levels(arguments):
    """Round the next token to multiples of its largest absolute value / 127, until no tokens are left."""
    num_inputs, kind = load_int64(arguments, at.NUM_INPUTS), load_int64(arguments, at.KIND)
    padded = (num_inputs + LINE - 1) // LINE * LINE
    size = 4 if kind == FLOAT32 else 2
    token = take(ahead(int64_at(arguments), at.NEXT))
    while token < load_int64(arguments, at.NUM_TOKENS):
        numbers = load_int64(arguments, at.TOKENS) + token * num_inputs * size
        levels = load_int64(arguments, at.LEVELS) + token * padded
        largest = _largest(kind, numbers, num_inputs)
        step = largest * _ONE_STEP
        if step < _LEAST_STEP:
            step = _LEAST_STEP
        if bits_of(largest) < _INFINITE:
            total = _round(kind, numbers, num_inputs, step, levels)
        else:  # an infinite or NaN step makes no result finite, so the levels do not matter
            total = _clear(levels, 0, num_inputs)
        _clear(levels, num_inputs, padded)
        if load_int64(arguments, at.PACKED):
            _pack(levels, padded, load_int64(arguments, at.PACKED), token)
        store_float32(load_int64(arguments, at.STEPS), token, step)
        store_int32(load_int64(arguments, at.OFFSETS), token, np.int32(OFFSET * total))
        token = take(ahead(int64_at(arguments), at.NEXT))


@inner
def _largest(kind, numbers, num):
    """
    Return the largest absolute value, or NaN if there is one. Without the sign, floats are ordered as their bits are,
    taken as integers.
    """
    largest = np.int32(0)
    for k in range(num):
        largest = max(largest, np.int32(bits_of(load(kind, numbers, k)) & _ALL_BUT_SIGN))
    return float_of(largest)


@inner
def _round(kind, numbers, num, step, levels):
    """Store the levels of `num` numbers, and return the sum of the levels."""
    total = np.int32(0)
    for k in range(num):
        level = nearest(load(kind, numbers, k) / step)
        store_int8(levels, k, level)
        total = np.int32(total + level)
    return total


@inner
def _clear(levels, begin, end):
    for k in range(begin, end):
        store_int8(levels, k, np.int32(0))
    return np.int32(0)


@inner
def _pack(levels, padded, packed, token):
    """
    Copy a token's levels to where matrix registers read them: every four levels stand beside the same four of the other
    15 tokens of the block.
    """
    first = (token - token % SIDE) * (padded // 4) + token % SIDE
    for k in range(padded // 4):
        store_int32(packed, first + SIDE * k, load_int32(levels, k))
