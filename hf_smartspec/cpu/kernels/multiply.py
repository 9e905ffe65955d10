"""Products of a few tokens with a weight."""

from ...jit import inner
from ...jit.pointers import ahead, bfloat16_at, float32_at, itemsize_of, like, take, uint8_at, widened
from .packed import MOST_CODES, packed_bytes
from .tiles import PACE, lanes, tile, tile_part
from .vectors import num_lanes

# Compiled code is called with the address of these numbers, int64 each.
# next: incremented by the thread that takes the next share of the work; share: outputs in a share.
# weight, tokens, bias (or 0), outputs: addresses of numbers of one kind.
# at_once: tokens that are multiplied by some rows before the next rows are read.
# threads: incremented by each thread that takes part; scratch: 0, or the address of `scratch_size` float32 for each of
#   these: for tokens that are widened, or sums of parts of rows.
# part_rows: 0, or the rows that `MANY` tokens or more are multiplied by in parts, by one thread at a time.
# packed: 0, or the address of the packed weight: its table, and then its rows.
MULTIPLY_FIELDS = tuple(
    """
    next threads num_tokens num_inputs num_outputs share at_once weight tokens bias outputs scratch scratch_size packed
    part_rows
    """.split()
)
NEXT, THREADS, NUM_TOKENS, NUM_INPUTS, NUM_OUTPUTS, SHARE, AT_ONCE, WEIGHT, TOKENS, BIAS, OUTPUTS = range(11)
SCRATCH, SCRATCH_SIZE, PACKED, PART_ROWS = range(11, 15)

_TOKENS = 12  # a multiple of the tokens of tiles of 8 lanes
_ALWAYS_AT_ONCE, _WIDE_TILE, _TALL_TILE = 16, 6, 8  # tokens
_WIDE_ROWS = 4  # of tiles of `_WIDE_TILE` tokens
_LEVEL_1 = 2**15  # bytes that stay in the level 1 cache while rows are read
_AHEAD = 6 * 2**10  # bytes: rows are prefetched for the first tile that is further ahead
CACHE = 2**16  # numbers that fill half of a small level 2 cache
NARROW_TOKENS = 4  # of the largest tile of 8 lanes
MANY = 32  # tokens from which on long rows are multiplied in parts, with AVX-512
# Numbers in a part, and most tokens and rows of one: a tile's tokens stay in the level 1 cache while all rows are read,
# and rows, tokens and sums in a level 2 cache of 1 MiB.
_PART, _GROUP, _ROWS = 2**10, 96, 48


