"""Writers of instructions on vectors of float32 or bfloat16, as wide as the CPU has them."""

from collections.abc import Iterator

from llvmlite import ir  # type: ignore[import-untyped]
from llvmlite.binding import llvm_version_info  # type: ignore[import-untyped]
from numba import types
from numba.core import cgutils

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


def num_lanes() -> int:
    """Return the float32 numbers in a vector of the CPU for which numba compiles; 0 where its vectors are too short."""
    features = cpu_features()
    if "+avx512f" in features:
        return 16
    return 8 if {"+avx2", "+fma"} <= features else 0


def has_pairs() -> bool:
    """Return whether the CPU multiplies vectors of bfloat16 without widening, and adds up neighbouring products."""
    return num_lanes() == 16 and "+avx512bf16" in cpu_features() and llvm_version_info[0] >= _FIRST_LLVM


class Lanes:
    """
    Writer of instructions on vectors of `number` float32.

    Args:
        kind (`types.Type`): Type of the numbers in memory: float32, or the bits of bfloat16.
    """

    turns = 1  # in which the numbers of a vector are multiplied

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
        self.store(self.builder.load(sums), pointer)

    def store(self, numbers: ir.Value, pointer: ir.Value) -> None:
        """Store a vector of float32."""
        self.builder.store(numbers, self.builder.bitcast(pointer, self.floats.as_pointer()), align=4)

    def load(self, pointer: ir.Value, index: ir.Value, is_whole: bool = True, turn: int = 0) -> ir.Value:
        builder, pointer = self.builder, self.builder.gep(pointer, [index])
        if not self.is_half:
            return builder.load(builder.bitcast(pointer, self.floats.as_pointer()), align=4)
        bits = builder.load(builder.bitcast(pointer, ir.VectorType(I16, self.number).as_pointer()), align=2)
        shift = ir.Constant(self.integers, [16] * self.number)
        return builder.bitcast(builder.shl(builder.zext(bits, self.integers), shift), self.floats)

    def factors(self, pointer: ir.Value, start: ir.Value, is_whole: bool, turn: int) -> list[ir.Value]:
        """Return the vectors of a row's part at `start`."""
        return [self.load(pointer, start, is_whole, turn)]

    def prefetch(self, pointer: ir.Value, begin: ir.Value, num: int) -> None:
        """Prefetch `num` numbers that begin `begin` after `pointer`."""
        for more in range(0, num, self.line):
            prefetch(self.builder, self.builder.gep(pointer, [self.builder.add(begin, I64(more))]))

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
        self.builder.store(self.sum_of_products(self.builder.load(sums), factors, numbers), sums)

    def sum_of_products(self, sums: ir.Value, factors: ir.Value, numbers: ir.Value) -> ir.Value:
        """Return vectors of float32, added to `sums` after they have been multiplied."""
        return call(self.builder, f"llvm.fma.v{self.number}f32", self.floats, factors, numbers, sums)

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


class Pairs(Lanes):
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

    def load(self, pointer: ir.Value, start: ir.Value, is_whole: bool = True, turn: int = 0) -> ir.Value:
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


class Widened(Pairs):
    """
    `Pairs` for CPUs that multiply float32 only: the first of all neighbours are widened and multiplied, and in a second
    turn the others. Widening a vector takes one instruction so, and two where its numbers stay neighbours.
    """

    turns = 2

    def load(self, pointer: ir.Value, start: ir.Value, is_whole: bool = True, turn: int = 0) -> ir.Value:
        builder, pairs = self.builder, super().load(pointer, start, is_whole)
        bits = ir.Constant(self.integers, [-(2**16) if turn else 16] * self.number)
        return builder.bitcast(builder.and_(pairs, bits) if turn else builder.shl(pairs, bits), self.floats)

    def add_products(self, sums: ir.Value, factors: ir.Value, numbers: ir.Value) -> None:
        Lanes.add_products(self, sums, factors, numbers)
