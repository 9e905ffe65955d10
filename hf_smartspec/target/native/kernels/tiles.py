"""Products of a few rows of a weight with a few tokens, float32 or bfloat16, in vectors as wide as the CPU has them."""

from typing import Any

from llvmlite import ir  # type: ignore[import-untyped]
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from ....jit.writing import FLOAT, I16, I32, I64, bfloat16_of, call, cpu_features, float32_of, send_for

_AHEAD = 2  # tiles of rows that are sent for before their turn


def num_lanes() -> int:
    """Numbers in a vector of the CPU for which numba compiles; 0 where it has none that this is of use for."""
    return 16 if "+avx512f" in cpu_features() else 0


def _tile(num_rows: int, num_tokens: int) -> Any:
    """
    `tile(weight, tokens, bias, outputs, length, stride)`: products of neighbouring rows of `length` numbers, a multiple
    of 16, with neighbouring tokens of as many become `outputs[token * stride + row]`, with `bias[row]` added unless
    that is no address.

    Numbers are float32, or the bits of bfloat16, which are rounded once. Every product is summed in the same order,
    whatever the tile: a token's result does not depend on the others.
    """

    @intrinsic
    def tile(typing_context, weight, tokens, bias, outputs, length, stride):
        def generate(context, builder, signature, arguments):
            lanes = _Lanes(builder, num_lanes(), signature.args[0].dtype)
            _write_tile(lanes, num_rows, num_tokens, *arguments)
            return context.get_dummy_value()

        return types.void(weight, tokens, bias, outputs, types.int64, types.int64), generate

    return tile


def _write_tile(lanes, num_rows, num_tokens, weight, tokens, bias, outputs, length, stride):
    builder = lanes.builder
    sums = [[lanes.zeros() for _ in range(num_tokens)] for _ in range(num_rows)]
    with cgutils.for_range_slice(builder, I64(0), length, I64(lanes.number), I64) as (begin, _):
        starts = [builder.add(begin, builder.mul(I64(row), length)) for row in range(num_rows)]
        factors = [lanes.load(weight, start) for start in starts]
        for start in starts:
            ahead = builder.add(start, builder.mul(I64(_AHEAD * num_rows), length))
            send_for(builder, builder.gep(weight, [ahead]))
        for token in range(num_tokens):
            numbers = lanes.load(tokens, builder.add(begin, builder.mul(I64(token), length)))
            for row in range(num_rows):
                lanes.add_products(sums[row][token], factors[row], numbers)
    for row in range(num_rows):
        more = lanes.load_one(bias, I64(row))
        for token in range(num_tokens):
            index = builder.add(builder.mul(I64(token), stride), I64(row))
            lanes.store_one(builder.fadd(lanes.total(sums[row][token]), more), outputs, index)


class _Lanes:
    """
    Writes instructions on vectors of so many float32.

    Args:
        kind (`types.Type`): Of the numbers in memory: float32, or the bits of bfloat16.
    """

    def __init__(self, builder: ir.IRBuilder, number: int, kind: types.Type):
        self.builder, self.number = builder, number
        self.is_half = kind is not types.float32
        self.floats, self.integers = ir.VectorType(FLOAT, number), ir.VectorType(I32, number)

    def zeros(self) -> ir.Value:
        return cgutils.alloca_once_value(self.builder, ir.Constant(self.floats, [0.0] * self.number))

    def load(self, pointer: ir.Value, index: ir.Value) -> ir.Value:
        builder, pointer = self.builder, self.builder.gep(pointer, [index])
        if not self.is_half:
            return builder.load(builder.bitcast(pointer, self.floats.as_pointer()), align=4)
        bits = builder.load(builder.bitcast(pointer, ir.VectorType(I16, self.number).as_pointer()), align=2)
        shift = ir.Constant(self.integers, [16] * self.number)
        return builder.bitcast(builder.shl(builder.zext(bits, self.integers), shift), self.floats)

    def load_one(self, pointer: ir.Value, index: ir.Value) -> ir.Value:
        """A number as float32; 0 where the pointer is no address."""
        builder = self.builder
        number = cgutils.alloca_once_value(builder, FLOAT(0.0))
        with builder.if_then(builder.icmp_unsigned("!=", pointer, ir.Constant(pointer.type, None))):
            found = builder.load(builder.gep(pointer, [index]))
            if self.is_half:
                found = float32_of(builder, found)
            builder.store(found, number)
        return builder.load(number)

    def store_one(self, number: ir.Value, pointer: ir.Value, index: ir.Value) -> None:
        """A float32, rounded to the nearest bfloat16, halves to even, where these are stored."""
        builder = self.builder
        if self.is_half:
            number = bfloat16_of(builder, number)
        builder.store(number, builder.gep(pointer, [index]))

    def add_products(self, sums: ir.Value, factors: ir.Value, numbers: ir.Value) -> None:
        name = f"llvm.fma.v{self.number}f32"
        more = call(self.builder, name, self.floats, factors, numbers, self.builder.load(sums))
        self.builder.store(more, sums)

    def total(self, sums: ir.Value) -> ir.Value:
        """Halves are added up until one number is left."""
        builder, vector, half = self.builder, self.builder.load(sums), self.number // 2
        while half:
            places = [ir.Constant(ir.VectorType(I32, half), list(range(at, at + half))) for at in (0, half)]
            vector = builder.fadd(*[builder.shuffle_vector(vector, vector, part) for part in places])
            half //= 2
        return builder.extract_element(vector, I32(0))


tile_1x1, tile_4x1, tile_4x2, tile_4x3, tile_4x4, tile_4x5, tile_4x6, tile_3x7, tile_3x8 = (
    _tile(*size) for size in ((1, 1), (4, 1), (4, 2), (4, 3), (4, 4), (4, 5), (4, 6), (3, 7), (3, 8))
)
