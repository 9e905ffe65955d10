"""A few tokens times a weight."""

from ....jit import callback, inner
from ....jit.pointers import ahead, bfloat16_at, float32_at, int64_at, take
from .tiles import tile_1x1, tile_3x7, tile_3x8, tile_4x1, tile_4x2, tile_4x3, tile_4x4, tile_4x5, tile_4x6

# What compiled code is called with: the address of numbers, int64 each.
# next: counted up by whoever takes the next share of the work; share: of outputs, how many these are.
# weight, tokens, bias (or 0), outputs: addresses of numbers of one kind.
FIELDS = tuple("next num_tokens num_inputs num_outputs share weight tokens bias outputs".split())
NEXT, NUM_TOKENS, NUM_INPUTS, NUM_OUTPUTS, SHARE, WEIGHT, TOKENS, BIAS, OUTPUTS = range(9)


@callback
def multiply_float32(address):
    """Takes the next share of the weight's rows, until there are none left."""
    a = int64_at(address)
    _multiply(a, float32_at(a[WEIGHT]), float32_at(a[TOKENS]), float32_at(a[BIAS]), float32_at(a[OUTPUTS]))


@callback
def multiply_bfloat16(address):
    """The same in another dtype."""
    a = int64_at(address)
    _multiply(a, bfloat16_at(a[WEIGHT]), bfloat16_at(a[TOKENS]), bfloat16_at(a[BIAS]), bfloat16_at(a[OUTPUTS]))


@inner
def _multiply(a, weight, tokens, bias, outputs):
    num_outputs, share = a[NUM_OUTPUTS], a[SHARE]
    begin = share * take(ahead(a, NEXT))
    while begin < num_outputs:
        _multiply_rows(a, begin, min(begin + share, num_outputs), weight, tokens, bias, outputs)
        begin = share * take(ahead(a, NEXT))


@inner
def _multiply_rows(a, row, end, weight, tokens, bias, outputs):
    num_tokens, length, stride = a[NUM_TOKENS], a[NUM_INPUTS], a[NUM_OUTPUTS]
    num_rows = 3 if num_tokens == 7 or num_tokens == 8 else 4
    while row < end:
        if row + num_rows > end:
            num_rows = 1
        _tiles(
            num_rows, num_tokens, ahead(weight, row * length), tokens, ahead(bias, row) if a[BIAS] else bias,
            ahead(outputs, row), length, stride,
        )  # fmt: skip
        row += num_rows


@inner
def _tiles(num_rows, num_tokens, weight, tokens, bias, outputs, length, stride):
    """Some rows times all tokens: they come from memory once."""
    token = 0
    while token < num_tokens:
        own, results = ahead(tokens, token * length), ahead(outputs, token * stride)
        if num_rows == 1:
            num = 1
            tile_1x1(weight, own, bias, results, length, stride)
        elif num_rows == 3:
            num = num_tokens
            _three_rows(num, weight, own, bias, results, length, stride)
        else:
            num = _width(num_tokens - token)
            _four_rows(num, weight, own, bias, results, length, stride)
        token += num


@inner
def _width(num_left):
    """Tokens of the next tile of four rows: at most six, and about as many in the one behind it."""
    if num_left <= 6:
        return num_left
    return (num_left + 1) // 2 if num_left <= 12 else 6


@inner
def _three_rows(num_tokens, weight, tokens, bias, outputs, length, stride):
    if num_tokens == 8:
        tile_3x8(weight, tokens, bias, outputs, length, stride)
    else:
        tile_3x7(weight, tokens, bias, outputs, length, stride)


@inner
def _four_rows(num_tokens, weight, tokens, bias, outputs, length, stride):
    if num_tokens == 6:
        tile_4x6(weight, tokens, bias, outputs, length, stride)
    elif num_tokens == 5:
        tile_4x5(weight, tokens, bias, outputs, length, stride)
    elif num_tokens == 4:
        tile_4x4(weight, tokens, bias, outputs, length, stride)
    elif num_tokens == 3:
        tile_4x3(weight, tokens, bias, outputs, length, stride)
    elif num_tokens == 2:
        tile_4x2(weight, tokens, bias, outputs, length, stride)
    else:
        tile_4x1(weight, tokens, bias, outputs, length, stride)
