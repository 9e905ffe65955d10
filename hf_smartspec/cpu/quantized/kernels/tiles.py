"""Sums of products of 16 outputs with many tokens at once, by the instructions of CPUs with matrix registers (AMX)."""

from typing import Any

from llvmlite import ir  # type: ignore[import-untyped]
from numba import types
from numba.core import cgutils

from ....jit.writing import I8, I64, call, cpu_features, place, prefetch, written

SIDE, LINE = 16, 64  # rows of a register, and bytes of a row
MOST_BLOCKS = 2  # blocks of 16 tokens whose sums are in registers
_WEIGHT, _LEVELS, _LAST_WEIGHT, _LAST_LEVELS = range(MOST_BLOCKS, MOST_BLOCKS + 4)  # registers after those of sums
_NEED = {"+amx-tile", "+amx-int8"}


def has_tiles() -> bool:
    """Return whether the CPU for which numba compiles has matrix registers. Linux must allow their use, too."""
    return cpu_features() >= _NEED


def configuration(num_inputs: int) -> bytes:
    """
    Return the configuration of the registers. All are full but those for the last part of a row of weights, whose
    length is a multiple of four bytes.
    """
    rest = num_inputs % LINE or LINE
    widths, heights = [LINE] * 8, [SIDE] * 8
    widths[_LAST_WEIGHT], heights[_LAST_LEVELS] = rest, rest // 4
    numbers = b"".join(width.to_bytes(2, "little") for width in widths)
    return bytes([1]).ljust(16, b"\0") + numbers.ljust(32, b"\0") + bytes(heights).ljust(16, b"\0")


@written(types.void, types.int64)
def configure(builder, address):
    call(builder, "llvm.x86.ldtilecfg", ir.VoidType(), place(builder, address, I64(0), I8))


@written(types.void)
def release(builder):
    call(builder, "llvm.x86.tilerelease", ir.VoidType())


def _sums(num_blocks: int) -> Any:
    """
    Return `sums(weight, length, levels, block, output)`, which multiplies 16 neighbouring rows of `length` int8 by
    blocks of 16 tokens. Every `block` bytes hold the levels of 16 tokens, four of each token side by side. Sums of
    products, int32, become `output[row, token]`.
    """

    @written(types.void, *[types.int64] * 5)
    def sums(builder, weight, length, levels, block, output):
        tiles, blocks = _Tiles(builder), range(num_blocks)

        def add(begin: ir.Value, of_weight: int, of_levels: int) -> None:
            tiles.load(of_weight, weight, begin, length)
            for index in blocks:
                at = builder.add(builder.mul(begin, I64(SIDE)), builder.mul(I64(index), block))
                tiles.load(of_levels, levels, at, I64(LINE))
                tiles.call("tdpbssd", index, of_weight, of_levels)

        for index in blocks:
            tiles.call("tilezero", index)
        last = builder.and_(builder.sub(length, I64(1)), I64(-LINE))
        with cgutils.for_range_slice(builder, I64(0), last, I64(LINE), I64) as (begin, _):
            tiles.prefetch(weight, begin, length)
            add(begin, _WEIGHT, _LEVELS)
        add(last, _LAST_WEIGHT, _LAST_LEVELS)
        for index in blocks:
            tiles.store(index, output, I64(LINE * index), I64(LINE * num_blocks))

    return sums


class _Tiles:
    """Writer of instructions on registers by their numbers."""

    def __init__(self, builder: ir.IRBuilder):
        self.builder = builder

    def call(self, name: str, *arguments: int | ir.Value) -> None:
        values = [I8(item) if isinstance(item, int) else item for item in arguments]
        call(self.builder, f"llvm.x86.{name}", ir.VoidType(), *values)

    def load(self, register: int, address: ir.Value, index: ir.Value, stride: ir.Value) -> None:
        self.call("tileloadd64", register, place(self.builder, address, index, I8), stride)

    def store(self, register: int, address: ir.Value, index: ir.Value, stride: ir.Value) -> None:
        self.call("tilestored64", register, place(self.builder, address, index, I8), stride)

    def prefetch(self, address: ir.Value, index: ir.Value, length: ir.Value) -> None:
        """Prefetch the next 16 rows' part of a weight."""
        for row in range(SIDE, 2 * SIDE):
            start = self.builder.add(index, self.builder.mul(I64(row), length))
            prefetch(self.builder, place(self.builder, address, start, I8))


sums_1, sums_2 = _sums(1), _sums(2)
