"""Numbers at addresses, for compiled code: three floating dtypes, whose values are float32 in between."""

from collections.abc import Callable
from inspect import signature
from typing import Any

from llvmlite import ir  # type: ignore[import-untyped]
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

I8, I16, I32, I64 = map(ir.IntType, (8, 16, 32, 64))
FLOAT, HALF = ir.FloatType(), ir.HalfType()
_QUIET_NAN = 0x7FC0  # of bfloat16


def written(result: types.Type, *kinds: types.Type) -> Callable[[Callable], Any]:
    """What compiled code can call, from a function that writes its instructions: `write(builder, *arguments)`."""

    def decorate(write: Callable) -> Any:
        def typed(context: Any, *_: Any) -> Any:
            return result(*kinds), generate

        def generate(context: Any, builder: ir.IRBuilder, _: Any, arguments: Any) -> Any:
            value = write(builder, *arguments)
            return context.get_dummy_value() if value is None else value

        typed.__name__, typed.__doc__ = write.__name__, write.__doc__
        typed.__signature__ = signature(write)  # type: ignore[attr-defined]
        return intrinsic(typed)

    return decorate


def place(builder: ir.IRBuilder, address: ir.Value, index: ir.Value, kind: ir.Type) -> ir.Value:
    """A pointer to an entry of an array of this kind."""
    return builder.gep(builder.inttoptr(address, kind.as_pointer()), [index])


def call(builder: ir.IRBuilder, name: str, result: ir.Type, *arguments: ir.Value) -> ir.Value:
    """One of LLVM's own functions."""
    kind = ir.FunctionType(result, [argument.type for argument in arguments])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), arguments)


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
    bits = builder.zext(builder.load(place(builder, address, index, I16)), I32)
    return builder.bitcast(builder.shl(bits, I32(16)), FLOAT)


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
    """Rounded to the nearest, halves to even."""
    bits = builder.bitcast(number, I32)
    odd = builder.and_(builder.lshr(bits, I32(16)), I32(1))
    rounded = builder.lshr(builder.add(bits, builder.add(odd, I32(0x7FFF))), I32(16))
    rounded = builder.select(builder.fcmp_unordered("uno", number, number), I32(_QUIET_NAN), rounded)
    builder.store(builder.trunc(rounded, I16), place(builder, address, index, I16))


@written(types.void, types.int64, types.int64, types.float32)
def store_float16(builder, address, index, number):
    """Rounded to the nearest, halves to even."""
    builder.store(builder.fptrunc(number, HALF), place(builder, address, index, HALF))


@written(types.int32, types.float32)
def bits_of(builder, number):
    return builder.bitcast(number, I32)


@written(types.float32, types.int32)
def float_of(builder, bits):
    return builder.bitcast(bits, FLOAT)


@written(types.int32, types.float32)
def nearest(builder, number):
    """The integer next to a number, halves to even."""
    return builder.fptosi(call(builder, "llvm.roundeven.f32", FLOAT, number), I32)


@written(types.int64, types.int64, types.int64)
def take(builder, address, index):
    """The int64 that is there; one more is left, whatever other threads do."""
    return builder.atomic_rmw("add", place(builder, address, index, I64), I64(1), "monotonic")


def room_for(count: int) -> Any:
    """What gives the address of so many numbers of four bytes, which are gone when the calling function returns."""

    @written(types.int64)
    def room(builder):
        return builder.ptrtoint(cgutils.alloca_once(builder, ir.ArrayType(I32, count)), I64)

    return room
