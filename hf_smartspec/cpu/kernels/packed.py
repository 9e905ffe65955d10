"""Weights in bfloat16 as 13 bits each: first bytes, of which a weight matrix has few, are coded in 5 bits."""

from collections.abc import Iterator

import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba.core import cgutils

from ...jit import compiled, inner
from ...jit.writing import I8, I16, I32, I64, LINE, call, cpu_features, prefetch
from .vectors import Pairs, has_pairs

BLOCK = 64  # neighbouring weights of a row, which are coded together
MOST_TOKENS = 8  # of products that wait for memory more than for the CPU, so that reading packed weights is faster
MOST_CODES = 32  # first bytes of a packed weight: signs, and all bits but one of exponents
# A block has all second bytes, then four bits of all codes, two in a byte, and then the fifth bits.
CODES, FIFTHS, BLOCK_BYTES = BLOCK, BLOCK + BLOCK // 2, BLOCK + BLOCK // 2 + BLOCK // 8
_LANE = 16  # bytes within which the CPU interleaves them
# The place of each weight in a block: bytes of two vectors, when interleaved lane by lane, are neighbours.
PLACES = np.array([w % 32 // 8 * _LANE + w // 32 * 8 + w % 8 for w in range(BLOCK)])


def can_unpack() -> bool:
    """Return whether the CPU for which numba compiles looks up bytes in vectors of 64."""
    return has_pairs() and "+avx512vbmi" in cpu_features()


@inner
def packed_bytes(num_weights):
    """Return the bytes of so many packed weights, a multiple of `BLOCK`."""
    return num_weights // BLOCK * BLOCK_BYTES


@compiled
def first_bytes(weights):
    """Return which first bytes there are, `[256]` bool, in bfloat16 weights as `pack` has them."""
    found = np.zeros(256, np.bool_)
    for number in range(len(weights)):
        for index in range(BLOCK):
            found[weights[number, index, 1]] = True
    return found


@compiled
def pack(weights, codes, outputs):
    """
    Pack blocks of weights.

    Args:
        weights (`np.ndarray` of shape `[num, BLOCK, 2]`, uint8): bfloat16 weights, second bytes first.
        codes (`np.ndarray` of shape `[256]`, uint8): The code of each first byte.
        outputs (`np.ndarray` of shape `[num, BLOCK_BYTES]`, uint8): Where packed blocks are written.
    """
    half, found = BLOCK // 2, np.zeros(BLOCK, np.uint8)
    for number in range(len(weights)):
        block, own = weights[number], outputs[number]
        for index in range(BLOCK):
            place = PLACES[index]
            own[place], found[place] = block[index, 0], codes[block[index, 1]]
        for place in range(half):
            own[CODES + place] = found[place] & 15 | found[place + half] << 4
        for place in range(0, BLOCK, 8):
            bits = 0
            for index in range(8):
                bits |= (found[place + index] >> 4) << index
            own[FIFTHS + place // 8] = bits


class Packed:
    """
    Writer of instructions that read packed weights.

    Args:
        vectors (`Pairs`): The writer of products with the weights.
        rows (`ir.Value`): Pointer to the packed rows.
        table (`ir.Value`): Pointer to the weight's table.
    """

    step = BLOCK

    def __init__(self, vectors: Pairs, rows: ir.Value, table: ir.Value):
        self.vectors, self.builder, self.rows, self.table = vectors, vectors.builder, rows, table
        self.bytes = ir.VectorType(I8, BLOCK)

    def parts(self, length: ir.Value) -> Iterator[tuple[ir.Value, bool]]:
        """Yield where blocks begin, in a loop; before it, load the table."""
        self._firsts = [self._table_at(offset) for offset in (0, MOST_CODES // 2)]
        with cgutils.for_range_slice(self.builder, I64(0), length, I64(BLOCK), I64) as (begin, _):
            yield begin, True

    def factors(self, weight: ir.Value, start: ir.Value, is_whole: bool) -> list[ir.Value]:
        """Return the vectors of the block that begins at weight `start`."""
        builder, own = self.builder, self._place(start)
        seconds = self._load(own, 0, self.bytes)
        codes = self._codes(own)
        fifths = builder.bitcast(self._load(own, FIFTHS, I64), ir.VectorType(ir.IntType(1), BLOCK))
        name = (
            "llvm.x86.avx512.permvar.qi.512"  # indices of six bits; tables of 16 bytes, repeated, ignore the upper two
        )
        low, high = (call(builder, name, self.bytes, firsts, codes) for firsts in self._firsts)
        firsts = builder.select(fifths, high, low)
        found = []
        for half in (0, _LANE // 2):
            lanes = [range(lane + half, lane + half + _LANE // 2) for lane in range(0, BLOCK, _LANE)]
            places = [at for lane in lanes for byte in lane for at in (byte, BLOCK + byte)]
            pairs = builder.shuffle_vector(seconds, firsts, ir.Constant(ir.VectorType(I32, BLOCK), places))
            found.append(builder.bitcast(pairs, self.vectors.integers))
        return found

    def prefetch(self, weight: ir.Value, begin: ir.Value, num: int) -> None:
        """Prefetch `num` weights that begin `begin` after the first of `rows`."""
        first = self._place(begin)
        for more in range(0, num // BLOCK * BLOCK_BYTES, LINE):
            prefetch(self.builder, self.builder.gep(first, [I64(more)]))

    def _place(self, start: ir.Value) -> ir.Value:
        block = self.builder.lshr(start, I64(BLOCK.bit_length() - 1))
        return self.builder.gep(self.rows, [self.builder.mul(block, I64(BLOCK_BYTES))])

    def _codes(self, block: ir.Value) -> ir.Value:
        """Return all codes; what is beyond their first four bits is of no use."""
        builder, count = self.builder, BLOCK // 4
        pairs = self._load(block, CODES, ir.VectorType(I16, count))
        pairs = builder.shuffle_vector(pairs, pairs, ir.Constant(ir.VectorType(I32, 2 * count), [*range(count)] * 2))
        shifts = ir.Constant(pairs.type, [0] * count + [4] * count)
        return builder.bitcast(builder.lshr(pairs, shifts), self.bytes)

    def _table_at(self, offset: int) -> ir.Value:
        """Return half of the table, repeated."""
        count = MOST_CODES // 2
        half = self._load(self.table, offset, ir.VectorType(I8, count))
        places = ir.Constant(ir.VectorType(I32, BLOCK), [*range(count)] * (BLOCK // count))
        return self.builder.shuffle_vector(half, half, places)

    def _load(self, pointer: ir.Value, offset: int, kind: ir.Type) -> ir.Value:
        own = self.builder.gep(pointer, [I64(offset)])
        return self.builder.load(self.builder.bitcast(own, kind.as_pointer()), align=1)
