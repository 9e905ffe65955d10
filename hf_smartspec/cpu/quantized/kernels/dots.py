"""Dot products of int8 numbers, by the CPU's instructions for int8 (VNNI), or by those for int16 (AVX2)."""

from collections.abc import Iterator
from typing import Any

from llvmlite import ir  # type: ignore[import-untyped]
from numba import types
from numba.core import cgutils

from ....jit.writing import I8, I16, I32, I64, call, cpu_features, place, prefetch, written

LINE = 64  # levels of a token are padded with zeros to a multiple of this
OFFSET = 128  # added to weights, since the instruction multiplies unsigned by signed numbers
_AHEAD = 4  # rows between the one that is multiplied and the one that is prefetched
_REGISTERS = {64: 32, 32: 16, 16: 16}  # registers of the CPU, by bytes that it multiplies at once
_NEED = {64: ("+avx512vnni", "+avx512bw", "+avx512vl"), 32: ("+avxvnni",), 16: ("+avx2", "+f16c")}


def widest() -> int:
    """Return the bytes that the CPU for which numba compiles multiplies at once; 0 where it lacks the instructions."""
    return next((width for width, need in _NEED.items() if cpu_features().issuperset(need)), 0)


def has_dots() -> bool:
    """Return whether that CPU has instructions for int8. Without them, torch's products of int8 are not exact."""
    return widest() > 16


