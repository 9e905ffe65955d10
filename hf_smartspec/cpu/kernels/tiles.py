"""Sums of products of float32 or bfloat16, in vectors as wide as the CPU has them."""

from collections.abc import Iterator

from llvmlite import ir  # type: ignore[import-untyped]
from llvmlite.binding import llvm_version_info  # type: ignore[import-untyped]
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from ...jit.writing import (
    BFLOAT,
    FLOAT,
    I16,
    I32,
    I64,
    LINE,
    bfloat16_of,
    call,
    cpu_features,
    float32_of,
    hold_order,
    prefetch,
)

_FIRST_LLVM = 16  # the first release whose intrinsic for pairs takes vectors of bfloat16
# Sums of rows, by lanes, and vectors of a row, that are computed side by side: these sums, a vector and its factors fit
# the CPU's registers, 32 of 16 numbers or 16 of 8.
_MOST_SUMS, _TOGETHER = {16: 4, 8: 3}, 4
_FEW_SUMS = 8  # sums that leave enough registers for all numbers that are read
PACE = 2**12  # numbers of a row, for which a tile's `pace` is given
_SHIFT = 8  # bits; the number of tokens takes fewer


# Tokens of tiles, by lanes and rows: sizes that fit the CPU's registers, 32 of 16 numbers or 16 of 8.
_SIZES = {16: {1: (1,), 3: (7, 8), 4: (1, 2, 3, 4, 5, 6)}, 8: {1: (1,), 3: (1, 2, 3, 4)}}


def num_lanes() -> int:
    """Return the float32 numbers in a vector of the CPU for which numba compiles; 0 where its vectors are too short."""
    features = cpu_features()
    if "+avx512f" in features:
        return 16
    return 8 if {"+avx2", "+fma"} <= features else 0


def has_pairs() -> bool:
    """Return whether the CPU multiplies vectors of bfloat16 without widening, and adds up neighbouring products."""
    return num_lanes() == 16 and "+avx512bf16" in cpu_features() and llvm_version_info[0] >= _FIRST_LLVM


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
):
    """
    Multiply `num_rows` rows of a weight by `num_tokens` neighbouring tokens, and store sums as `outputs[token * stride
    + row]`, with `bias[row]` added unless `bias` is null. Rows and tokens have `length` numbers, a multiple of 16; rows
    lie `row_stride` numbers apart. Only the sizes in `_SIZES` are compiled; other tiles store no outputs.

    Meanwhile, numbers that begin `distance` after the first row's are prefetched in order, `pace` of them for every
    `PACE` that a row has, unless both are None; they should exist.

    Numbers are float32, or the bits of bfloat16; outputs and biases are of one kind, and outputs are rounded once.
    Products are summed in the same order in every tile, so a token's result does not depend on the others.
    """

    def generate(context, builder, signature, arguments):
        weight, token, output = (signature.args[place].dtype for place in (2, 3, 5))
        factors = numbers = _vectors(builder, weight)
        if token != weight:  # tokens were widened
            factors, numbers = (_Lanes(builder, num_lanes(), kind) for kind in (weight, token))
        kinds = factors, numbers, _Lanes(builder, num_lanes(), output)
        ahead = (None, None) if distance == types.none else arguments[9:]
        sizes = [(rows, number) for rows, tokens in _SIZES[num_lanes()].items() for number in tokens]
        done = builder.append_basic_block("done")
        size = builder.switch(_code_of(builder, *arguments[:2]), done)
        for rows, number in sizes:
            block = builder.append_basic_block(f"tile_{rows}x{number}")
            size.add_case(I64(rows << _SHIFT | number), block)
            builder.position_at_end(block)
            _write_tile(kinds, rows, number, *arguments[2:9], *ahead)
            builder.branch(done)
        builder.position_at_end(done)
        return context.get_dummy_value()

    number = types.int64
    return types.void(number, number, weight, tokens, bias, outputs, *[number] * 3, distance, pace), generate


@intrinsic
def sum_of_squares(typing_context, numbers, length):
    """Return the sum of squares of `length` numbers, a multiple of 16, as float32."""

    def generate(context, builder, signature, arguments):
        pointer, length = arguments
        vectors = _Lanes(builder, num_lanes(), signature.args[0].dtype)
        sums = vectors.zeros()
        with cgutils.for_range_slice(builder, I64(0), length, I64(vectors.number), I64) as (begin, _):
            own = vectors.load(pointer, begin)
            vectors.add_products(sums, own, own)
        return builder.extract_element(vectors.totals([sums]), I32(0))

    return types.float32(numbers, types.int64), generate