def tokens_at_once(num_tokens: int, num_inputs: int, itemsize: int) -> int:
    """Return the number of tokens, `itemsize` bytes a number, that stay in the cache while rows are read."""
    if num_lanes() == 8:
        return min(num_tokens, max(_TOKENS, CACHE // num_inputs // _TOKENS * _TOKENS))
    if num_tokens <= _ALWAYS_AT_ONCE:
        return num_tokens
    fitting = _LEVEL_1 // (num_inputs * itemsize)
    if fitting >= 2 * _WIDE_TILE:
        return min(num_tokens, fitting // _WIDE_TILE * _WIDE_TILE)
    # Where not even the tokens of a tile fit, they come from level 2 for every tile, which more tokens do not change.
    return _TALL_TILE if fitting >= _TALL_TILE else _ALWAYS_AT_ONCE


def scratch_size(num_tokens: int, num_inputs: int, itemsize: int) -> int:
    """Return the float32 numbers that a thread needs for products of up to `num_tokens`."""
    if num_lanes() == 8:
        return tokens_at_once(num_tokens, num_inputs, itemsize) * num_inputs
    return _GROUP * _ROWS * num_lanes() if num_tokens >= MANY and are_long(num_inputs, itemsize) else 0


def are_long(num_inputs: int, itemsize: int) -> bool:
    """Return whether rows are multiplied in parts: not even the tokens of a tile stay in the level 1 cache."""
    return num_lanes() == 16 and num_inputs * itemsize * _TALL_TILE > _LEVEL_1


def part_rows(num_outputs: int, num_inputs: int, itemsize: int, num_threads: int) -> int:
    """Return the rows that a thread multiplies in parts at a time, a quarter of its part at most; 0 for short rows."""
    if not are_long(num_inputs, itemsize):
        return 0
    return max(min(_ROWS, num_outputs // (4 * num_threads)) // _WIDE_ROWS * _WIDE_ROWS, _WIDE_ROWS)


@inner
def multiply(a, kind, wide_kind):
    """
    Take the next share of the weight's rows, until no rows are left. Numbers are of the type that `kind` points to.
    Where `a[SCRATCH]` is set, tokens are widened to float32 once, not in each tile, if `wide_kind` is not None; else,
    many tokens are multiplied by long rows in parts.
    """
    weight, tokens = like(kind, a[WEIGHT]), like(kind, a[TOKENS])
    bias, outputs = like(kind, a[BIAS]), like(kind, a[OUTPUTS])
    if wide_kind is not None:
        if a[SCRATCH]:
            wide = ahead(like(wide_kind, a[SCRATCH]), take(ahead(a, THREADS)) * a[SCRATCH_SIZE])
            _multiply(a, weight, tokens, bias, outputs, wide, None)
        else:
            _multiply(a, weight, tokens, bias, outputs, None, None)
    elif a[SCRATCH] and a[PART_ROWS] and a[NUM_TOKENS] >= MANY:
        _multiply_in_parts(a, weight, tokens, bias, outputs)
    elif a[PACKED]:
        _multiply(a, weight, tokens, bias, outputs, None, uint8_at(a[PACKED]))
    else:
        _multiply(a, weight, tokens, bias, outputs, None, None)


@inner
def multiply_narrow(a, kind):
    """Do as `multiply` with a weight in bfloat16, whatever the type of tokens, bias and outputs."""
    tokens, bias, outputs = like(kind, a[TOKENS]), like(kind, a[BIAS]), like(kind, a[OUTPUTS])
    _multiply(a, bfloat16_at(a[WEIGHT]), tokens, bias, outputs, None, None)


@inner
def multiply_wide(a, kind):
    """Do as `multiply` with a weight, bias and outputs in float32, whatever the type of tokens."""
    weight, bias, outputs = float32_at(a[WEIGHT]), float32_at(a[BIAS]), float32_at(a[OUTPUTS])
    _multiply(a, weight, like(kind, a[TOKENS]), bias, outputs, None, None)


@inner
def _multiply(a, weight, tokens, bias, outputs, wide, packed):
    num_outputs, share = a[NUM_OUTPUTS], a[SHARE]
    begin = share * take(ahead(a, NEXT))
    if begin < num_outputs and wide is not None and a[NUM_TOKENS] <= a[AT_ONCE]:
        _widen(tokens, a[NUM_TOKENS] * a[NUM_INPUTS], wide)
    while begin < num_outputs:
        _multiply_share(a, begin, min(begin + share, num_outputs), weight, tokens, bias, outputs, wide, packed)
        begin = share * take(ahead(a, NEXT))


@inner
def _multiply_share(a, row, end, weight, tokens, bias, outputs, wide, packed):
    length, token = a[NUM_INPUTS], 0
    while token < a[NUM_TOKENS]:
        num = tile_width(a[NUM_TOKENS] - token, a[AT_ONCE])
        own, results = ahead(tokens, token * length), ahead(outputs, token * a[NUM_OUTPUTS])
        if wide is None:
            _multiply_rows(a, row, end, num, weight, own, bias, results, packed)
        else:
            if a[NUM_TOKENS] > a[AT_ONCE]:  # else all are wide
                _widen(own, num * length, wide)
            _multiply_rows(a, row, end, num, weight, wide, bias, results, None)
        token += num


@inner
def _widen(numbers, length, wide):
    for index in range(length):
        wide[index] = widened(numbers[index])


@inner
def _multiply_rows(a, row, end, num_tokens, weight, tokens, bias, outputs, packed):
    """Multiply some rows by some tokens, so that the rows of a tile come from memory once."""
    length, stride = a[NUM_INPUTS], a[NUM_OUTPUTS]
    num_rows, most = largest_tile(num_tokens, packed)
    size = num_rows * length * itemsize_of(weight) if packed is None else packed_bytes(num_rows * length)
    num_ahead = 1 + _AHEAD // size
    tiles = _tiles(num_tokens, most, num_rows, length)  # once, since a division takes as long as many products
    while row < end:
        if row + num_rows > end:
            num_rows, tiles = 1, _tiles(num_tokens, 1, 1, length)
        rows, more = ahead(weight, row * length), ahead(bias, row) if a[BIAS] else bias
        # The next rows are prefetched in the order of their memory, which is read faster as one run than as several.
        results, distance = ahead(outputs, row), num_ahead * num_rows * length
        if row + (num_ahead + 1) * num_rows > stride:  # beyond the weight there may be no memory to prefetch
            distance = 0
        if packed is None:
            _multiply_tiles(num_rows, tiles, rows, tokens, more, results, length, stride, distance, None)
        else:
            own = ahead(packed, MOST_CODES + packed_bytes(row * length)), packed
            _multiply_tiles(num_rows, tiles, rows, tokens, more, results, length, stride, distance, own)
        row += num_rows


@inner
def largest_tile(num_tokens, packed):
    """Return the numbers of rows and tokens of the largest tile, of a `packed` weight unless that is None."""
    if packed is not None:
        return 4, 4
    if lanes() == 8:
        return 3, NARROW_TOKENS
    return (3, 8) if num_tokens == 7 or num_tokens == 8 else (4, 6)


@inner
def _multiply_tiles(num_rows, tiles, rows, tokens, bias, outputs, length, stride, distance, packed):
    num_tiles, width, num_wider, part, pace = tiles
    for number in range(num_tiles):
        num = width + 1 if number < num_wider else width
        tile(num_rows, num, rows, tokens, bias, outputs, length, length, stride, distance, pace, packed)
        tokens, outputs = ahead(tokens, num * length), ahead(outputs, num * stride)
        if distance:
            distance += part


@inner
def _multiply_in_parts(a, weight, tokens, bias, outputs):
    """Do as `_multiply` with many tokens, part after part of some rows and tokens."""
    share, length, stride = a[PART_ROWS], a[NUM_INPUTS], a[NUM_OUTPUTS]
    sums = ahead(float32_at(a[SCRATCH]), take(ahead(a, THREADS)) * a[SCRATCH_SIZE])
    row = share * take(ahead(a, NEXT))
    while row < stride:
        num_rows, rows, token = min(share, stride - row), ahead(weight, row * length), 0
        more = ahead(bias, row) if a[BIAS] else bias
        while token < a[NUM_TOKENS]:
            num = tile_width(a[NUM_TOKENS] - token, _GROUP)
            own, results = ahead(tokens, token * length), ahead(outputs, token * stride + row)
            for begin in range(0, length, _PART):
                _add_part(a, begin, num_rows, num, rows, own, more, results, sums)
            token += num
        row = share * take(ahead(a, NEXT))


@inner
def _add_part(a, begin, num_rows, num_tokens, weight, tokens, bias, outputs, sums):
    """
    Add the products of a part of some rows and tokens to their sums; with the last part, store outputs. Sums lie tile
    by tile: four rows by some tokens, and of rows that are left one by one.
    """
    length, stride = a[NUM_INPUTS], a[NUM_OUTPUTS]
    is_first, is_last, some = begin == 0, begin + _PART >= length, min(_PART, length - begin)
    (num_tiles, width, num_wider), token = tile_widths(num_tokens, _WIDE_TILE), 0
    for number in range(num_tiles):
        num, row = width + 1 if number < num_wider else width, 0
        while row < num_rows:
            rows = _WIDE_ROWS if row + _WIDE_ROWS <= num_rows else 1
            few = num if rows > 1 else 1
            more = ahead(bias, row) if a[BIAS] else bias
            for first in range(token, token + num, few):
                own, results = ahead(tokens, first * length + begin), ahead(outputs, first * stride + row)
                place = ahead(sums, (row * num_tokens + rows * first) * lanes())
                numbers = ahead(weight, row * length + begin)
                tile_part(rows, few, numbers, own, more, results, some, length, stride, place, is_first, is_last)
            row += rows
        token += num


@inner
def _tiles(num_tokens, most, num_rows, length):
    """
    Return `tile_widths`, and the numbers that a tile prefetches, in all and for `PACE` of a row: so memory is read
    while all tiles compute.
    """
    num_tiles, width, num_wider = tile_widths(num_tokens, most)
    return num_tiles, width, num_wider, num_rows * length // num_tiles, num_rows * PACE // num_tiles


@inner
def tile_widths(num_tokens, most):
    """Return the number of tiles for these tokens, the tokens of a tile, and how many tiles have one more."""
    num_tiles = (num_tokens + most - 1) // most
    return num_tiles, num_tokens // num_tiles, num_tokens % num_tiles


@inner
def tile_width(num_left, most):
    """Return how many of the tokens that are left come next, at most `most`: about as many as later."""
    num_tiles = (num_left + most - 1) // most
    return (num_left + num_tiles - 1) // num_tiles
