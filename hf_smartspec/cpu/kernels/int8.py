"""
Linear maps of tokens in int8: rounded by groups of their numbers, and multiplied by a weight in eight or four bits.
"""

import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba import types
from numba.core import cgutils

from ...jit import inner
from ...jit.pointers import ahead, float32_at, get, int8_at, int32_at, like, put, take
from ...jit.writing import FLOAT, I32, I64, call, written
from .dots import BLOCK, GROUP, OFFSET, PART, PARTS, SIDE, SMALL_BLOCK, dots, most_of_a_tile, most_tokens, small_dots
from .multiply import tile_widths

# Compiled code is called with the address of these numbers, int64 each.
# next: incremented by the thread that takes the next share of the work.
# tokens: address of `[num_tokens, size]`, of one kind; size: a multiple of 16, the last group is filled up with zeros.
# levels, steps, offsets, totals: addresses of `[num_tokens, groups, GROUP]` int8, `[num_tokens, groups, PARTS]`
#   float32, int32, `-OFFSET` times the sums of levels, and float32, these sums times the steps.
LEVELS_FIELDS = tuple("next threads num_tokens size tokens levels steps offsets totals".split())
_NEXT, _THREADS, _NUM_TOKENS, _SIZE, _TOKENS, _LEVELS, _STEPS, _OFFSETS, _TOTALS = range(9)
# share: blocks of outputs that a thread takes at a time.
# weight, scales: addresses of `[blocks, groups, GROUP // 4, SIDE, 4]` int8 and `[blocks, groups, SIDE]` float32.
# bias: 0, or the address of `[num_outputs]`; outputs: address of `[num_tokens, num_outputs]`.
INT8_FIELDS = tuple(
    "next threads num_tokens num_groups num_outputs share weight scales levels steps offsets bias outputs".split()
)
(
    _NUM_GROUPS, _NUM_OUTPUTS, _SHARE, _WEIGHT, _SCALES, _OWN_LEVELS, _OWN_STEPS, _OWN_OFFSETS, _BIAS, _OUTPUTS,
) = range(3, 13)  # fmt: skip

_ONE_STEP, _LEAST_STEP = np.float32(1 / 127), np.float32(1e-30)
_ALL_BUT_SIGN, _INFINITE = 0x7FFFFFFF, 0x7F800000
_SHARE_OF_LEVELS = 16  # parts that a thread rounds at a time
_AHEAD = 4096  # bytes between multiplied and prefetched weights, where one tile has all tokens


@written(types.int32, types.float32)
def _bits(builder, number):
    return builder.bitcast(number, I32)


@written(types.float32, types.int32)
def _float(builder, bits):
    return builder.bitcast(bits, FLOAT)


@written(types.int32, types.float32)
def _nearest(builder, number):
    """Return the integer nearest to a number, ties to even."""
    return builder.fptosi(call(builder, "llvm.roundeven.f32", FLOAT, number), I32)


@written(types.int64)
def _room(builder):
    """Return the address of memory for the sums of a tile, which is freed when the calling function returns."""
    kind = ir.ArrayType(FLOAT, SIDE * most_tokens())
    return builder.ptrtoint(cgutils.alloca_once(builder, kind), I64)


@inner
def levels(a, kind):
    """Round the next parts of a token to multiples of their largest absolute value / 127, until none are left."""
    size, parts = a[_SIZE], (a[_SIZE] + GROUP - 1) // GROUP * PARTS
    shares = (parts + _SHARE_OF_LEVELS - 1) // _SHARE_OF_LEVELS
    number = take(ahead(a, _NEXT))
    while number < a[_NUM_TOKENS] * shares:
        token, begin = number // shares, number % shares * _SHARE_OF_LEVELS
        numbers = ahead(like(kind, a[_TOKENS]), token * size)
        for part in range(begin, min(begin + _SHARE_OF_LEVELS, parts)):
            place, first = token * parts + part, part * PART
            num = max(min(PART, size - first), 0)
            own, found = ahead(numbers, first), ahead(int8_at(a[_LEVELS]), place * PART)
            largest = _largest(own, num)
            step = max(largest * _ONE_STEP, _LEAST_STEP) if largest == largest else largest
            if _bits(largest) < _INFINITE:
                total = _round(own, num, step, found)
            else:  # an infinite or NaN step makes no result finite, so the levels do not matter
                total, num = 0, 0
            for index in range(num, PART):
                found[index] = 0
            float32_at(a[_STEPS])[place] = step
            int32_at(a[_OFFSETS])[place] = -OFFSET * total
            float32_at(a[_TOTALS])[place] = np.float32(total) * step
        number = take(ahead(a, _NEXT))


