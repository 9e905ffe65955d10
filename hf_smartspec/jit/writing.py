"""Intrinsics written in LLVM instructions, for operations that numba lacks: vectors, bits, prefetching."""

from collections.abc import Callable
from functools import cache
from inspect import signature
from typing import Any

from llvmlite import ir  # type: ignore[import-untyped]
from numba import types
from numba.core import cgutils
from numba.core.registry import cpu_target
from numba.extending import intrinsic

I8, I16, I32, I64 = map(ir.IntType, (8, 16, 32, 64))
FLOAT = ir.FloatType()
LINE = 64  # bytes of a line of the processor's cache


class _BFloat(ir.Type):
    """LLVM's type `bfloat`, which llvmlite does not define."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, type(self))

    def __hash__(self) -> int:
        return hash(type(self))


BFLOAT = _BFloat()
_QUIET_NAN = 0x7FC0  # of bfloat16


@cache
def cpu_features() -> frozenset[str]:
    """Return the features of the CPU for which numba compiles, such as "+avx512f"."""
    return frozenset(cpu_target.target_context.codegen().magic_tuple()[2].split(","))


@cache
def cpu_name() -> str:
    """Return LLVM's name of the CPU for which numba compiles, such as "znver5"."""
    return str(cpu_target.target_context.codegen().magic_tuple()[1])


def written(result: types.Type, *kinds: types.Type) -> Callable[[Callable], Any]:
    """
    Return a decorator that makes an intrinsic of `write(builder, *arguments)`, a function that writes instructions; the
    intrinsic takes arguments of `kinds` and returns a `result`.
    """

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
    """Return a pointer to entry `index` of the array of `kind` at `address`."""
    return builder.gep(builder.inttoptr(address, kind.as_pointer()), [index])


def call(builder: ir.IRBuilder, name: str, result: ir.Type, *arguments: ir.Value) -> ir.Value:
    """Call one of LLVM's own functions."""
    kind = ir.FunctionType(result, [argument.type for argument in arguments])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), arguments)


def prefetch(builder: ir.IRBuilder, pointer: ir.Value) -> None:
    """
    Prefetch the cache line of this address, which will be read soon, and then not for long. Any address is allowed. On
    AMD's CPUs it is marked as not used again, so that it does not displace what every step uses, such as the host's own
    code; on others it goes to level 2, of which a core can wait for many more lines at a time than of level 1.
    """
    byte = builder.bitcast(pointer, I8.as_pointer())
    locality = I32(0 if cpu_name().startswith("znver") else 2)
    call(builder, "llvm.prefetch.p0", ir.VoidType(), byte, I32(0), locality, I32(1))


def hold_order(builder: ir.IRBuilder) -> None:
    """
    Insert a compiler barrier: reads after this place are not moved before it. The compiler would otherwise read as
    early as it can, and run out of registers.
    """
    builder.call(ir.InlineAsm(ir.FunctionType(ir.VoidType(), []), "", "~{memory}", side_effect=True), [])


def float32_of(builder: ir.IRBuilder, bits: ir.Value) -> ir.Value:
    """Return the float32 of a bfloat16's bits, or those of a vector."""
    wide = builder.zext(bits, _like(bits, I32))
    return builder.bitcast(builder.shl(wide, wide.type(_all(bits, 16))), _like(bits, FLOAT))


def bfloat16_of(builder: ir.IRBuilder, number: ir.Value) -> ir.Value:
    """Return the bits of the bfloat16 nearest to a float32, ties to even, or to those of a vector."""
    kind = _like(number, I32)
    bits, sixteen = builder.bitcast(number, kind), kind(_all(number, 16))
    odd = builder.and_(builder.lshr(bits, sixteen), kind(_all(number, 1)))
    rounded = builder.lshr(builder.add(bits, builder.add(odd, kind(_all(number, 0x7FFF)))), sixteen)
    is_nan = builder.fcmp_unordered("uno", number, number)
    return builder.trunc(builder.select(is_nan, kind(_all(number, _QUIET_NAN)), rounded), _like(number, I16))


def _like(value: ir.Value, kind: ir.Type) -> ir.Type:
    """Return the type of as many numbers of a kind as `value` holds."""
    return ir.VectorType(kind, value.type.count) if isinstance(value.type, ir.VectorType) else kind


def _all(value: ir.Value, number: int) -> int | list[int]:
    return [number] * value.type.count if isinstance(value.type, ir.VectorType) else number


def power_of_two_of(builder: ir.IRBuilder, power: ir.Value) -> ir.Value:
    """Return 2 ** `power` as a float32, for powers from -126 to 127."""
    return builder.bitcast(builder.shl(builder.add(power, I32(127)), I32(23)), FLOAT)


def fused_of(builder: ir.IRBuilder, x: ir.Value, y: ir.Value, z: ir.Value) -> ir.Value:
    """Return `x * y + z` of float32, rounded once."""
    return call(builder, "llvm.fma.f32", FLOAT, x, y, z)
