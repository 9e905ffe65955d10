"""Loads and stores for compiled code: numbers of three floating dtypes, float32 once loaded."""

from typing import Any

from llvmlite import ir  # type: ignore[import-untyped]
from numba import types
from numba.core import cgutils

from ....jit.writing import FLOAT, HALF, I8, I16, I32, I64, bfloat16_of, call, float32_of, place, written


@written(types.int64, types.int64, types.int64)
def load_int64(builder, address, index):
    return builder.load(place(builder, address, index, I64))


@written(types.int32, types.int64, types.int64)
def load_int32(builder, address, index):
    return builder.load(place(builder, address, index, I32))


@written(types.float32, types.int64, types.int64)
def load_float32(builder, address, index):
    return builder.load(place(builder, address, index, FLOAT))


@written(types.float32, types.int64, types.int64)
def load_bfloat16(builder, address, index):
    return float32_of(builder, builder.load(place(builder, address, index, I16)))


@written(types.float32, types.int64, types.int64)
def load_float16(builder, address, index):
    return builder.fpext(builder.load(place(builder, address, index, HALF)), FLOAT)


@written(types.void, types.int64, types.int64, types.int32)
def store_int8(builder, address, index, number):
    builder.store(builder.trunc(number, I8), place(builder, address, index, I8))


@written(types.void, types.int64, types.int64, types.int32)
def store_int32(builder, address, index, number):
    builder.store(number, place(builder, address, index, I32))


@written(types.void, types.int64, types.int64, types.float32)
def store_float32(builder, address, index, number):
    builder.store(number, place(builder, address, index, FLOAT))


@written(types.void, types.int64, types.int64, types.float32)
def store_bfloat16(builder, address, index, number):
    """Store a number rounded to the nearest bfloat16, ties to even."""
    builder.store(bfloat16_of(builder, number), place(builder, address, index, I16))


@written(types.void, types.int64, types.int64, types.float32)
def store_float16(builder, address, index, number):
    """Store a number rounded to the nearest float16, ties to even."""
    builder.store(builder.fptrunc(number, HALF), place(builder, address, index, HALF))


@written(types.int32, types.float32)
def bits_of(builder, number):
    return builder.bitcast(number, I32)


@written(types.float32, types.int32)
def float_of(builder, bits):
    return builder.bitcast(bits, FLOAT)


@written(types.int32, types.float32)
def nearest(builder, number):
    """Return the integer nearest to a number, ties to even."""
    return builder.fptosi(call(builder, "llvm.roundeven.f32", FLOAT, number), I32)


def room_for(count: int) -> Any:
    """
    Return a function that reserves `count` numbers of four bytes and returns their address; they are freed when the
    calling function returns.
    """

    @written(types.int64)
    def room(builder):
        return builder.ptrtoint(cgutils.alloca_once(builder, ir.ArrayType(I32, count)), I64)

    return room
