"""Softmax of float32 scores, in vectors as wide as the CPU has them."""

from llvmlite import ir  # type: ignore[import-untyped]
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from ...jit.writing import FLOAT, I32, I64, call
from .vectors import num_lanes

# An exponential is added up as a whole number of 2^-16 and another of 2^-33, each in 32 bits, so that no order of
# additions changes the sum. The latter are below 2^17, and sums of `MOST_SCORES` below 2^31.
MOST_SCORES = 2**13
_WHOLES, _PARTS = 2.0**16, 2.0**17
UNITS = _WHOLES * _PARTS
_LEAST = -87.0  # exponentials of lower numbers would be subnormal, and are 0
_PER_LOG2, _LOG2_HIGH, _LOG2_LOW = 1.4426950408889634, 0.693359375, -2.12194440e-4
# Coefficients of the exponential up to half the logarithm of 2, by Cephes (Moshier).
_POWERS = (
    1.9875691500e-4,
    1.3981999507e-3,
    8.3334519073e-3,
    4.1665795894e-2,
    1.6666665459e-1,
    5.0000001201e-1,
)


@intrinsic
def largest(typing_context, numbers, length):
    """Return the largest of `length` float32; one that is NaN is passed over, unless it is the first."""

    def generate(context, builder, signature, arguments):
        pointer, length = arguments
        kind = ir.VectorType(FLOAT, num_lanes())
        found = cgutils.alloca_once_value(builder, builder.load(pointer))

        def keep(number):
            most = builder.load(found)
            builder.store(builder.select(builder.fcmp_ordered(">", number, most), number, most), found)

        whole, first = builder.and_(length, I64(-num_lanes())), ir.Constant(ir.VectorType(I32, num_lanes()), None)
        with builder.if_then(builder.icmp_signed("!=", whole, I64(0))):
            one = builder.insert_element(ir.Constant(kind, ir.Undefined), builder.load(found), I32(0))
            several = cgutils.alloca_once_value(builder, builder.shuffle_vector(one, one, first))
            with cgutils.for_range_slice(builder, I64(0), whole, I64(num_lanes()), I64) as (begin, _):
                own = builder.load(builder.bitcast(builder.gep(pointer, [begin]), kind.as_pointer()), align=4)
                most = builder.load(several)
                builder.store(builder.select(builder.fcmp_ordered(">", own, most), own, most), several)
            for lane in range(num_lanes()):
                keep(builder.extract_element(builder.load(several), I32(lane)))
        with cgutils.for_range_slice(builder, whole, length, I64(1), I64) as (index, _):
            keep(builder.load(builder.gep(pointer, [index])))
        return builder.load(found)

    return types.float32(numbers, types.int64), generate


@intrinsic
def exponentiate(typing_context, scores, length, highest, scale):
    """
    Replace up to `MOST_SCORES` scores by exponentials of their scaled distance to the highest, exact but for the last
    bit or two; return the exponentials' sum in units of `1 / UNITS`. NaN stays NaN, and adds any number.
    """

    def generate(context, builder, signature, arguments):
        pointer, length, highest, scale = arguments
        writer = _Exponentials(builder, highest, scale)
        whole = builder.and_(length, I64(-num_lanes()))
        with cgutils.for_range_slice(builder, I64(0), whole, I64(num_lanes()), I64) as (begin, _):
            writer.replace(writer.pointer_to(pointer, begin))
        with builder.if_then(builder.icmp_signed("!=", whole, length)):
            writer.replace_few(writer.pointer_to(pointer, whole), builder.trunc(builder.sub(length, whole), I32))
        return writer.total()

    return types.int64(scores, types.int64, types.float32, types.float32), generate