@intrinsic
def add_weighted(typing_context, num_sums, weights, num_weights, rows, stride, num, length, outputs, distance):
    """
    Add `num` weighted rows to each of `num_sums` neighbouring outputs of `length` numbers, a multiple of 16. Rows lie
    `stride` numbers apart. Each output has its own weights, `num_weights` numbers after those of the output before.
    Weights and outputs are float32. `num_sums` is 1 to `most_sums`; otherwise the outputs stay as they are. Numbers
    `distance` after those that are read are prefetched, unless it is None.
    """

    def generate(context, builder, signature, arguments):
        vectors = _Lanes(builder, num_lanes(), signature.args[3].dtype)
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


def _vectors(builder: ir.IRBuilder, kind: types.Type) -> "_Lanes":
    """Return the writer for products of numbers of `kind` with one another."""
    return (_Pairs if kind == types.uint16 and has_pairs() else _Lanes)(builder, num_lanes(), kind)


def _code_of(builder: ir.IRBuilder, num_rows: ir.Value, num_tokens: ir.Value) -> ir.Value:
    return builder.or_(builder.shl(num_rows, I64(_SHIFT)), num_tokens)


def _write_tile(kinds, num_rows, num_tokens, weight, tokens, bias, outputs, length, row_stride, stride, distance, pace):
    weights, numbers, results = kinds
    builder = weights.builder
    sums = [[weights.zeros() for _ in range(num_tokens)] for _ in range(num_rows)]
    for begin, is_whole in weights.parts(length):
        starts = [builder.add(begin, builder.mul(I64(row), row_stride)) for row in range(num_rows)]
        factors = [weights.load(weight, start, is_whole) for start in starts]
        if distance is not None:
            due = builder.add(distance, builder.udiv(builder.mul(begin, pace), I64(PACE)))
            for more in range(0, num_rows * weights.step, weights.line):
                prefetch(builder, builder.gep(weight, [builder.add(due, I64(more))]))
        weights.hold()  # those of several vectors at once would keep numbers waiting that are needed now
        for token in range(num_tokens):
            own = numbers.load(tokens, builder.add(begin, builder.mul(I64(token), length)), is_whole)
            for row in range(num_rows):
                weights.add_products(sums[row][token], factors[row], own)
            if num_rows * num_tokens > _FEW_SUMS:
                weights.hold()
    more, together = results.load_few(bias, num_rows), max(weights.number // num_rows, 1)
    for first in range(0, num_tokens, together):  # as many tokens as have their totals in one vector
        own = range(first, min(first + together, num_tokens))
        repeated = ir.Constant(ir.VectorType(I32, num_rows * len(own)), [*range(num_rows)] * len(own))
        totals = weights.totals([row[token] for token in own for row in sums])
        totals = builder.fadd(totals, builder.shuffle_vector(more, more, repeated))
        results.store_parts(totals, [builder.gep(outputs, [builder.mul(I64(token), stride)]) for token in own])


class _Lanes:
    """
    Writer of instructions on vectors of `number` float32.

    Args:
        kind (`types.Type`): Type of the numbers in memory: float32, or the bits of bfloat16.
    """

    def __init__(self, builder: ir.IRBuilder, number: int, kind: types.Type):
        self.builder, self.number = builder, number
        self.is_half = kind is not types.float32
        self.itemsize = 2 if self.is_half else 4
        self.step, self.line = number, LINE // self.itemsize  # numbers in a vector, and in a line of the cache
        self.floats, self.integers = ir.VectorType(FLOAT, number), ir.VectorType(I32, number)

    def parts(self, length: ir.Value) -> Iterator[tuple[ir.Value, bool]]:
        """Yield where vectors begin, in a loop, and whether they are whole."""
        with cgutils.for_range_slice(self.builder, I64(0), length, I64(self.number), I64) as (begin, _):
            yield begin, True

    def zeros(self) -> ir.Value:
        return cgutils.alloca_once_value(self.builder, ir.Constant(self.floats, [0.0] * self.number))

    def sum_at(self, pointer: ir.Value) -> ir.Value:
        """Return a sum that starts with the float32 numbers at `pointer`."""
        found = self.builder.load(self.builder.bitcast(pointer, self.floats.as_pointer()), align=4)
        return cgutils.alloca_once_value(self.builder, found)

    def store_sum(self, sums: ir.Value, pointer: ir.Value) -> None:
        self.builder.store(self.builder.load(sums), self.builder.bitcast(pointer, self.floats.as_pointer()), align=4)

    def load(self, pointer: ir.Value, index: ir.Value, is_whole: bool = True) -> ir.Value:
        builder, pointer = self.builder, self.builder.gep(pointer, [index])
        if not self.is_half:
            return builder.load(builder.bitcast(pointer, self.floats.as_pointer()), align=4)
        bits = builder.load(builder.bitcast(pointer, ir.VectorType(I16, self.number).as_pointer()), align=2)
        shift = ir.Constant(self.integers, [16] * self.number)
        return builder.bitcast(builder.shl(builder.zext(bits, self.integers), shift), self.floats)

    def load_few(self, pointer: ir.Value, count: int) -> ir.Value:
        """Load `count` numbers as float32; zeros where the pointer is null."""
        builder, kind = self.builder, ir.VectorType(I16 if self.is_half else FLOAT, count)
        numbers = cgutils.alloca_once_value(builder, ir.Constant(ir.VectorType(FLOAT, count), [0.0] * count))
        with builder.if_then(builder.icmp_unsigned("!=", pointer, ir.Constant(pointer.type, None))):
            found = builder.load(builder.bitcast(pointer, kind.as_pointer()), align=self.itemsize)
            builder.store(float32_of(builder, found) if self.is_half else found, numbers)
        return builder.load(numbers)

    def store_parts(self, numbers: ir.Value, pointers: list[ir.Value]) -> None:
        """
        Store equal parts of a vector of float32, rounded to the nearest bfloat16 (ties to even) where numbers are of
        that kind.
        """
        builder, count = self.builder, numbers.type.count // len(pointers)
        if self.is_half:
            numbers = bfloat16_of(builder, numbers)
        for place, pointer in enumerate(pointers):
            part = ir.Constant(ir.VectorType(I32, count), [place * count + number for number in range(count)])
            own = builder.shuffle_vector(numbers, numbers, part)
            builder.store(own, builder.bitcast(pointer, own.type.as_pointer()), align=self.itemsize)

    def add_products(self, sums: ir.Value, factors: ir.Value, numbers: ir.Value) -> None:
        name = f"llvm.fma.v{self.number}f32"
        more = call(self.builder, name, self.floats, factors, numbers, self.builder.load(sums))
        self.builder.store(more, sums)

    def hold(self) -> None:
        """Separate the products of one token from those of the next."""

    def filled_with(self, number: ir.Value) -> ir.Value:
        builder = self.builder
        one = builder.insert_element(ir.Constant(self.floats, ir.Undefined), number, I32(0))
        return builder.shuffle_vector(one, one, ir.Constant(self.integers, [0] * self.number))

    def totals(self, sums: list[ir.Value]) -> ir.Value:
        """
        Return the sum of each vector, as one vector: halves are added until one number of each is left. Those of two
        vectors are added at once, while they are as long as one.
        """
        builder, width, vectors = self.builder, self.number, [self.builder.load(item) for item in sums]
        while width > 1:
            width //= 2
            pairs = [(vectors[at], vectors[min(at + 1, len(vectors) - 1)]) for at in range(0, len(vectors), 2)]
            count = sum(vector.type.count for vector in pairs[0][: len(vectors)]) // 2
            firsts = [place for place in range(2 * count) if not place // width % 2]
            halves = [ir.Constant(ir.VectorType(I32, count), [at + place for place in firsts]) for at in (0, width)]
            vectors = [builder.fadd(*[builder.shuffle_vector(*pair, part) for part in halves]) for pair in pairs]
        own = ir.Constant(ir.VectorType(I32, len(sums)), list(range(len(sums))))
        return builder.shuffle_vector(vectors[0], vectors[0], own)


class _Pairs(_Lanes):
    """
    Writer of instructions on vectors of twice as many bfloat16, of which neighbours' products are added to one float32.
    The rest after whole vectors is half a vector.
    """

    def __init__(self, builder: ir.IRBuilder, number: int, kind: types.Type):
        super().__init__(builder, number, kind)
        self.step *= 2

    def parts(self, length: ir.Value) -> Iterator[tuple[ir.Value, bool]]:
        builder, step = self.builder, self.step
        whole = builder.and_(length, I64(-step))
        with cgutils.for_range_slice(builder, I64(0), whole, I64(step), I64) as (begin, _):
            yield begin, True
        with builder.if_then(builder.icmp_signed("!=", whole, length)):
            yield whole, False

    def load(self, pointer: ir.Value, start: ir.Value, is_whole: bool = True) -> ir.Value:
        builder, number = self.builder, self.number if is_whole else self.number // 2
        kind = ir.VectorType(I32, number)
        pairs = builder.load(builder.bitcast(builder.gep(pointer, [start]), kind.as_pointer()), align=2)
        if is_whole:
            return pairs
        places = ir.Constant(self.integers, list(range(self.number)))  # the second half is zeros
        return builder.shuffle_vector(pairs, ir.Constant(kind, [0] * number), places)

    def add_products(self, sums: ir.Value, factors: ir.Value, numbers: ir.Value) -> None:
        halves = [self.builder.bitcast(vector, ir.VectorType(BFLOAT, 2 * self.number)) for vector in (factors, numbers)]
        name = "llvm.x86.avx512bf16.dpbf16ps.512"
        self.builder.store(call(self.builder, name, self.floats, self.builder.load(sums), *halves), sums)

    def hold(self) -> None:
        hold_order(self.builder)
