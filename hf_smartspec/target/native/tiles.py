"""Products of a few rows of a float32 weight with a few tokens, in vectors as wide as the CPU has them."""

from functools import cache
from typing import Any

from llvmlite import ir  # type: ignore[import-untyped]
from numba import types
from numba.core import cgutils
from numba.core.registry import cpu_target

from ..quantized.kernels.memory import FLOAT, I8, I32, I64, call, place, written

_AHEAD = 2  # tiles of rows that are sent for before their turn


@cache
def num_lanes() -> int:
    """Numbers in a vector of the CPU for which numba compiles; 0 where it has none that this is of use for."""
    features = cpu_target.target_context.codegen().magic_tuple()[2].split(",")
    return 16 if "+avx512f" in features else 0


def _tile(num_rows: int, num_tokens: int) -> Any:
    """
    `tile(weight, tokens, outputs, length, stride)`: products of neighbouring rows of `length` float32, a multiple of
    16, with neighbouring tokens of as many become `outputs[token * stride + row]`. All three are addresses.

    Every product is summed in the same order, whatever the tile: a token's result does not depend on the others.
    """

    @written(types.void, *[types.int64] * 5)
    def tile(builder, weight, tokens, outputs, length, stride):
        lanes = _Lanes(builder, num_lanes())
        sums = [[lanes.zeros() for _ in range(num_tokens)] for _ in range(num_rows)]
        with cgutils.for_range_slice(builder, I64(0), length, I64(lanes.number), I64) as (begin, _):
            starts = [builder.add(begin, builder.mul(I64(row), length)) for row in range(num_rows)]
            factors = [lanes.load(weight, start) for start in starts]
            for start in starts:
                lanes.send_for(weight, builder.add(start, builder.mul(I64(_AHEAD * num_rows), length)))
            for token in range(num_tokens):
                numbers = lanes.load(tokens, builder.add(begin, builder.mul(I64(token), length)))
                for row in range(num_rows):
                    lanes.add_products(sums[row][token], factors[row], numbers)
        for row in range(num_rows):
            for token in range(num_tokens):
                index = builder.add(builder.mul(I64(token), stride), I64(row))
                builder.store(lanes.total(sums[row][token]), place(builder, outputs, index, FLOAT))

    return tile


class _Lanes:
    """Writes instructions on vectors of so many numbers."""

    def __init__(self, builder: ir.IRBuilder, number: int):
        self.builder, self.number = builder, number
        self.kind = ir.VectorType(FLOAT, number)

    def zeros(self) -> ir.Value:
        return cgutils.alloca_once_value(self.builder, ir.Constant(self.kind, [0.0] * self.number))

    def load(self, address: ir.Value, index: ir.Value) -> ir.Value:
        return self.builder.load(self._pointer(address, index), align=4)

    def _pointer(self, address: ir.Value, index: ir.Value) -> ir.Value:
        return self.builder.bitcast(place(self.builder, address, index, FLOAT), self.kind.as_pointer())

    def add_products(self, sums: ir.Value, factors: ir.Value, numbers: ir.Value) -> None:
        name = f"llvm.fma.v{self.number}f32"
        self.builder.store(call(self.builder, name, self.kind, factors, numbers, self.builder.load(sums)), sums)

    def total(self, sums: ir.Value) -> ir.Value:
        """Halves are added up until one number is left."""
        builder, vector, half = self.builder, self.builder.load(sums), self.number // 2
        while half:
            kind = ir.VectorType(I32, half)
            first, second = ir.Constant(kind, list(range(half))), ir.Constant(kind, list(range(half, 2 * half)))
            vector = builder.fadd(
                builder.shuffle_vector(vector, vector, first), builder.shuffle_vector(vector, vector, second)
            )
            half //= 2
        return builder.extract_element(vector, I32(0))

    def send_for(self, address: ir.Value, index: ir.Value) -> None:
        """Lets the memory fetch what is needed soon."""
        pointer = self.builder.bitcast(place(self.builder, address, index, FLOAT), I8.as_pointer())
        call(self.builder, "llvm.prefetch.p0", ir.VoidType(), pointer, I32(0), I32(3), I32(1))


tile_1x1, tile_4x1, tile_4x2, tile_4x3, tile_4x4, tile_4x5, tile_4x6, tile_3x7, tile_3x8 = (
    _tile(*size) for size in ((1, 1), (4, 1), (4, 2), (4, 3), (4, 4), (4, 5), (4, 6), (3, 7), (3, 8))
)
