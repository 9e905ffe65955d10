"""Levels of tokens times weights, with outputs in the dtype of the tokens."""

import numpy as np

from ....jit import callback, inner
from ....jit.pointers import ahead, int64_at, take
from . import arguments as at
from .arguments import BFLOAT16, FLOAT32, load
from .dots import LINE, dots_1x1, dots_2x8, dots_4x1, dots_4x2, dots_4x4
from .memory import (
    load_float32,
    load_int32,
    load_int64,
    room_for,
    store_bfloat16,
    store_float16,
    store_float32,
)

ROWS, _MOST = 32, 8  # rows and tokens whose sums are computed before they are scaled
_LINE = 4 * ROWS  # bytes of a token's sums
_room = room_for(ROWS * _MOST)


@callback
def multiply(arguments):
    """Take the next share of the weight's rows, until no rows are left."""
    num_outputs, share = load_int64(arguments, at.NUM_OUTPUTS), load_int64(arguments, at.SHARE)
    sums = _room()
    begin = share * take(ahead(int64_at(arguments), at.NEXT))
    while begin < num_outputs:
        end = min(begin + share, num_outputs)
        while begin < end:
            multiply_rows(arguments, begin, min(ROWS, end - begin), sums)
            begin += ROWS
        begin = share * take(ahead(int64_at(arguments), at.NEXT))


@inner
def multiply_rows(arguments, row, num_rows, sums):
    """Multiply some rows by all tokens, so that the rows come from memory once."""
    token, num_tokens = 0, load_int64(arguments, at.NUM_TOKENS)
    while token < num_tokens:
        num = min(_MOST, num_tokens - token)
        _sum(arguments, row, num_rows, token, num, sums)
        for k in range(num):
            scale(arguments, row, num_rows, token + k, sums + _LINE * k)
        token += num


@inner
def _sum(arguments, first_row, num_rows, token, num_tokens, sums):
    """Compute sums of products, `sums[token, row]`."""
    length = load_int64(arguments, at.NUM_INPUTS)
    padded = (length + LINE - 1) // LINE * LINE
    weight = load_int64(arguments, at.WEIGHT) + first_row * length
    levels = load_int64(arguments, at.LEVELS) + token * padded
    offsets = load_int64(arguments, at.OFFSETS) + 4 * token
    row = 0
    if num_tokens == 8:
        while row + 2 <= num_rows:
            dots_2x8(weight + row * length, length, levels, padded, offsets, sums + 4 * row, ROWS)
            row += 2
    while row + 4 <= num_rows:
        _sum_four_rows(weight + row * length, length, levels, padded, offsets, sums + 4 * row, num_tokens)
        row += 4
    while row < num_rows:
        for k in range(num_tokens):
            sum_at = sums + 4 * row + _LINE * k
            dots_1x1(weight + row * length, length, levels + k * padded, padded, offsets + 4 * k, sum_at, ROWS)
        row += 1


@inner
def _sum_four_rows(weight, length, levels, padded, offsets, sums, num_tokens):
    token = 0
    while token + 4 <= num_tokens:
        dots_4x4(weight, length, levels + token * padded, padded, offsets + 4 * token, sums + _LINE * token, ROWS)
        token += 4
    if token + 2 <= num_tokens:
        dots_4x2(weight, length, levels + token * padded, padded, offsets + 4 * token, sums + _LINE * token, ROWS)
        token += 2
    if token < num_tokens:
        dots_4x1(weight, length, levels + token * padded, padded, offsets + 4 * token, sums + _LINE * token, ROWS)


@inner
def scale(arguments, row, num_rows, token, sums):
    """Scale a token's sums and store them as outputs, rounded as torch's operators round one after the other."""
    step, scale = load_float32(load_int64(arguments, at.STEPS), token), load_int64(arguments, at.SCALES) + 4 * row
    for k in range(num_rows):
        store_float32(sums, k, np.float32(load_int32(sums, k)) * load_float32(scale, k) * step)
    bias, bias_kind = load_int64(arguments, at.BIAS), load_int64(arguments, at.BIAS_KIND)
    if bias:
        for k in range(num_rows):
            store_float32(sums, k, load_float32(sums, k) + load(bias_kind, bias, row + k))
    kind, output = load_int64(arguments, at.KIND), load_int64(arguments, at.OUTPUTS)
    first = token * load_int64(arguments, at.NUM_OUTPUTS) + row
    for k in range(num_rows):
        number = load_float32(sums, k)
        if kind == FLOAT32:
            store_float32(output, first + k, number)
        elif kind == BFLOAT16:
            store_bfloat16(output, first + k, number)
        else:
            store_float16(output, first + k, number)
