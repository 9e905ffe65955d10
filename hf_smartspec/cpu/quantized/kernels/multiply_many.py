"""Levels of many tokens times weights, in matrix registers."""

from ....jit import callback, inner
from ....jit.pointers import ahead, int64_at, take
from . import arguments as at
from .dots import LINE
from .memory import load_int32, load_int64, room_for, store_int32
from .multiply import multiply_rows, scale
from .tiles import MOST_BLOCKS, SIDE, configure, release, sums_1, sums_2

_MOST = SIDE * MOST_BLOCKS  # tokens at a time
_room = room_for(SIDE * _MOST)
_room_of_a_token = room_for(SIDE)


@callback
def multiply_many(arguments):
    """Take the next share of the weight's rows, until no rows are left."""
    num_outputs, share = load_int64(arguments, at.NUM_OUTPUTS), load_int64(arguments, at.SHARE)
    sums = _room()
    configure(load_int64(arguments, at.REGISTERS))
    begin = share * take(ahead(int64_at(arguments), at.NEXT))
    while begin < num_outputs:
        end = min(begin + share, num_outputs)
        while begin + SIDE <= end:
            _multiply_side(arguments, begin, sums)
            begin += SIDE
        if begin < end:
            multiply_rows(arguments, begin, end - begin, sums)
        begin = share * take(ahead(int64_at(arguments), at.NEXT))
    release()


@inner
def _multiply_side(arguments, row, sums):
    """Multiply 16 rows by all tokens."""
    token, num_tokens, line = 0, load_int64(arguments, at.NUM_TOKENS), _room_of_a_token()
    while token < num_tokens:
        num = min(_MOST, num_tokens - token)
        num_blocks = (num + SIDE - 1) // SIDE
        _sum(arguments, row, token, num_blocks, sums)
        for k in range(num):
            for j in range(SIDE):
                store_int32(line, j, load_int32(sums, j * num_blocks * SIDE + k))
            scale(arguments, row, SIDE, token + k, line)
        token += num


@inner
def _sum(arguments, row, token, num_blocks, sums):
    """Compute sums of products, `sums[row, token]`."""
    length = load_int64(arguments, at.NUM_INPUTS)
    padded = (length + LINE - 1) // LINE * LINE
    weight, levels = load_int64(arguments, at.WEIGHT) + row * length, load_int64(arguments, at.PACKED) + token * padded
    if num_blocks == 1:
        sums_1(weight, length, levels, SIDE * padded, sums)
    else:
        sums_2(weight, length, levels, SIDE * padded, sums)
