"""
Pointers for compiled code. Reading an array through a pointer costs half: there is no reference count, no index from
the end, and one number per array to pass on. `pointer[k]` reads and writes as with an array. The caller keeps the array
alive.
"""

from typing import Any

from llvmlite import ir  # type: ignore[import-untyped]
from numba import types
from numba.extending import intrinsic

from .writing import I64, bfloat16_of, call, float32_of, fused_of, power_of_two_of, written
from .writing import prefetch as write_prefetch


def _pointer_to(number_type: types.Type) -> Any:
    @intrinsic
    def pointer(typing_context, address):
        def generate(context, builder, signature, args):
            return builder.inttoptr(args[0], context.get_value_type(signature.return_type))

        return types.CPointer(number_type)(address), generate

    return pointer


int8_at, int32_at, int64_at = (_pointer_to(kind) for kind in (types.int8, types.int32, types.int64))
uint8_at = _pointer_to(types.uint8)
float32_at, float64_at = _pointer_to(types.float32), _pointer_to(types.float64)
bfloat16_at = _pointer_to(types.uint16)  # as bits, since numba has no bfloat16
widened = written(types.float32, types.uint16)(float32_of)

power_of_two = written(types.float32, types.int32)(power_of_two_of)
fused = written(types.float32, *[types.float32] * 3)(fused_of)


@intrinsic
def ahead(typing_context, pointer, distance):
    """Return the pointer to entry `distance`."""

    def generate(context, builder, signature, args):
        return builder.gep(args[0], [args[1]])

    return pointer(pointer, types.int64), generate


@intrinsic
def like(typing_context, pointer, address):
    """Return the pointer to `address` of the type that `pointer` has."""

    def generate(context, builder, signature, args):
        return builder.inttoptr(args[1], context.get_value_type(signature.return_type))

    return pointer(pointer, types.int64), generate


@intrinsic
def get(typing_context, pointer, index):
    """Return entry `index`, a float32 or the bits of a bfloat16, as a float32."""

    def generate(context, builder, signature, args):
        value = builder.load(builder.gep(args[0], [args[1]]))
        return float32_of(builder, value) if signature.args[0].dtype == types.uint16 else value

    return types.float32(pointer, types.int64), generate


@intrinsic
def rounded(typing_context, pointer, number):
    """Return a float32, rounded to the nearest bfloat16 where the entries of `pointer` are of that type."""

    def generate(context, builder, signature, args):
        is_half = signature.args[0].dtype == types.uint16
        return float32_of(builder, bfloat16_of(builder, args[1])) if is_half else args[1]

    return types.float32(pointer, types.float32), generate


@intrinsic
def call_at(typing_context, address):
    """Call the function at `address`, which takes and returns nothing."""

    def generate(context, builder, signature, args):
        function = builder.inttoptr(args[0], ir.FunctionType(ir.VoidType(), []).as_pointer())
        builder.call(function, [])
        return context.get_dummy_value()

    return types.void(types.int64), generate


@intrinsic
def put(typing_context, pointer, index, number):
    """Write a float32 to entry `index`, rounded to the nearest bfloat16 where the entries are of that type."""

    def generate(context, builder, signature, args):
        pointer, index, number = args
        value = bfloat16_of(builder, number) if signature.args[0].dtype == types.uint16 else number
        builder.store(value, builder.gep(pointer, [index]))
        return context.get_dummy_value()

    return types.void(pointer, types.int64, types.float32), generate


@intrinsic
def prefetch(typing_context, pointer, distance):
    """Prefetch the cache line of entry `distance`. Any address is allowed, even one outside the process's memory."""

    def generate(context, builder, signature, args):
        write_prefetch(builder, builder.gep(args[0], [args[1]]))
        return context.get_dummy_value()

    return types.void(pointer, types.int64), generate


@intrinsic
def itemsize_of(typing_context, pointer):
    """Return the bytes of an entry, as a constant."""

    def generate(context, builder, signature, args):
        return I64(signature.args[0].dtype.bitwidth // 8)

    return types.int64(pointer), generate


@intrinsic
def take(typing_context, pointer):
    """Return the integer at `pointer` and increment it atomically, so that every caller gets a different one."""

    def generate(context, builder, signature, args):
        return builder.atomic_rmw("add", args[0], ir.IntType(64)(1), "acq_rel")

    return types.int64(pointer), generate


@intrinsic
def add_to(typing_context, pointer, number):
    """
    Add to the integer at `pointer` atomically, and return what it was. What this thread wrote before is seen by those
    that `read` the sum.
    """

    def generate(context, builder, signature, args):
        return builder.atomic_rmw("add", args[0], args[1], "acq_rel")

    return types.int64(pointer, types.int64), generate


@intrinsic
def read(typing_context, pointer):
    """Return the integer at `pointer` as other threads have left it, with all that they wrote before."""

    def generate(context, builder, signature, args):
        return builder.load_atomic(args[0], "acquire", 8)

    return types.int64(pointer), generate


@intrinsic
def pause(typing_context):
    """Tell the processor that this thread waits for another one."""

    def generate(context, builder, signature, args):
        call(builder, "llvm.x86.sse2.pause", ir.VoidType())
        return context.get_dummy_value()

    return types.void(), generate
