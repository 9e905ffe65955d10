"""A few tokens times a float32 weight."""

from ...jit import callback, inner
from ..quantized.kernels.memory import load_float32, load_int64, store_float32, take
from .tiles import tile_1x1, tile_3x7, tile_3x8, tile_4x1, tile_4x2, tile_4x3, tile_4x4, tile_4x5, tile_4x6

# What compiled code is called with: the address of numbers, int64 each.
# next: counted up by whoever takes the next share of the work; share: of outputs, how many these are.
# tokens, weight, bias (or 0), outputs: addresses of float32.
FIELDS = tuple("next num_tokens num_inputs num_outputs share tokens weight bias outputs".split())
NEXT, NUM_TOKENS, NUM_INPUTS, NUM_OUTPUTS, SHARE, TOKENS, WEIGHT, BIAS, OUTPUTS = range(9)


@callback
def multiply(arguments):
    """Takes the next share of the weight's rows, until there are none left."""
    num_outputs, share = load_int64(arguments, NUM_OUTPUTS), load_int64(arguments, SHARE)
    begin = share * take(arguments, NEXT)
    while begin < num_outputs:
        end = min(begin + share, num_outputs)
        _multiply_rows(arguments, begin, end)
        _add_bias(arguments, begin, end)
        begin = share * take(arguments, NEXT)


@inner
def _multiply_rows(arguments, row, end):
    length, num_tokens = load_int64(arguments, NUM_INPUTS), load_int64(arguments, NUM_TOKENS)
    stride, tokens = load_int64(arguments, NUM_OUTPUTS), load_int64(arguments, TOKENS)
    weight, outputs = load_int64(arguments, WEIGHT), load_int64(arguments, OUTPUTS)
    if num_tokens == 7 or num_tokens == 8:
        while row + 3 <= end:
            _three_rows(weight + 4 * row * length, tokens, outputs + 4 * row, length, stride, num_tokens)
            row += 3
    while row + 4 <= end:
        _four_rows(weight + 4 * row * length, tokens, outputs + 4 * row, length, stride, num_tokens)
        row += 4
    while row < end:
        for k in range(num_tokens):
            at = outputs + 4 * (row + k * stride)
            tile_1x1(weight + 4 * row * length, tokens + 4 * k * length, at, length, stride)
        row += 1


@inner
def _three_rows(weight, tokens, outputs, length, stride, num_tokens):
    if num_tokens == 8:
        tile_3x8(weight, tokens, outputs, length, stride)
    else:
        tile_3x7(weight, tokens, outputs, length, stride)


@inner
def _four_rows(weight, tokens, outputs, length, stride, num_tokens):
    token = 0
    while token < num_tokens:
        left = num_tokens - token
        num = left if left <= 6 else (left + 1) // 2 if left <= 12 else 6
        _tile(weight, tokens + 4 * token * length, outputs + 4 * token * stride, length, stride, num)
        token += num


@inner
def _tile(weight, tokens, outputs, length, stride, num_tokens):
    if num_tokens == 6:
        tile_4x6(weight, tokens, outputs, length, stride)
    elif num_tokens == 5:
        tile_4x5(weight, tokens, outputs, length, stride)
    elif num_tokens == 4:
        tile_4x4(weight, tokens, outputs, length, stride)
    elif num_tokens == 3:
        tile_4x3(weight, tokens, outputs, length, stride)
    elif num_tokens == 2:
        tile_4x2(weight, tokens, outputs, length, stride)
    else:
        tile_4x1(weight, tokens, outputs, length, stride)


@inner
def _add_bias(arguments, begin, end):
    bias, outputs = load_int64(arguments, BIAS), load_int64(arguments, OUTPUTS)
    if bias:
        for token in range(load_int64(arguments, NUM_TOKENS)):
            line = outputs + 4 * token * load_int64(arguments, NUM_OUTPUTS)
            for row in range(begin, end):
                store_float32(line, row, load_float32(line, row) + load_float32(bias, row))
