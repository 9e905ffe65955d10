"""A few tokens times a weight."""

from ...jit import callback, inner
from ...jit.pointers import ahead, bfloat16_at, float32_at, int64_at, prefetch, take, widened
from .tiles import lanes, tile

# What compiled code is called with: the address of numbers, int64 each.
# next: counted up by whoever takes the next share of the work; share: of outputs, how many these are.
# weight, tokens, bias (or 0), outputs: addresses of numbers of one kind.
# at_once: tokens by which some rows are multiplied before the next rows are.
# threads: counted up by each of them; wide: address of `wide_size` float32 for each, where that is asked for, or 0.
FIELDS = tuple(
    "next threads num_tokens num_inputs num_outputs share at_once weight tokens bias outputs wide wide_size".split()
)
NEXT, THREADS, NUM_TOKENS, NUM_INPUTS, NUM_OUTPUTS, SHARE, AT_ONCE, WEIGHT, TOKENS, BIAS, OUTPUTS, WIDE, WIDE_SIZE = (
    range(13)
)

_AHEAD = 2  # tiles of rows that are sent for before their turn
_LINE = 32  # numbers of bfloat16 that come from memory together
_TOKENS = 12  # a multiple of what tiles have
_CACHE = 2**16  # numbers: half of a small cache of the second level
NARROW_TOKENS, _NARROW_ROWS = 4, 3  # of the largest tile of 8 lanes


def tokens_at_once(num_tokens: int, num_inputs: int) -> int:
    """As many as stay in the cache while rows go by."""
    return min(num_tokens, max(_TOKENS, _CACHE // num_inputs // _TOKENS * _TOKENS))


def wide_size(at_once: int, num_inputs: int) -> int:
    """Numbers of float32 that a thread needs for tokens and rows which are widened."""
    return (at_once + _NARROW_ROWS) * num_inputs


@callback
def multiply_float32(address):
    """Takes the next share of the weight's rows, until there are none left."""
    a = int64_at(address)
    _multiply(a, float32_at(a[WEIGHT]), float32_at(a[TOKENS]), float32_at(a[BIAS]), float32_at(a[OUTPUTS]), None)


@callback
def multiply_bfloat16(address):
    """The same in another dtype."""
    a = int64_at(address)
    _multiply(a, bfloat16_at(a[WEIGHT]), bfloat16_at(a[TOKENS]), bfloat16_at(a[BIAS]), bfloat16_at(a[OUTPUTS]), None)


@callback
def multiply_widened(address):
    """The same for more tokens than a tile has: numbers become float32 once, rather than in each tile."""
    a = int64_at(address)
    weight, tokens = bfloat16_at(a[WEIGHT]), bfloat16_at(a[TOKENS])
    bias, outputs = bfloat16_at(a[BIAS]), bfloat16_at(a[OUTPUTS])
    wide = ahead(float32_at(a[WIDE]), take(ahead(a, THREADS)) * a[WIDE_SIZE])
    _multiply(a, weight, tokens, bias, outputs, wide)


@inner
def _multiply(a, weight, tokens, bias, outputs, wide):
    num_outputs, share = a[NUM_OUTPUTS], a[SHARE]
    begin = share * take(ahead(a, NEXT))
    while begin < num_outputs:
        _multiply_share(a, begin, min(begin + share, num_outputs), weight, tokens, bias, outputs, wide)
        begin = share * take(ahead(a, NEXT))


@inner
def _multiply_share(a, row, end, weight, tokens, bias, outputs, wide):
    length, token = a[NUM_INPUTS], 0
    while token < a[NUM_TOKENS]:
        num = min(a[AT_ONCE], a[NUM_TOKENS] - token)
        own, results = ahead(tokens, token * length), ahead(outputs, token * a[NUM_OUTPUTS])
        if wide is None:
            _multiply_rows(a, row, end, num, weight, own, bias, results, None)
        else:
            _widen(own, num * length, wide)
            _multiply_rows(a, row, end, num, weight, wide, bias, results, ahead(wide, num * length))
        token += num


@inner
def _widen(numbers, length, wide):
    for index in range(length):
        wide[index] = widened(numbers[index])


@inner
def _multiply_rows(a, row, end, num_tokens, weight, tokens, bias, outputs, wide):
    """Some rows times some tokens: a tile's rows come from memory once."""
    length, stride = a[NUM_INPUTS], a[NUM_OUTPUTS]
    num_rows, most = largest_tile(num_tokens)
    while row < end:
        if row + num_rows > end:
            num_rows, most = 1, 1
        rows, more = ahead(weight, row * length), ahead(bias, row) if a[BIAS] else bias
        results, distance = ahead(outputs, row), _AHEAD * num_rows * length
        if row + (_AHEAD + 1) * num_rows > stride:  # memory that is not there would be looked for
            distance = 0
        if wide is None:
            _multiply_tiles(num_rows, most, num_tokens, rows, tokens, more, results, length, stride, distance)
        else:
            for index in range(0, num_rows * length, _LINE):
                prefetch(rows, distance + index)
            _widen(rows, num_rows * length, wide)
            _multiply_tiles(num_rows, most, num_tokens, wide, tokens, more, results, length, stride, 0)
        row += num_rows


@inner
def largest_tile(num_tokens):
    """Rows and tokens."""
    if lanes() == 8:
        return _NARROW_ROWS, NARROW_TOKENS
    return (3, 8) if num_tokens == 7 or num_tokens == 8 else (4, 6)


@inner
def _multiply_tiles(num_rows, most, num_tokens, rows, tokens, bias, outputs, length, stride, distance):
    token = number = 0
    num_tiles = (num_tokens + most - 1) // most
    while token < num_tokens:
        num = _width(num_tokens - token, most)
        own, results = ahead(tokens, token * length), ahead(outputs, token * stride)
        # Each tile sends for its share of the rows behind: memory is read while all of them compute.
        first, last = num_rows * number // num_tiles, num_rows * (number + 1) // num_tiles
        tile(num_rows, num, rows, own, bias, results, length, length, stride, distance, first, last)
        token, number = token + num, number + 1


@inner
def _width(num_left, most):
    """Tokens of the next tile: about as many as in those behind it."""
    num_tiles = (num_left + most - 1) // most
    return (num_left + num_tiles - 1) // num_tiles
