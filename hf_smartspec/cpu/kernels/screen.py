"""The best tokens of a head by its int8 copy, and the exact scores of those few that may be the best."""

from math import sqrt

import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba import types
from numba.core import cgutils

from ...jit import inner
from ...jit.pointers import ahead, float32_at, get, int8_at, int64_at, like, take
from ...jit.writing import FLOAT, I64, written
from .dots import GROUP, PART
from .softmax import largest
from .tiles import tile

# Compiled code is called with the address of these numbers, int64 each.
# next: incremented by the thread that takes the next share of the work: `share` neighbouring chunks of a token.
# num_outputs, num_chunks: rows of the head, and chunks of `CHUNK` of them.
# weight, tokens: addresses of `[num_outputs, size]` and `[num_tokens, size]`, of one kind.
# levels, steps: addresses of the rounded tokens, as `LEVELS_FIELDS` has them.
# errors, norms: addresses of float32 `[num_outputs]`, those of `Screen`.
# scores: address of float32 `[num_tokens, num_outputs]`, products of the rounded tokens and the int8 copy.
# sizes: address of float32 `[num_tokens, 2]`, lengths of a token, and of what it loses by rounding.
# lowest, highest: addresses of float32 `[num_tokens, num_chunks]`: the largest exact score of a chunk is not below the
#   one, and not above the other.
# products: address of `[num_tokens, num_chunks]` of the weight's kind, for exact scores while they are compared.
# best, places: addresses of float32 and int64 `[num_tokens, num_chunks]`: the largest exact score of a chunk that may
#   be a token's best, and its row; -infinity and 0 for the other chunks.
# eps (float64): relative distance of neighbouring numbers of the weight's kind, if exact scores are rounded to it.
SCREEN_FIELDS = tuple(
    "next threads num_tokens size num_outputs num_chunks share weight tokens levels steps errors norms scores sizes "
    "lowest highest products best places eps".split()
)
(
    _NEXT, _THREADS, _NUM_TOKENS, _SIZE, _NUM_OUTPUTS, _NUM_CHUNKS, _SHARE, _WEIGHT, _TOKENS, _LEVELS, _STEPS, _ERRORS,
    _NORMS, _SCORES, _SIZES, _LOWEST, _HIGHEST, _PRODUCTS, _BEST, _PLACES, _EPS,
) = range(21)  # fmt: skip

CHUNK = 256  # rows of a head that are left out together
MOST = 1e15  # numbers beyond it are not screened, so that no bound overflows
_MORE = np.float32(1.001)  # lengths are sums of rounded squares
_LEAST = np.float32(1e-30)  # more than sums lose where products are so small that they are rounded to 0


@written(types.int64)
def _room(builder):
    """Return the address of memory for two bounds of each row of a chunk, freed when the calling function returns."""
    return builder.ptrtoint(cgutils.alloca_once(builder, ir.ArrayType(FLOAT, 2 * CHUNK)), I64)


@inner
def bound(a, kind):
    """Bound the best scores of the next chunks, until none are left."""
    chunks, shares, room = a[_NUM_CHUNKS], (a[_NUM_CHUNKS] + a[_SHARE] - 1) // a[_SHARE], _room()
    number = take(ahead(a, _NEXT))
    while number < a[_NUM_TOKENS] * shares:
        token, begin = number // shares, number % shares * a[_SHARE]
        sizes = ahead(float32_at(a[_SIZES]), 2 * token)
        _measure(a, kind, token, sizes)  # for each share anew: it takes less time than waiting for one another
        for chunk in range(begin, min(begin + a[_SHARE], chunks)):
            num = _bounds(a, token, chunk, sizes, room)
            place = token * chunks + chunk
            float32_at(a[_LOWEST])[place] = largest(float32_at(room), num)
            float32_at(a[_HIGHEST])[place] = largest(ahead(float32_at(room), CHUNK), num)
        number = take(ahead(a, _NEXT))


