"""Products of a few tokens with a weight that lies the other way round, `[num_inputs, num_outputs]`."""

from itertools import chain

from llvmlite import ir  # type: ignore[import-untyped]
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from ...jit import inner
from ...jit.pointers import ahead, like, take
from ...jit.writing import I64, float32_of, written
from .multiply import BIAS, NEXT, NUM_INPUTS, NUM_OUTPUTS, NUM_TOKENS, OUTPUTS, SHARE, TOKENS, WEIGHT, tile_width
from .tiles import lanes
from .vectors import Lanes, num_lanes

_PART = 128  # inputs whose products are added up before their sum is added to that of the parts before
_AHEAD = 256  # vectors from those that are read to those that are prefetched meanwhile
# Vectors of columns in a tile: of few tokens, of more, and where fewer columns are left. The most tokens of each by
# lanes: their sums fit the CPU's registers, 32 of 16 numbers or 16 of 8.
_WIDE, _NARROW, _LEAST = 8, 4, 1
_FEW, _MANY = {16: 3, 8: 1}, {16: 6, 8: 3}
COLUMNS = 128  # a multiple of a tile's columns


@written(types.int64)
def _most_of_wide(builder):
    """Return the most tokens of a wide tile, as a constant of compiled code."""
    return I64(_FEW[num_lanes()])


@written(types.int64)
def _most_of_narrow(builder):
    return I64(_MANY[num_lanes()])


@inner
def multiply_columns(a, kind):
    """
    Take the next share of the weight's columns, until none are left. The fields are those of `multiply`, but for the
    weight, `[num_inputs, num_outputs]`. Every sum is added up in one order, whatever the number of tokens.
    """
    weight, tokens = like(kind, a[WEIGHT]), like(kind, a[TOKENS])
    bias, outputs = like(kind, a[BIAS]), like(kind, a[OUTPUTS])
    num_outputs, share = a[NUM_OUTPUTS], a[SHARE]
    begin = share * take(ahead(a, NEXT))
    while begin < num_outputs:
        column, end = begin, min(begin + share, num_outputs)
        while column < end:
            column += _multiply_tiles(a, column, end, weight, tokens, bias, outputs)
        begin = share * take(ahead(a, NEXT))


@inner
def _multiply_tiles(a, column, end, weight, tokens, bias, outputs):
    """Multiply as many columns as a tile has by all tokens, so that they come from memory once; return how many."""
    length, stride, token = a[NUM_INPUTS], a[NUM_OUTPUTS], 0
    vectors, most = _largest_tile(a[NUM_TOKENS], end - column)
    own, more = ahead(weight, column), ahead(bias, column) if a[BIAS] else bias
    while token < a[NUM_TOKENS]:
        num = tile_width(a[NUM_TOKENS] - token, most)
        results = ahead(outputs, token * stride + column)
        column_tile(vectors, num, own, ahead(tokens, token * length), more, results, length, stride)
        token += num
    return vectors * lanes()


@inner
def _largest_tile(num_tokens, num_columns):
    """Return the vectors of columns and the most tokens of the largest tile."""
    few, many = _most_of_wide(), _most_of_narrow()
    if num_tokens <= few and num_columns >= _WIDE * lanes():
        return _WIDE, few
    return (_NARROW if num_columns >= _NARROW * lanes() else _LEAST), many


@intrinsic
def column_tile(typing_context, num_vectors, num_tokens, weight, tokens, bias, outputs, length, stride):
    """
    Multiply `num_vectors` vectors of neighbouring columns by `num_tokens` neighbouring tokens of `length` numbers, and
    store sums as `outputs[token * stride + column]`, with `bias[column]` added unless `bias` is null. The weight's rows
    lie `stride` numbers apart. Only the sizes that `_largest_tile` returns are compiled; other tiles store no outputs.

    Numbers are float32, or the bits of bfloat16, all of one kind; outputs are rounded once.
    """

    def generate(context, builder, signature, arguments):
        number = num_lanes()
        vectors, most = Lanes(builder, number, signature.args[2].dtype), {_WIDE: _FEW, _NARROW: _MANY, _LEAST: _MANY}
        sizes = [(columns, num) for columns in most for num in range(1, most[columns][number] + 1)]
        done = builder.append_basic_block("done")
        size = builder.switch(builder.add(builder.mul(arguments[0], I64(_WIDE)), arguments[1]), done)
        for columns, num in sizes:
            block = builder.append_basic_block(f"columns_{columns}x{num}")
            size.add_case(I64(columns * _WIDE + num), block)
            builder.position_at_end(block)
            _write_tile(vectors, columns, num, *arguments[2:])
            builder.branch(done)
        builder.position_at_end(done)
        return context.get_dummy_value()

    number = types.int64
    return types.void(number, number, weight, tokens, bias, outputs, number, number), generate


def _write_tile(vectors, num_vectors, num_tokens, weight, tokens, bias, outputs, length, stride):
    builder, sizes = vectors.builder, (num_tokens, num_vectors)
    totals, places = _zeros(vectors, *sizes), [I64(at * vectors.number) for at in range(num_vectors)]
    with cgutils.for_range_slice(builder, I64(0), length, I64(_PART), I64) as (begin, _):
        sums, end = _zeros(vectors, *sizes), builder.add(begin, I64(_PART))
        end = builder.select(builder.icmp_signed("<", end, length), end, length)
        with cgutils.for_range_slice(builder, begin, end, I64(1), I64) as (row, _):
            _prefetch(vectors, num_vectors, weight, row, length, stride)
            start = builder.mul(row, stride)
            factors = []
            for token in range(num_tokens):
                factor = builder.load(builder.gep(tokens, [builder.add(row, builder.mul(I64(token), length))]))
                factors.append(vectors.filled_with(float32_of(builder, factor) if vectors.is_half else factor))
            for place, own in zip(places, zip(*sums)):
                numbers = vectors.load(weight, builder.add(start, place))
                for one, factor in zip(own, factors):
                    vectors.add_products(one, factor, numbers)
        for own, more in zip(chain.from_iterable(totals), chain.from_iterable(sums)):
            builder.store(builder.fadd(builder.load(own), builder.load(more)), own)
    biases = _zeros(vectors, 1, num_vectors)[0]
    with builder.if_then(builder.icmp_unsigned("!=", bias, ir.Constant(bias.type, None))):
        for place, own in zip(places, biases):
            builder.store(vectors.load(bias, place), own)
    for token, own in enumerate(totals):
        for place, total, more in zip(places, own, biases):
            found = builder.fadd(builder.load(total), builder.load(more))
            pointer = builder.gep(outputs, [builder.add(place, builder.mul(I64(token), stride))])
            vectors.store_parts(found, [pointer])


def _zeros(vectors, num_tokens, num_vectors):
    """Return sums of tokens and vectors, which are zeros whenever this place is reached."""
    found = [[vectors.zeros() for _ in range(num_vectors)] for _ in range(num_tokens)]
    for own in chain.from_iterable(found):
        vectors.builder.store(ir.Constant(vectors.floats, [0.0] * vectors.number), own)
    return found


def _prefetch(vectors, num_vectors, weight, row, length, stride):
    """Prefetch the numbers of a row that comes soon, or of the next columns' first rows."""
    builder, columns = vectors.builder, I64(num_vectors * vectors.number)
    due = builder.add(row, I64(_AHEAD // num_vectors))
    is_over = builder.icmp_signed(">=", due, length)
    due = builder.select(is_over, builder.sub(due, length), due)
    first = builder.add(builder.mul(due, stride), builder.select(is_over, columns, I64(0)))
    vectors.prefetch(weight, first, num_vectors * vectors.number)