def _dots(num_rows: int, num_tokens: int) -> Any:
    """
    Return `dots(weight, length, levels, padded, offsets, sums, stride)`, which multiplies neighbouring rows of `length`
    int8 by as many levels of tokens, `padded` bytes apart. Sums of products, int32, become `sums[token * stride +
    row]`.

    `offsets[token]` is `OFFSET` times the sum of a token's levels; it is subtracted where `OFFSET` was added to
    weights.
    """

    @written(types.void, *[types.int64] * 7)
    def dots(builder, weight, length, levels, padded, offsets, sums, stride):
        vectors = _vectors(builder)
        size = max(_REGISTERS[vectors.width] // 2 // num_rows, 1)  # the other half holds factors
        for first in range(0, num_tokens, size):
            tokens = range(first, min(first + size, num_tokens))
            _write_dots(vectors, range(num_rows), tokens, weight, length, levels, padded, offsets, sums, stride)

    return dots


def _write_dots(vectors, rows, tokens, weight, length, levels, padded, offsets, sums, stride):
    """Write the products of as many rows and tokens as have sums that fit into registers."""
    builder = vectors.builder
    totals = {token: [cgutils.alloca_once_value(builder, vectors.zeros) for _ in rows] for token in tokens}
    for begin, rest in vectors.parts(length):
        starts = [builder.add(begin, builder.mul(I64(row), length)) for row in rows]
        factors = [vectors.weights(weight, start, rest) for start in starts]
        if rest is None and tokens[0] == 0:
            for start in starts:
                prefetch(builder, place(builder, weight, builder.add(start, builder.mul(I64(_AHEAD), length)), I8))
        for token in tokens:
            numbers = vectors.levels(levels, builder.add(begin, builder.mul(I64(token), padded)))
            for row in rows:
                vectors.add_products(totals[token][row], factors[row], numbers)
    for token in tokens:
        offset = builder.load(place(builder, offsets, I64(token), I32))
        start = builder.mul(I64(token), stride)
        for row in rows:
            total = vectors.total(totals[token][row], offset)
            builder.store(total, place(builder, sums, builder.add(start, I64(row)), I32))


def _vectors(builder: ir.IRBuilder) -> "_Vectors":
    return _Dots(builder, widest()) if has_dots() else _Pairs(builder, widest())


class _Vectors:
    """
    Writer of instructions on vectors of `width` bytes.

    Args:
        together (`int`): Neighbouring products that one instruction adds up.
    """

    def __init__(self, builder: ir.IRBuilder, width: int, together: int):
        self.builder, self.width = builder, width
        self.bytes, self.sums = ir.VectorType(I8, width), ir.VectorType(I32, width // together)
        self.zeros = ir.Constant(self.sums, [0] * (width // together))

    def parts(self, length: ir.Value) -> Iterator[tuple[ir.Value, ir.Value | None]]:
        """
        Yield where vectors begin, in a loop over whole ones, with None; then the begin and size in bytes of the rest.
        """
        builder, step = self.builder, I64(self.width)
        whole = builder.and_(length, I64(-self.width))
        with cgutils.for_range_slice(builder, I64(0), whole, step, I64) as (begin, _):
            yield begin, None
        rest = builder.sub(length, whole)
        with builder.if_then(builder.icmp_signed("!=", rest, I64(0))):
            yield whole, rest

    def weights(self, weight: ir.Value, start: ir.Value, rest: ir.Value | None) -> ir.Value:
        """Load a vector of weights, or the `rest` of a row, and return it as it is multiplied."""
        pointer = self._pointer(weight, start)
        if rest is None:
            signed = self.builder.load(pointer, align=1)
        else:
            zeros = ir.Constant(self.bytes, [0] * self.width)
            name = f"llvm.masked.load.v{self.width}i8.p0"
            signed = call(self.builder, name, self.bytes, pointer, I32(1), self._first(rest), zeros)
        return self.factors(signed)

    def factors(self, weights: ir.Value) -> ir.Value:
        raise NotImplementedError

    def levels(self, levels: ir.Value, start: ir.Value) -> ir.Value:
        """Load a vector of levels, and return it as it is multiplied."""
        raise NotImplementedError

    def add_products(self, total: ir.Value, weights: ir.Value, levels: ir.Value) -> None:
        raise NotImplementedError

    def total(self, sums: ir.Value, offset: ir.Value) -> ir.Value:
        return call(self.builder, f"llvm.vector.reduce.add.v{self.sums.count}i32", I32, self.builder.load(sums))

    def read(self, address: ir.Value, start: ir.Value) -> ir.Value:
        return self.builder.load(self._pointer(address, start), align=1)

    def _pointer(self, address: ir.Value, start: ir.Value) -> ir.Value:
        return self.builder.bitcast(place(self.builder, address, start, I8), self.bytes.as_pointer())

    def _first(self, count: ir.Value) -> ir.Value:
        """Return a mask of the first `count` bytes."""
        builder, kind = self.builder, self.bytes
        one = builder.insert_element(ir.Constant(kind, ir.Undefined), builder.trunc(count, I8), I32(0))
        every = builder.shuffle_vector(one, one, ir.Constant(ir.VectorType(I32, self.width), [0] * self.width))
        return builder.icmp_unsigned("<", ir.Constant(kind, list(range(self.width))), every)


class _Dots(_Vectors):
    """Writer of products of unsigned and signed int8, four to a sum, by VNNI."""

    def __init__(self, builder: ir.IRBuilder, width: int):
        super().__init__(builder, width, together=4)

    def factors(self, weights: ir.Value) -> ir.Value:
        offsets = ir.Constant(self.bytes, [OFFSET - 256] * self.width)
        return self.builder.bitcast(self.builder.xor(weights, offsets), self.sums)

    def levels(self, levels: ir.Value, start: ir.Value) -> ir.Value:
        return self.builder.bitcast(self.read(levels, start), self.sums)

    def add_products(self, total: ir.Value, weights: ir.Value, levels: ir.Value) -> None:
        name = f"llvm.x86.avx512.vpdpbusd.{8 * self.width}"
        sums = call(self.builder, name, self.sums, self.builder.load(total), weights, levels)
        self.builder.store(sums, total)

    def total(self, sums: ir.Value, offset: ir.Value) -> ir.Value:
        return self.builder.sub(super().total(sums, offset), offset)


class _Pairs(_Vectors):
    """Writer of products of signed int16, two to a sum, by AVX2, whose products of int8 would saturate."""

    def __init__(self, builder: ir.IRBuilder, width: int):
        super().__init__(builder, width, together=2)
        self.wide = ir.VectorType(I16, width)

    def factors(self, weights: ir.Value) -> ir.Value:
        return self.builder.sext(weights, self.wide)

    def levels(self, levels: ir.Value, start: ir.Value) -> ir.Value:
        return self.builder.sext(self.read(levels, start), self.wide)

    def add_products(self, total: ir.Value, weights: ir.Value, levels: ir.Value) -> None:
        products = call(self.builder, "llvm.x86.avx2.pmadd.wd", self.sums, weights, levels)
        self.builder.store(self.builder.add(self.builder.load(total), products), total)


dots_1x1, dots_4x1, dots_4x2, dots_4x4, dots_2x8 = (_dots(*size) for size in ((1, 1), (4, 1), (4, 2), (4, 4), (2, 8)))
