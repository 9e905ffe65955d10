"""Sums of products of float32 or bfloat16, in vectors as wide as the CPU has them."""

from collections.abc import Callable

from llvmlite import ir  # type: ignore[import-untyped]
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from ...jit.writing import FLOAT, I32, I64, prefetch
from .packed import Packed, can_unpack
from .vectors import Lanes, Pairs, Widened, has_pairs, num_lanes

# Sums of rows, by lanes, and vectors of a row, that are computed side by side: these sums, a vector and its factors fit
# the CPU's registers, 32 of 16 numbers or 16 of 8.
_MOST_SUMS, _TOGETHER = {16: 4, 8: 3}, 4
_FEW_SUMS = 8  # sums that leave enough registers for all numbers that are read
PACE = 2**12  # numbers of a row, for which a tile's `pace` is given
_SHIFT = 8  # bits; the number of tokens takes fewer


# Tokens of tiles, by lanes and rows: sizes that fit the CPU's registers, 32 of 16 numbers or 16 of 8.
_PACKED_SIZES = {1: (1,), 4: (1, 2, 3, 4)}
_SIZES = {16: {1: (1,), 3: (7, 8), 4: (1, 2, 3, 4, 5, 6)}, 8: {1: (1,), 3: (1, 2, 3, 4)}}


@intrinsic
def lanes(typing_context):
    """Return `num_lanes`, as a constant of compiled code."""
    return types.int64(), lambda context, builder, signature, arguments: I64(num_lanes())


@intrinsic
def tokens_at(typing_context, kind, address):
    """
    Return the pointer to numbers at `address` by which `tile` multiplies those of the type that `kind` points to: of
    float32, or of the same type where the CPU multiplies pairs of bfloat16.
    """
    pointer = kind if has_pairs() else types.CPointer(types.float32)

    def generate(context, builder, signature, arguments):
        return builder.inttoptr(arguments[1], context.get_value_type(signature.return_type))

    return pointer(kind, types.int64), generate


@intrinsic
def most_sums(typing_context):
    """Return the most sums of `add_weighted`, as a constant of compiled code."""
    return types.int64(), lambda context, builder, signature, arguments: I64(_MOST_SUMS[num_lanes()])


@intrinsic
def tile(
    typing_context,
    num_rows,
    num_tokens,
    weight,
    tokens,
    bias,
    outputs,
    length,
    row_stride,
    stride,
    distance,
    pace,
    packed,
):
    """
    Multiply `num_rows` rows of a weight by `num_tokens` neighbouring tokens, and store sums as `outputs[token * stride
    + row]`, with `bias[row]` added unless `bias` is null. Rows and tokens have `length` numbers, a multiple of 16; rows
    lie `row_stride` numbers apart. Only the sizes in `_SIZES` are compiled; other tiles store no outputs.

    Where `packed` is not None, but pointers to packed rows and their table, rows are read from there (`Packed`).

    Meanwhile, numbers that begin `distance` after the first row's are prefetched in order, `pace` of them for every
    `PACE` that a row has, unless both are None; they should exist.

    Numbers are float32, or the bits of bfloat16; outputs and biases are of one kind, and outputs are rounded once.
    Products are summed in the same order in every tile, so a token's result does not depend on the others.
    """

    def generate(context, builder, signature, arguments):
        weight, token, output = (signature.args[place].dtype for place in (2, 3, 5))
        kinds = factors, *_ = _kinds(builder, weight, token, output)
        ahead = (None, None) if distance == types.none else arguments[9:11]
        reader = factors if packed == types.none else Packed(factors, *cgutils.unpack_tuple(builder, arguments[11]))
        is_plain, are_pairs = packed == types.none, can_unpack() and weight == token == types.uint16
        of_rows = _SIZES[num_lanes()] if is_plain else _PACKED_SIZES if are_pairs else {}
        sizes = [(rows, number) for rows, tokens in of_rows.items() for number in tokens]
        done = builder.append_basic_block("done")
        size = builder.switch(_code_of(builder, *arguments[:2]), done)
        for rows, number in sizes:
            block = builder.append_basic_block(f"tile_{rows}x{number}")
            size.add_case(I64(rows << _SHIFT | number), block)
            builder.position_at_end(block)
            _write_tile(reader, kinds, rows, number, *arguments[2:9], *ahead)
            builder.branch(done)
        builder.position_at_end(done)
        return context.get_dummy_value()

    number = types.int64
    return types.void(number, number, weight, tokens, bias, outputs, *[number] * 3, distance, pace, packed), generate


