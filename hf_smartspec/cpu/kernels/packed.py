"""Weights in bfloat16 as 13 bits each: first bytes, of which a weight matrix has few, are coded in 5 bits."""

from collections.abc import Iterator

from llvmlite import ir  # type: ignore[import-untyped]
from numba import types
from numba.core import cgutils

from ...jit import callback, inner
from ...jit.pointers import ahead, int64_at, take, uint8_at
from ...jit.writing import I8, I16, I32, I64, LINE, call, cpu_features, prefetch, written
from .vectors import Pairs, has_pairs

BLOCK = 64  # neighbouring weights of a row, which are coded together
MOST_TOKENS = 8  # of products that wait for memory more than for the CPU, so that reading packed weights is faster
MOST_CODES = 32  # first bytes of a packed weight: signs, and all bits but one of exponents
# A block has all second bytes, then four bits of all codes, two in a byte, and then the fifth bits.
CODES, FIFTHS, BLOCK_BYTES = BLOCK, BLOCK + BLOCK // 2, BLOCK + BLOCK // 2 + BLOCK // 8
_LANE = 16  # bytes within which the CPU interleaves them
# The place of each weight in a block: bytes of two vectors, when interleaved lane by lane, are neighbours.
PLACES = [w % 32 // 8 * _LANE + w // 32 * 8 + w % 8 for w in range(BLOCK)]
_NUMBERS = sorted(range(BLOCK), key=PLACES.__getitem__)  # the weight at each place


def can_unpack() -> bool:
    """Return whether the CPU for which numba compiles looks up bytes in vectors of 64."""
    return has_pairs() and "+avx512vbmi" in cpu_features()


@inner
def packed_bytes(num_weights):
    """Return the bytes of so many packed weights, a multiple of `BLOCK`."""
    return num_weights // BLOCK * BLOCK_BYTES


# Compiled code below is called with the address of these numbers, int64 each.
# next: incremented by the thread that takes the next share; num_blocks, share: blocks of weights, and those of a share.
# weights: address of the bfloat16 weights. codes: address of 256 bytes: which first bytes there are, or their codes.
# outputs: address of `[num_blocks, BLOCK_BYTES]` bytes, where packed blocks are written.
PACK_FIELDS = tuple("next num_blocks share weights codes outputs".split())
_NEXT, _NUM_BLOCKS, _SHARE, _WEIGHTS, _CODES, _OUTPUTS = range(6)


@callback
def note_first_bytes(address):
    """Set the entries of `codes` to 1 for all first bytes that there are."""
    a = int64_at(address)
    numbers, found = uint8_at(a[_WEIGHTS]), uint8_at(a[_CODES])
    begin = a[_SHARE] * take(ahead(a, _NEXT))
    while begin < a[_NUM_BLOCKS]:
        for number in range(begin * BLOCK, min(begin + a[_SHARE], a[_NUM_BLOCKS]) * BLOCK):
            found[numbers[2 * number + 1]] = 1
        begin = a[_SHARE] * take(ahead(a, _NEXT))


@callback
def pack(address):
    a = int64_at(address)
    begin = a[_SHARE] * take(ahead(a, _NEXT))
    while begin < a[_NUM_BLOCKS]:
        for block in range(begin, min(begin + a[_SHARE], a[_NUM_BLOCKS])):
            _pack_block(a[_WEIGHTS] + 2 * BLOCK * block, a[_CODES], a[_OUTPUTS] + BLOCK_BYTES * block)
        begin = a[_SHARE] * take(ahead(a, _NEXT))


@written(types.void, *[types.int64] * 3)
def _pack_block(builder, weights, codes, outputs):
    if not can_unpack():
        return
    numbers, halves = ir.VectorType(I8, BLOCK), ir.VectorType(I8, BLOCK // 2)
    parts = [_load(builder, weights, at, numbers) for at in (0, BLOCK)]
    seconds, firsts = (
        builder.shuffle_vector(
            *parts, ir.Constant(ir.VectorType(I32, BLOCK), [2 * number + byte for number in _NUMBERS])
        )
        for byte in (0, 1)
    )
    name = "llvm.x86.avx512.vpermi2var.qi.512"  # looks up 128 bytes, by seven bits
    plus, minus = (
        call(
            builder,
            name,
            numbers,
            _load(builder, codes, at, numbers),
            firsts,
            _load(builder, codes, at + BLOCK, numbers),
        )
        for at in (0, 2 * BLOCK)
    )
    found = builder.select(builder.icmp_signed("<", firsts, ir.Constant(numbers, [0] * BLOCK)), minus, plus)
    low, high = (
        builder.shuffle_vector(found, found, ir.Constant(ir.VectorType(I32, BLOCK // 2), [*range(at, at + BLOCK // 2)]))
        for at in (0, BLOCK // 2)
    )
    low = builder.and_(low, ir.Constant(halves, [15] * halves.count))
    fours = builder.or_(low, builder.shl(high, ir.Constant(halves, [4] * halves.count)))
    fifths = builder.and_(found, ir.Constant(numbers, [16] * BLOCK))
    fifths = builder.bitcast(builder.icmp_unsigned("!=", fifths, ir.Constant(numbers, [0] * BLOCK)), I64)
    for at, part in ((0, seconds), (CODES, fours), (FIFTHS, fifths)):
        builder.store(part, builder.inttoptr(builder.add(outputs, I64(at)), part.type.as_pointer()), align=1)


def _load(builder: ir.IRBuilder, address: ir.Value, offset: int, kind: ir.Type) -> ir.Value:
    return builder.load(builder.inttoptr(builder.add(address, I64(offset)), kind.as_pointer()), align=1)


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

    def factors(self, weight: ir.Value, start: ir.Value, is_whole: bool, turn: int) -> list[ir.Value]:
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