@inner
def _largest(numbers, num):
    """
    Return the largest absolute value, or NaN if there is one. Without the sign, floats are ordered as their bits are,
    taken as integers.
    """
    largest = np.int32(0)
    for index in range(num):
        largest = max(largest, np.int32(_bits(get(numbers, index)) & _ALL_BUT_SIGN))
    return _float(largest)


@inner
def _round(numbers, num, step, found):
    """Store the levels of `num` numbers, and return the sum of the levels."""
    total = np.int32(0)
    for index in range(num):
        level = _nearest(get(numbers, index) / step)
        found[index] = level
        total = np.int32(total + level)
    return total


@inner
def multiply_levels(a, kind, is_small):
    """
    Take the next share of the weight's blocks, until no blocks are left. Outputs and biases are of one kind. In four
    bits, `weight` and `scales` are addresses of `[blocks, groups, GROUP // 8, SIDE, 4]` uint8 and `[blocks, groups,
    PARTS, 2, SIDE]` float16, and `offsets` that of `totals`.
    """
    blocks, sums = (a[_NUM_OUTPUTS] + SIDE - 1) // SIDE, _room()
    num_tiles, width, num_wider = tile_widths(a[_NUM_TOKENS], most_of_a_tile())  # once, since divisions take long
    # Each tile prefetches its part of the block ahead, so that memory is read while all tiles compute.
    block_size = SMALL_BLOCK if is_small else BLOCK
    size = a[_NUM_GROUPS] * block_size
    distance = _AHEAD if num_tiles == 1 else size
    part, pace = size // num_tiles, block_size // num_tiles
    begin = a[_SHARE] * take(ahead(a, _NEXT))
    while begin < blocks:
        for block in range(begin, min(begin + a[_SHARE], blocks)):
            token = 0
            for number in range(num_tiles):
                num = width + 1 if number < num_wider else width
                _tile(a, kind, is_small, block, token, num, sums, distance + number * part, pace)
                token += num
        begin = a[_SHARE] * take(ahead(a, _NEXT))


@inner
def _tile(a, kind, is_small, block, token, num_tokens, sums, distance, pace):
    groups, num_outputs = a[_NUM_GROUPS], a[_NUM_OUTPUTS]
    first, place = block * groups, token * groups
    levels, steps = a[_OWN_LEVELS] + place * GROUP, a[_OWN_STEPS] + place * 4 * PARTS
    offsets = a[_OWN_OFFSETS] + place * 4 * PARTS
    if is_small:
        weight, scales = a[_WEIGHT] + first * SMALL_BLOCK, a[_SCALES] + first * PARTS * 2 * SIDE * 2
        small_dots(num_tokens, weight, scales, levels, steps, offsets, sums, groups, distance, pace)
    else:
        weight, scales = a[_WEIGHT] + first * BLOCK, a[_SCALES] + first * SIDE * 4
        dots(num_tokens, weight, scales, levels, steps, offsets, sums, groups, distance, pace)
    row, found = block * SIDE, float32_at(sums)
    num = min(SIDE, num_outputs - row)
    for index in range(num_tokens):
        outputs = ahead(like(kind, a[_OUTPUTS]), (token + index) * num_outputs + row)
        own = ahead(found, index * SIDE)
        if a[_BIAS]:
            bias = ahead(like(kind, a[_BIAS]), row)
            for k in range(num):
                put(outputs, k, own[k] + get(bias, k))
        else:
            for k in range(num):
                put(outputs, k, own[k])