@intrinsic
def tile_part(
    typing_context, num_rows, num_tokens, weight, tokens, bias, outputs, num, length, stride, sums, is_first, is_last
):
    """
    Add up `num` of the `length` numbers of rows and tokens, as `tile` does: beginning with the sums of the part before,
    at `sums` (`[num_rows, num_tokens, lanes]` float32), unless it `is_first`, and storing these there; or, if it
    `is_last`, outputs. All parts but the last have a multiple of 32 numbers. So outputs are those of `tile`.
    """

    def generate(context, builder, signature, arguments):
        kinds = _kinds(builder, *[signature.args[place].dtype for place in (2, 3, 5)])
        done = builder.append_basic_block("done")
        size = builder.switch(_code_of(builder, *arguments[:2]), done)
        of_rows = _SIZES[num_lanes()]
        for rows, number in [(num, number) for num in (1, 4) for number in of_rows.get(num, ())]:
            block = builder.append_basic_block(f"part_{rows}x{number}")
            size.add_case(I64(rows << _SHIFT | number), block)
            builder.position_at_end(block)
            _write_part(kinds, rows, number, *arguments[2:])
            builder.branch(done)
        builder.position_at_end(done)
        return context.get_dummy_value()

    number = types.int64
    kinds = number, number, weight, tokens, bias, outputs, *[number] * 3, sums, types.boolean, types.boolean
    return types.void(*kinds), generate


@intrinsic
def sum_of(typing_context, numbers, length):
    """Return the sum of `length` numbers, a multiple of 16, as float32."""

    def generate(context, builder, signature, arguments):
        vectors = Lanes(builder, num_lanes(), signature.args[0].dtype)
        one = vectors.filled_with(FLOAT(1.0))
        return _summed(vectors, *arguments, lambda own: (own, one))

    return types.float32(numbers, types.int64), generate


@intrinsic
def sum_of_squares(typing_context, numbers, length, center):
    """Return the sum of squares of `length` numbers, a multiple of 16, minus `center` each, as float32."""

    def generate(context, builder, signature, arguments):
        vectors = Lanes(builder, num_lanes(), signature.args[0].dtype)
        centers = vectors.filled_with(arguments[2])

        def factors(own):
            own = builder.fsub(own, centers)
            return own, own

        return _summed(vectors, *arguments[:2], factors)

    return types.float32(numbers, types.int64, types.float32), generate


def _summed(vectors: Lanes, pointer: ir.Value, length: ir.Value, factors: Callable) -> ir.Value:
    """Return the sum of the products of two factors of each number."""
    sums = vectors.zeros()
    with cgutils.for_range_slice(vectors.builder, I64(0), length, I64(vectors.number), I64) as (begin, _):
        vectors.add_products(sums, *factors(vectors.load(pointer, begin)))
    return vectors.builder.extract_element(vectors.totals([sums]), I32(0))


@intrinsic
def add_weighted(typing_context, num_sums, weights, num_weights, rows, stride, num, length, outputs, distance):
    """
    Add `num` weighted rows to each of `num_sums` neighbouring outputs of `length` numbers, a multiple of 16. Rows lie
    `stride` numbers apart. Each output has its own weights, `num_weights` numbers after those of the output before.
    Weights and outputs are float32. `num_sums` is 1 to `most_sums`; otherwise the outputs stay as they are. Numbers
    `distance` after those that are read are prefetched, unless it is None.
    """

    def generate(context, builder, signature, arguments):
        vectors = Lanes(builder, num_lanes(), signature.args[3].dtype)
        done = builder.append_basic_block("done")
        size = builder.switch(arguments[0], done)
        for num_sums in range(1, _MOST_SUMS[num_lanes()] + 1):
            block = builder.append_basic_block(f"sums_{num_sums}")
            size.add_case(I64(num_sums), block)
            builder.position_at_end(block)
            _write_sums(vectors, num_sums, *arguments[1:8], None if distance == types.none else arguments[8])
            builder.branch(done)
        builder.position_at_end(done)
        return context.get_dummy_value()

    integer = types.int64
    kinds = integer, weights, integer, rows, integer, integer, integer, outputs, distance
    return types.void(*kinds), generate


