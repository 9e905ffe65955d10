"""
Sums of products of int8 numbers with weights in eight or four bits, scaled by group: with the CPU's dot products of
int8 (VNNI), or with AVX2 alone.
"""

from collections.abc import Sequence
from typing import NamedTuple

from llvmlite import ir  # type: ignore[import-untyped]
from numba import types
from numba.core import cgutils

from ...jit.writing import FLOAT, I8, I16, I32, I64, call, cpu_features, hold_order, place, prefetch, written

SIDE = 16  # outputs of a block, whose weights lie together
GROUP, PART = 64, 32  # neighbouring inputs that have one scale in a weight, and in a token
PARTS = GROUP // PART
OFFSET = 128  # added to weights, since the instruction multiplies unsigned by signed numbers
_TOGETHER = 4  # neighbouring inputs of an output, whose products one instruction adds up
BLOCK = SIDE * GROUP  # bytes of a block's weights for one group
SMALL_BLOCK = BLOCK // 2  # the same in four bits


class _Instructions(NamedTuple):
    features: Sequence[str]  # of CPUs that have the instructions
    width: int  # bytes of their vectors
    most_tokens: int  # whose sums in int32 fit the registers


_INSTRUCTIONS = {  # the fastest first
    "avx512": _Instructions(("+avx512vnni", "+avx512bw", "+avx512vl"), 64, 12),
    "avxvnni": _Instructions(("+avxvnni",), 32, 4),
    "avx2": _Instructions(("+avx2", "+f16c"), 32, 4),
}


def instructions() -> str:
    """Return the instructions with which numba's CPU multiplies, one of `_INSTRUCTIONS`; "" where it lacks them all."""
    return next((name for name, one in _INSTRUCTIONS.items() if cpu_features().issuperset(one.features)), "")


def most_tokens() -> int:
    """Return the most tokens that a block is multiplied by at once."""
    return _INSTRUCTIONS[instructions()].most_tokens


@written(types.int64)
def most_of_a_tile(builder):
    """Return `most_tokens`, as a constant of compiled code."""
    return I64(most_tokens())


@written(types.void, *[types.int64] * 10)
def dots(builder, num_tokens, weight, scales, levels, steps, offsets, sums, num_groups, distance, pace):
    """
    Multiply a block of a weight by `num_tokens` neighbouring tokens. Sums of products become `sums[token, row]`,
    float32: group by group in their order, so that a token's result does not depend on the others. For more than
    `most_tokens`, no sums are stored.

    Arguments are addresses: of a block of a weight as `Int8Linear.weight` and its scales; of levels (`[tokens, groups,
    GROUP]` int8), their steps (`[tokens, groups, PARTS]` float32) and `-OFFSET` times the sums of levels in parts
    (int32). With each group, a block's `BLOCK` bytes of weights are prefetched: first those `distance` bytes after the
    block's first weight, then `pace` bytes further each time; any memory may lie there.
    """
    _write(_Dots, _Signs, builder, num_tokens, weight, scales, levels, steps, offsets, sums, num_groups, distance, pace)


@written(types.void, *[types.int64] * 10)
def small_dots(builder, num_tokens, weight, scales, levels, steps, totals, sums, num_groups, distance, pace):
    """
    Do as `dots` with a weight in four bits, as `Int4Linear.weight` and its scales: a part's sum of products with codes
    is added times their scale, and then the sum of its levels, times their least weight. `totals` is the address of
    sums of levels in parts times their steps (float32).
    """
    _write(_Codes, _Pairs, builder, num_tokens, weight, scales, levels, steps, totals, sums, num_groups, distance, pace)