class _Exponentials:
    """Writer of instructions that exponentiate vectors of scores, and add up what they have found."""

    def __init__(self, builder: ir.IRBuilder, highest: ir.Value, scale: ir.Value):
        self.builder, number = builder, num_lanes()
        self.floats, self.integers = ir.VectorType(FLOAT, number), ir.VectorType(I32, number)
        self.highest, self.scale = self._filled(highest), self._filled(scale)
        zeros = ir.Constant(self.integers, [0] * number)
        self.sums = [cgutils.alloca_once_value(builder, zeros) for _ in (_WHOLES, _PARTS)]

    def pointer_to(self, pointer: ir.Value, index: ir.Value) -> ir.Value:
        return self.builder.bitcast(self.builder.gep(pointer, [index]), self.floats.as_pointer())

    def replace(self, pointer: ir.Value) -> None:
        """Replace a vector of scores by their exponentials, which are added to the sums."""
        found = self._exponential(self.builder.load(pointer, align=4))
        self.builder.store(found, pointer, align=4)
        self._count(found)

    def replace_few(self, pointer: ir.Value, number: ir.Value) -> None:
        """Do as `replace` with the first `number` scores of a vector."""
        builder, name = self.builder, f"v{num_lanes()}f32.p0"
        is_own = builder.icmp_signed("<", ir.Constant(self.integers, list(range(num_lanes()))), self._filled(number))
        scores = call(builder, f"llvm.masked.load.{name}", self.floats, pointer, I32(4), is_own, self.highest)
        found = self._exponential(scores)
        call(builder, f"llvm.masked.store.{name}", ir.VoidType(), found, pointer, I32(4), is_own)
        self._count(builder.select(is_own, found, self._all(0.0)))

    def total(self) -> ir.Value:
        """Return the sum in units of `1 / UNITS`, as int64."""
        builder, total = self.builder, I64(0)
        for factor, sums in ((int(_PARTS), self.sums[0]), (1, self.sums[1])):
            number = call(builder, f"llvm.vector.reduce.add.v{num_lanes()}i32", I32, builder.load(sums))
            total = builder.add(total, builder.mul(builder.sext(number, I64), I64(factor)))
        return total

    def _count(self, numbers: ir.Value) -> None:
        builder, numbers = self.builder, self.builder.fmul(numbers, self._all(_WHOLES))
        whole = builder.fptosi(numbers, self.integers)
        rest = builder.fmul(builder.fsub(numbers, builder.sitofp(whole, self.floats)), self._all(_PARTS))
        for sums, more in zip(self.sums, (whole, builder.fptosi(rest, self.integers))):
            builder.store(builder.add(builder.load(sums), more), sums)

    def _exponential(self, scores: ir.Value) -> ir.Value:
        """Return the exponentials of scores' scaled distance to the highest; NaN stays NaN."""
        builder = self.builder
        x = builder.fmul(builder.fsub(scores, self.highest), self.scale)
        is_small = builder.fcmp_ordered("<", x, self._all(_LEAST))
        x = builder.select(is_small, self._all(0.0), x)
        power = builder.fptosi(self._fused(x, self._all(_PER_LOG2), self._all(-0.5)), self.integers)
        whole = builder.sitofp(power, self.floats)
        x = self._fused(whole, self._all(-_LOG2_LOW), self._fused(whole, self._all(-_LOG2_HIGH), x))
        powers = self._all(_POWERS[0])
        for coefficient in _POWERS[1:]:
            powers = self._fused(powers, x, self._all(coefficient))
        found = builder.fadd(self._fused(powers, builder.fmul(x, x), x), self._all(1.0))
        bits = builder.shl(builder.add(power, self._all(127, I32)), self._all(23, I32))
        return builder.select(is_small, self._all(0.0), builder.fmul(found, builder.bitcast(bits, self.floats)))

    def _fused(self, x: ir.Value, y: ir.Value, z: ir.Value) -> ir.Value:
        return call(self.builder, f"llvm.fma.v{num_lanes()}f32", self.floats, x, y, z)

    def _all(self, number: float, kind: ir.Type = FLOAT) -> ir.Constant:
        return ir.Constant(ir.VectorType(kind, num_lanes()), [number] * num_lanes())

    def _filled(self, number: ir.Value) -> ir.Value:
        kind = ir.VectorType(number.type, num_lanes())
        one = self.builder.insert_element(ir.Constant(kind, ir.Undefined), number, I32(0))
        return self.builder.shuffle_vector(one, one, ir.Constant(self.integers, [0] * num_lanes()))