def _write_sums(vectors, num_sums, weights, num_weights, rows, stride, num, length, outputs, distance):
    builder, begin = vectors.builder, I64(0)
    for number in (_TOGETHER, 1):  # several vectors side by side, then the remaining ones
        step = I64(number * vectors.number)
        end = builder.sub(length, builder.srem(builder.sub(length, begin), step))
        with cgutils.for_range_slice(builder, begin, end, step, I64) as (first, _):
            places = [builder.add(first, I64(place * vectors.number)) for place in range(number)]
            starts = [builder.mul(I64(own), length) for own in range(num_sums)]
            results = [[builder.gep(outputs, [builder.add(start, place)]) for place in places] for start in starts]
            sums = [[vectors.sum_at(pointer) for pointer in pointers] for pointers in results]
            with cgutils.for_range_slice(builder, I64(0), num, I64(1), I64) as (row, _):
                begins = builder.mul(row, stride)
                indices = [builder.add(builder.mul(I64(own), num_weights), row) for own in range(num_sums)]
                factors = [vectors.filled_with(builder.load(builder.gep(weights, [index]))) for index in indices]
                if distance is not None:
                    due = builder.add(builder.add(begins, first), distance)
                    for more in range(0, number * vectors.number, vectors.line):
                        prefetch(builder, builder.gep(rows, [builder.add(due, I64(more))]))
                for at, place in enumerate(places):
                    vector = vectors.load(rows, builder.add(begins, place))
                    for own in range(num_sums):
                        vectors.add_products(sums[own][at], factors[own], vector)
            for pointers, totals in zip(results, sums):
                for pointer, total in zip(pointers, totals):
                    vectors.store_sum(total, pointer)
        begin = end


@intrinsic
def add_outer(typing_context, column, factor, row, before, before_stride, rows, stride, num, length):
    """
    Write `num` rows of `length` numbers, a multiple of 16: those of `before` times `factor`, plus the outer product of
    `column` and `row`. Rows lie `stride` numbers apart; `before` may be the same memory. All numbers are float32.
    """

    def generate(context, builder, signature, arguments):
        column, factor, row, before, before_stride, rows, stride, num, length = arguments
        vectors = Lanes(builder, num_lanes(), types.float32)
        factor, begin = vectors.filled_with(factor), I64(0)
        for number in (_TOGETHER, 1):  # several vectors side by side, then the remaining ones
            step = I64(number * vectors.number)
            end = builder.sub(length, builder.srem(builder.sub(length, begin), step))
            with cgutils.for_range_slice(builder, begin, end, step, I64) as (first, _):
                places = [builder.add(first, I64(place * vectors.number)) for place in range(number)]
                own = [vectors.load(row, place) for place in places]
                with cgutils.for_range_slice(builder, I64(0), num, I64(1), I64) as (line, _):
                    source, target = builder.mul(line, before_stride), builder.mul(line, stride)
                    number_of_line = vectors.filled_with(builder.load(builder.gep(column, [line])))
                    for place, vector in zip(places, own):
                        sums = builder.fmul(vectors.load(before, builder.add(source, place)), factor)
                        sums = vectors.sum_of_products(sums, number_of_line, vector)
                        vectors.store(sums, builder.gep(rows, [builder.add(target, place)]))
            begin = end
        return context.get_dummy_value()

    integer = types.int64
    kinds = column, types.float32, row, before, integer, rows, integer, integer, integer
    return types.void(*kinds), generate


def _vectors(builder: ir.IRBuilder, kind: types.Type) -> Lanes:
    """Return the writer for products of numbers of `kind` with one another."""
    if kind != types.uint16 or num_lanes() == 8:
        return Lanes(builder, num_lanes(), kind)
    return (Pairs if has_pairs() else Widened)(builder, num_lanes(), kind)