def _write(usual, with_avx2, builder, num_tokens, *addresses):
    """Write code for each number of tokens, of which that for `num_tokens` runs, by the writer for the CPU."""
    name, done = instructions(), builder.append_basic_block("done")
    vectors = (with_avx2 if name == "avx2" else usual)(builder, _INSTRUCTIONS[name].width)
    size = builder.switch(num_tokens, done)
    for number in range(1, most_tokens() + 1):
        block = builder.append_basic_block(f"dots_{number}")
        size.add_case(I64(number), block)
        builder.position_at_end(block)
        _write_for(vectors, number, *addresses)
        builder.branch(done)
    builder.position_at_end(done)


def _write_for(vectors, num_tokens, weight, scales, levels, steps, offsets, sums, num_groups, distance, pace):
    builder, tokens = vectors.builder, range(num_tokens)
    totals = [vectors.new_totals() for _ in tokens]
    with cgutils.for_range_slice(builder, I64(0), num_groups, I64(1), I64) as (group, _):
        own = [builder.add(builder.mul(I64(token), num_groups), group) for token in tokens]
        start, due = builder.mul(group, I64(vectors.block)), builder.add(distance, builder.mul(group, pace))
        parts: list[list[_Part]] = [[] for _ in tokens]
        for part in range(PARTS):
            indices = [builder.add(builder.mul(index, I64(PARTS)), I64(part)) for index in own]
            added = [builder.load(place(builder, offsets, index, vectors.added)) for index in indices]
            counts = [vectors.start(offset) for offset in added]
            for number in range(part * PART // vectors.inputs, (part + 1) * PART // vectors.inputs):
                begin = I64(_TOGETHER * SIDE * number)
                prefetch(builder, place(builder, weight, builder.add(due, begin), I8))
                loaded = vectors.weights(place(builder, weight, builder.add(start, begin), I8))
                for place_of, factors in enumerate(loaded):
                    first = I64(vectors.inputs * number + _TOGETHER * place_of)
                    for token, index in enumerate(own):
                        level = builder.add(builder.mul(index, I64(GROUP)), first)
                        numbers = vectors.levels(place(builder, levels, level, I8))
                        counts[token] = vectors.more(counts[token], factors, numbers)
                hold_order(builder)  # many prefetches in a row would keep numbers waiting that are needed now
            for token, index in enumerate(indices):
                step = builder.load(place(builder, steps, index, FLOAT))
                parts[token].append(_Part(vectors.scaled(counts[token], step), added[token]))
        vectors.add_group(totals, parts, scales, group)
    for token, total in enumerate(totals):
        vectors.store(total, place(builder, sums, I64(token * SIDE), FLOAT))


class _Part(NamedTuple):
    sums: list[ir.Value]  # of a token's products in a part of a group
    added: ir.Value  # the token's offset or total


class _Dots:
    """
    Writer of instructions on the sums of a block's outputs, in several vectors of `width` bytes. It multiplies unsigned
    by signed int8, and adds up four products at once, by VNNI.
    """

    block, inputs = BLOCK, _TOGETHER  # bytes of a group's weights, and inputs whose weights are loaded at a time
    added = I32  # what `offsets` holds

    def __init__(self, builder: ir.IRBuilder, width: int):
        self.builder, self.width = builder, width
        lanes = self.lanes = width // 4
        self.bytes, self.integers = ir.VectorType(I8, width), ir.VectorType(I32, lanes)
        self.floats = ir.VectorType(FLOAT, lanes)
        self.parts = range(SIDE // lanes)

    def weights(self, pointer: ir.Value) -> list[list[ir.Value]]:
        """Load the weights of a block's outputs for `inputs`, and return them as they are multiplied, four by four."""
        offsets = ir.Constant(self.bytes, [OFFSET - 256] * self.width)
        found = [self._load(pointer, self.bytes, part * self.width) for part in self.parts]
        return [[self.builder.bitcast(self.builder.xor(part, offsets), self.integers) for part in found]]

    def levels(self, pointer: ir.Value) -> ir.Value:
        """Load four levels of a token, and return them for each output."""
        return self._filled(self._load(pointer, I32))

    def start(self, offset: ir.Value) -> list[ir.Value]:
        """Return the sums to begin with: they make up for what is added to weights."""
        return self.filled(offset)

    def filled(self, number: ir.Value) -> list[ir.Value]:
        """Return vectors whose entries are all `number`."""
        return [self._filled(number)] * len(self.parts)

    def more(self, sums: list[ir.Value], weights: list[ir.Value], levels: ir.Value) -> list[ir.Value]:
        """Return the sums after four products of each output."""
        name = f"llvm.x86.avx512.vpdpbusd.{8 * self.width}"
        return [call(self.builder, name, self.integers, own, part, levels) for own, part in zip(sums, weights)]

    def scaled(self, sums: list[ir.Value], step: ir.Value) -> list[ir.Value]:
        """Return the sums of a part in a token's units."""
        builder, steps = self.builder, self._filled(step)
        return [builder.fmul(builder.sitofp(own, self.floats), steps) for own in sums]

    def add_group(
        self, totals: list[list[ir.Value]], parts: list[list[_Part]], scales: ir.Value, group: ir.Value
    ) -> None:
        """Add the parts of all tokens to their totals, times the scales of the weight."""
        builder = self.builder
        factors = self.floats_at(place(builder, scales, builder.mul(group, I64(SIDE)), FLOAT))
        for total, (first, *others) in zip(totals, parts):
            sums = first.sums
            for other in others:
                sums = [builder.fadd(*pair) for pair in zip(sums, other.sums)]
            self.add_products(total, sums, factors)

    def add_products(self, totals: list[ir.Value], sums: list[ir.Value], factors: list[ir.Value]) -> None:
        """Add a group's sums, times scales of the weight, to the totals; each operation rounds."""
        builder = self.builder
        for total, own, factor in zip(totals, sums, factors):
            builder.store(builder.fadd(builder.load(total), builder.fmul(own, factor)), total)

    def new_totals(self) -> list[ir.Value]:
        zeros = ir.Constant(self.floats, [0.0] * self.lanes)
        return [cgutils.alloca_once_value(self.builder, zeros) for _ in self.parts]

    def floats_at(self, pointer: ir.Value) -> list[ir.Value]:
        return [self._load(pointer, self.floats, part * self.width) for part in self.parts]

    def store(self, totals: list[ir.Value], pointer: ir.Value) -> None:
        for part, total in enumerate(totals):
            self.builder.store(self.builder.load(total), self._at(pointer, self.floats, part * self.width), align=4)

    def _load(self, pointer: ir.Value, kind: ir.Type, offset: int = 0) -> ir.Value:
        return self.builder.load(self._at(pointer, kind, offset), align=1)

    def _at(self, pointer: ir.Value, kind: ir.Type, offset: int) -> ir.Value:
        byte = self.builder.bitcast(pointer, I8.as_pointer())
        return self.builder.bitcast(self.builder.gep(byte, [I64(offset)]), kind.as_pointer())

    def _filled(self, number: ir.Value, count: int = 0) -> ir.Value:
        """Return a vector whose entries are all `number`."""
        count = count or self.lanes
        one = self.builder.insert_element(ir.Constant(ir.VectorType(number.type, count), ir.Undefined), number, I32(0))
        return self.builder.shuffle_vector(one, one, ir.Constant(ir.VectorType(I32, count), [0] * count))


class _Signs(_Dots):
    """
    Writer for CPUs with AVX2 alone. It multiplies absolute values of weights by levels that have taken over their
    signs: two such products fit an int16, since neither number exceeds 127, and are added up in int32 with the next.
    """

    def weights(self, pointer: ir.Value) -> list[list[ir.Value]]:
        """Return weights with their absolute values, in pairs."""
        found = [self._load(pointer, self.bytes, part * self.width) for part in self.parts]
        return [[(weight, self._with_signs(weight, weight)) for weight in found]]

    def start(self, offset: ir.Value) -> list[ir.Value]:
        return [ir.Constant(self.integers, [0] * self.lanes) for _ in self.parts]

    def more(self, sums: list[ir.Value], weights: list[ir.Value], levels: ir.Value) -> list[ir.Value]:
        builder, pairs = self.builder, ir.VectorType(I16, self.width // 2)
        ones, own = ir.Constant(pairs, [1] * pairs.count), builder.bitcast(levels, self.bytes)
        found = []
        for total, (weight, size) in zip(sums, weights):
            products = call(builder, "llvm.x86.avx2.pmadd.ub.sw", pairs, size, self._with_signs(own, weight))
            found.append(builder.add(total, call(builder, "llvm.x86.avx2.pmadd.wd", self.integers, products, ones)))
        return found

    def _with_signs(self, numbers: ir.Value, signs: ir.Value) -> ir.Value:
        """Return numbers, negated where `signs` is negative, and 0 where it is 0."""
        return call(self.builder, "llvm.x86.avx2.psign.b", self.bytes, numbers, signs)


class _Codes(_Dots):
    """Writer of the same for weights in four bits, of which two lie in a byte, by VNNI."""

    block, inputs = SMALL_BLOCK, 2 * _TOGETHER
    added = FLOAT

    def start(self, offset: ir.Value) -> list[ir.Value]:
        return [ir.Constant(self.integers, [0] * self.lanes) for _ in self.parts]

    def weights(self, pointer: ir.Value) -> list[list[ir.Value]]:
        builder, mask = self.builder, ir.Constant(self.integers, [0x0F0F0F0F] * self.lanes)
        found = [self._load(pointer, self.integers, part * self.width) for part in self.parts]
        above = [builder.lshr(part, ir.Constant(self.integers, [4] * self.lanes)) for part in found]
        return [[builder.and_(part, mask) for part in vectors] for vectors in (found, above)]

    def add_group(
        self, totals: list[list[ir.Value]], parts: list[list[_Part]], scales: ir.Value, group: ir.Value
    ) -> None:
        builder = self.builder
        for part in range(PARTS):
            first = builder.add(builder.mul(group, I64(PARTS)), I64(part))
            factors, least = self._halves_at(place(builder, scales, builder.mul(first, I64(2 * SIDE)), I16))
            for total, own in zip(totals, parts):
                self.add_products(total, own[part].sums, factors)
                self.add_products(total, self.filled(own[part].added), least)

    def _halves_at(self, pointer: ir.Value) -> list[list[ir.Value]]:
        """Load scales and least weights of a part, float16, and widen them."""
        kind, builder = ir.VectorType(ir.HalfType(), self.lanes), self.builder
        return [
            [
                builder.fpext(self._load(pointer, kind, 2 * (first + part * self.lanes)), self.floats)
                for part in self.parts
            ]
            for first in (0, SIDE)
        ]


class _Pairs(_Codes):
    """Writer for CPUs with AVX2 alone: the sums of a part's products in pairs fit an int16."""

    def start(self, offset: ir.Value) -> list[ir.Value]:
        pairs = ir.VectorType(I16, self.width // 2)
        return [ir.Constant(pairs, [0] * pairs.count) for _ in self.parts]

    def more(self, sums: list[ir.Value], weights: list[ir.Value], levels: ir.Value) -> list[ir.Value]:
        builder, own = self.builder, self.builder.bitcast(levels, self.bytes)
        products = [
            call(builder, "llvm.x86.avx2.pmadd.ub.sw", total.type, builder.bitcast(part, self.bytes), own)
            for total, part in zip(sums, weights)
        ]
        return [builder.add(*pair) for pair in zip(sums, products)]

    def scaled(self, sums: list[ir.Value], step: ir.Value) -> list[ir.Value]:
        builder, name = self.builder, "llvm.x86.avx2.pmadd.wd"
        ones = [ir.Constant(total.type, [1] * total.type.count) for total in sums]
        return super().scaled([call(builder, name, self.integers, *pair) for pair in zip(sums, ones)], step)