@inner
def _measure(a, kind, token, sizes):
    """Store the lengths of a token and of what it loses by rounding; NaN if it is too long for its scores' bounds."""
    size = a[_SIZE]
    numbers = ahead(like(kind, a[_TOKENS]), token * size)
    groups = (size + GROUP - 1) // GROUP
    levels = ahead(int8_at(a[_LEVELS]), token * groups * GROUP)
    steps = ahead(float32_at(a[_STEPS]), token * groups * (GROUP // PART))
    squares = lost = 0.0
    for index in range(size):
        number = np.float64(get(numbers, index))  # squares of small numbers would vanish in float32
        loss = number - levels[index] * steps[index // PART]
        squares += number * number
        lost += loss * loss
    sizes[0] = np.float32(sqrt(squares)) * _MORE if squares < MOST * MOST else np.float32(np.nan)
    sizes[1] = np.float32(sqrt(lost)) * _MORE


@inner
def _bounds(a, token, chunk, sizes, room):
    """Store the lower bounds of a chunk's scores, and `CHUNK` numbers later the upper ones; return their number."""
    begin = chunk * CHUNK
    num = min(a[_NUM_OUTPUTS] - begin, CHUNK)
    scores = ahead(float32_at(a[_SCORES]), token * a[_NUM_OUTPUTS] + begin)
    errors, norms = ahead(float32_at(a[_ERRORS]), begin), ahead(float32_at(a[_NORMS]), begin)
    lower, upper, length, lost = float32_at(room), ahead(float32_at(room), CHUNK), sizes[0], sizes[1]
    for index in range(num):
        # |w x - w' x'| <= |w - w'| |x| + |w'| |x - x'|, where w' and x' are rounded (Cauchy-Schwarz).
        error = errors[index] * length + norms[index] * lost + _LEAST
        lower[index] = scores[index] - error
        upper[index] = scores[index] + error
    return num


@inner
def pick(a, numbers, kind):
    """
    Compute the exact scores of rows of the next chunks that may be the best of all, until no chunks are left: in the
    order of sums of `multiply`, so that these are its results.
    """
    chunks, shares, room = a[_NUM_CHUNKS], (a[_NUM_CHUNKS] + a[_SHARE] - 1) // a[_SHARE], _room()
    number = take(ahead(a, _NEXT))
    while number < a[_NUM_TOKENS] * shares:
        token, begin = number // shares, number % shares * a[_SHARE]
        most = largest(ahead(float32_at(a[_LOWEST]), token * chunks), chunks)
        least = most - abs(most) * numbers[_EPS]  # rounded scores may be equal
        for chunk in range(begin, min(begin + a[_SHARE], chunks)):
            place = token * chunks + chunk
            float32_at(a[_BEST])[place] = -np.float32(np.inf)
            int64_at(a[_PLACES])[place] = 0
            if float32_at(a[_HIGHEST])[place] >= least:
                num = _bounds(a, token, chunk, ahead(float32_at(a[_SIZES]), 2 * token), room)
                _compare(a, kind, token, chunk, ahead(float32_at(room), CHUNK), num, least)
        number = take(ahead(a, _NEXT))


@inner
def _compare(a, kind, token, chunk, upper, num, least):
    """Store the best exact score of a chunk, and its row, the first one if several are equal."""
    size, place, begin = a[_SIZE], token * a[_NUM_CHUNKS] + chunk, chunk * CHUNK
    weight, own = like(kind, a[_WEIGHT]), ahead(like(kind, a[_TOKENS]), token * size)
    product = ahead(like(kind, a[_PRODUCTS]), place)
    best = float32_at(a[_BEST])
    for index in range(num):
        if upper[index] >= least:
            row = ahead(weight, (begin + index) * size)
            tile(1, 1, row, own, like(kind, 0), product, size, size, 1, 0, 0, None)
            score = get(product, 0)
            if score > best[place]:
                best[place] = score
                int64_at(a[_PLACES])[place] = begin + index