def _kinds(builder: ir.IRBuilder, weight: types.Type, token: types.Type, output: types.Type) -> tuple[Lanes, ...]:
    """Return the writers for rows and products, for tokens, and for outputs."""
    factors = numbers = _vectors(builder, weight)
    if token != weight:  # tokens were widened
        factors, numbers = (Lanes(builder, num_lanes(), kind) for kind in (weight, token))
    return factors, numbers, Lanes(builder, num_lanes(), output)


def _code_of(builder: ir.IRBuilder, num_rows: ir.Value, num_tokens: ir.Value) -> ir.Value:
    return builder.or_(builder.shl(num_rows, I64(_SHIFT)), num_tokens)


def _write_tile(
    reader, kinds, num_rows, num_tokens, weight, tokens, bias, outputs, length, row_stride, stride, distance, pace
):
    sums = [[kinds[0].zeros() for _ in range(num_tokens)] for _ in range(num_rows)]
    _add_products(reader, kinds, sums, weight, tokens, length, row_stride, length, distance, pace)
    _store_totals(kinds, sums, bias, outputs, stride)


def _write_part(
    kinds, num_rows, num_tokens, weight, tokens, bias, outputs, num, length, stride, partial, is_first, is_last
):
    weights, builder = kinds[0], kinds[0].builder
    sums = [[weights.zeros() for _ in range(num_tokens)] for _ in range(num_rows)]
    pairs = [
        (own, builder.gep(partial, [I64((row * num_tokens + token) * weights.number)]))
        for row, of_row in enumerate(sums)
        for token, own in enumerate(of_row)
    ]
    with builder.if_then(builder.not_(is_first)):
        for own, pointer in pairs:
            builder.store(builder.load(weights.sum_at(pointer)), own)
    _add_products(weights, kinds, sums, weight, tokens, num, length, length, None, None)
    with builder.if_else(is_last) as (then, otherwise):
        with then:
            _store_totals(kinds, sums, bias, outputs, stride)
        with otherwise:
            for own, pointer in pairs:
                weights.store_sum(own, pointer)


def _add_products(reader, kinds, sums, weight, tokens, num, row_stride, token_stride, distance, pace):
    weights, numbers, _ = kinds
    builder, num_rows, num_tokens = weights.builder, len(sums), len(sums[0])
    for begin, is_whole in reader.parts(num):
        starts = [builder.add(begin, builder.mul(I64(row), row_stride)) for row in range(num_rows)]
        for turn in range(weights.turns):
            factors = [reader.factors(weight, start, is_whole, turn) for start in starts]
            if distance is not None and not turn:
                due = builder.add(distance, builder.udiv(builder.mul(begin, pace), I64(PACE)))
                reader.prefetch(weight, due, num_rows * reader.step)
            weights.hold()  # those of several vectors at once would keep numbers waiting that are needed now
            for number in range(reader.step // numbers.step):
                place = builder.add(begin, I64(number * numbers.step))
                for token in range(num_tokens):
                    start = builder.add(place, builder.mul(I64(token), token_stride))
                    own = numbers.load(tokens, start, is_whole, turn)
                    for row in range(num_rows):
                        weights.add_products(sums[row][token], factors[row][number], own)
                    if num_rows * num_tokens > _FEW_SUMS:
                        weights.hold()


def _store_totals(kinds, sums, bias, outputs, stride):
    weights, _, results = kinds
    builder, num_rows, num_tokens = weights.builder, len(sums), len(sums[0])
    more, together = results.load_few(bias, num_rows), max(weights.number // num_rows, 1)
    for first in range(0, num_tokens, together):  # as many tokens as have their totals in one vector
        own = range(first, min(first + together, num_tokens))
        repeated = ir.Constant(ir.VectorType(I32, num_rows * len(own)), [*range(num_rows)] * len(own))
        totals = weights.totals([row[token] for token in own for row in sums])
        totals = builder.fadd(totals, builder.shuffle_vector(more, more, repeated))
        results.store_parts(totals, [builder.gep(outputs, [builder.mul(I64(token), stride)]) for token in own])
