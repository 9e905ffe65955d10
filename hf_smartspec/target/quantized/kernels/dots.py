"""Dot products of int8 numbers, by the instructions that CPUs have for them (VNNI)."""

from collections.abc import Iterator
from typing import Any

from llvmlite import ir  # type: ignore[import-untyped]
from numba import types
from numba.core import cgutils

from ....jit.writing import I8, I32, I64, call, cpu_features, place, send_for, written

LINE = 64  # levels of a token are padded with zeros to multiples of it
OFFSET = 128  # is added to weights: the instruction multiplies unsigned by signed numbers
_AHEAD = 4  # rows that are sent for before their turn
_WIDTHS = {64: ("+avx512vnni", "+avx512bw", "+avx512vl"), 32: ("+avxvnni",)}  # bytes in a vector, and who has it


def widest() -> int:
    """Bytes that the CPU for which numba compiles multiplies at once; 0 where it has no such instruction."""
    return next((width for width, need in _WIDTHS.items() if cpu_features().issuperset(need)), 0)


def _dots(num_rows: int, num_tokens: int) -> Any:
    """
    `dots(weight, length, levels, padded, offsets, sums, stride)`: products of neighbouring rows of `length` int8 with
    as many levels of tokens, which lie `padded` bytes from one another, become `sums[token * stride + row]`, int32.

    `offsets[token]`, `OFFSET` times the sum of a token's levels, is taken away again.
    """

    @written(types.void, *[types.int64] * 7)
    def dots(builder, weight, length, levels, padded, offsets, sums, stride):
        vectors, rows, tokens = _Vectors(builder, widest()), range(num_rows), range(num_tokens)
        totals = [[cgutils.alloca_once_value(builder, vectors.zeros) for _ in tokens] for _ in rows]
        for begin, rest in vectors.parts(length):
            starts = [builder.add(begin, builder.mul(I64(row), length)) for row in rows]
            factors = [vectors.weights(weight, start, rest) for start in starts]
            if rest is None:
                for start in starts:
                    send_for(builder, place(builder, weight, builder.add(start, builder.mul(I64(_AHEAD), length)), I8))
            for token in tokens:
                numbers = vectors.levels(levels, builder.add(begin, builder.mul(I64(token), padded)))
                for row in rows:
                    vectors.add_products(totals[row][token], factors[row], numbers)
        for token in tokens:
            offset = builder.load(place(builder, offsets, I64(token), I32))
            start = builder.mul(I64(token), stride)
            for row in rows:
                total = builder.sub(vectors.total(totals[row][token]), offset)
                builder.store(total, place(builder, sums, builder.add(start, I64(row)), I32))

    return dots


class _Vectors:
    """Writes instructions on vectors of so many bytes."""

    def __init__(self, builder: ir.IRBuilder, width: int):
        self.builder, self.width = builder, width
        self.bytes, self.sums = ir.VectorType(I8, width), ir.VectorType(I32, width // 4)
        self.zeros = ir.Constant(self.sums, [0] * (width // 4))

    def parts(self, length: ir.Value) -> Iterator[tuple[ir.Value, ir.Value | None]]:
        """Where vectors begin in a loop over whole ones, and then what is left, and how many bytes that are."""
        builder, step = self.builder, I64(self.width)
        whole = builder.and_(length, I64(-self.width))
        with cgutils.for_range_slice(builder, I64(0), whole, step, I64) as (begin, _):
            yield begin, None
        rest = builder.sub(length, whole)
        with builder.if_then(builder.icmp_signed("!=", rest, I64(0))):
            yield whole, rest

    def weights(self, weight: ir.Value, start: ir.Value, rest: ir.Value | None) -> ir.Value:
        """A vector of weights, or as many as are left of a row, plus `OFFSET`."""
        pointer = self._pointer(weight, start)
        if rest is None:
            signed = self.builder.load(pointer, align=1)
        else:
            zeros = ir.Constant(self.bytes, [0] * self.width)
            name = f"llvm.masked.load.v{self.width}i8.p0"
            signed = call(self.builder, name, self.bytes, pointer, I32(1), self._first(rest), zeros)
        return self.builder.bitcast(
            self.builder.xor(signed, ir.Constant(self.bytes, [OFFSET - 256] * self.width)), self.sums
        )

    def levels(self, levels: ir.Value, start: ir.Value) -> ir.Value:
        return self.builder.bitcast(self.builder.load(self._pointer(levels, start), align=1), self.sums)

    def add_products(self, total: ir.Value, weights: ir.Value, levels: ir.Value) -> None:
        name = f"llvm.x86.avx512.vpdpbusd.{8 * self.width}"
        sums = call(self.builder, name, self.sums, self.builder.load(total), weights, levels)
        self.builder.store(sums, total)

    def total(self, sums: ir.Value) -> ir.Value:
        return call(self.builder, f"llvm.vector.reduce.add.v{self.width // 4}i32", I32, self.builder.load(sums))

    def _pointer(self, address: ir.Value, start: ir.Value) -> ir.Value:
        return self.builder.bitcast(place(self.builder, address, start, I8), self.bytes.as_pointer())

    def _first(self, count: ir.Value) -> ir.Value:
        """A mask of the first `count` bytes."""
        builder, kind = self.builder, self.bytes
        one = builder.insert_element(ir.Constant(kind, ir.Undefined), builder.trunc(count, I8), I32(0))
        every = builder.shuffle_vector(one, one, ir.Constant(ir.VectorType(I32, self.width), [0] * self.width))
        return builder.icmp_unsigned("<", ir.Constant(kind, list(range(self.width))), every)


dots_1x1, dots_4x1, dots_4x2, dots_4x4, dots_2x8 = (_dots(*size) for size in ((1, 1), (4, 1), (4, 2), (4, 4), (2, 8)))
