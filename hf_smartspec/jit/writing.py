"""What writes instructions by itself, where numba has no words for them: vectors, bits, prefetching."""

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
FLOAT, HALF = ir.FloatType(), ir.HalfType()


class _BFloat(ir.Type):
    """llvmlite has no word for it."""

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
    """Of the CPU for which numba compiles, such as "+avx512f"."""
    return frozenset(cpu_target.target_context.codegen().magic_tuple()[2].split(","))


@cache
def cpu_name() -> str:
    """As LLVM calls it, such as "znver5"."""
    return str(cpu_target.target_context.codegen().magic_tuple()[1])


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


def send_for(builder: ir.IRBuilder, pointer: ir.Value) -> None:
    """Lets the memory fetch what is needed soon, to be read and to stay in the cache. Any address will do."""
    byte = builder.bitcast(pointer, I8.as_pointer())
    call(builder, "llvm.prefetch.p0", ir.VoidType(), byte, I32(0), I32(3), I32(1))


def hold_order(builder: ir.IRBuilder) -> None:
    """
    What is read from memory behind this place is not read before. Compilers would read early whatever they can, and run
    out of registers.
    """
    builder.call(ir.InlineAsm(ir.FunctionType(ir.VoidType(), []), "", "~{memory}", side_effect=True), [])


def float32_of(builder: ir.IRBuilder, bits: ir.Value) -> ir.Value:
    """A float32 from the bits of a bfloat16."""
    return builder.bitcast(builder.shl(builder.zext(bits, I32), I32(16)), FLOAT)


def bfloat16_of(builder: ir.IRBuilder, number: ir.Value) -> ir.Value:
    """The bits of the bfloat16 that is nearest to a float32, halves to even."""
    bits = builder.bitcast(number, I32)
    odd = builder.and_(builder.lshr(bits, I32(16)), I32(1))
    rounded = builder.lshr(builder.add(bits, builder.add(odd, I32(0x7FFF))), I32(16))
    is_none = builder.fcmp_unordered("uno", number, number)
    return builder.trunc(builder.select(is_none, I32(_QUIET_NAN), rounded), I16)


def power_of_two_of(builder: ir.IRBuilder, power: ir.Value) -> ir.Value:
    """A float32, for powers from -126 to 127."""
    return builder.bitcast(builder.shl(builder.add(power, I32(127)), I32(23)), FLOAT)
