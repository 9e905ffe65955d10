"""The best tokens of lines of scores, found by the bits of the scores in one pass over memory."""

import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba import types
from numba.extending import intrinsic

from ...jit import compiled_for, inner
from ...jit.writing import call

_BLOCK = 128  # tokens whose maximum is taken first: few blocks have a token that is among the best
_PROMISING = 16  # chunks that are read in the order of their bounds


@compiled_for("i4:2 i8 i8:2", "i2:2 i8 i8:2")
def find_best(bits, infinity, best):
    """
    Write the best tokens of every line to `best` (int64 `[lines, count]`), best first. NaN is the best score, as in
    `torch.argmax`, and ties go to the lowest token.

    Args:
        bits: Bits of the scores, `[lines, vocab_size]` int16 or int32, C-contiguous; `vocab_size` is at least `count`.
        infinity: Bits of the infinite score.
    """
    num_lines, vocab_size = bits.shape
    count = best.shape[1]
    keys = np.empty(count, np.int64)
    for line in range(num_lines):
        scores, num = bits[line], 0
        for start in range(0, vocab_size, _BLOCK):
            end = min(start + _BLOCK, vocab_size)
            if num == count and end - start == _BLOCK and _highest_key(scores, start, infinity) <= keys[num - 1]:
                continue
            for token in range(start, end):
                key = _key(scores, token, infinity)
                if num == count and key <= keys[num - 1]:
                    continue
                num = min(num + 1, count)
                place = num - 1
                while place > 0 and keys[place - 1] < key:
                    keys[place], best[line, place] = keys[place - 1], best[line, place - 1]
                    place -= 1
                keys[place], best[line, place] = key, token


@compiled_for("f4:2 i4:2 i8 f4:2 i8 i8:2 f4:2")
def find_likeliest(scores, bits, infinity, bounds, chunk, best, shares):
    """
    Write the best tokens of every line to `best` (int64 `[lines, count]`), best first, and their probabilities among
    these to `shares` (float32 `[lines, count]`). Ties go to the lowest token.

    Args:
        scores (float32 `[lines, vocab_size]`): Finite scores, C-contiguous; `vocab_size` is at least `count`.
        bits (int32 `[lines, vocab_size]`): Their bits.
        infinity: Bits of the infinite score.
        bounds (float32 `[lines, chunks]`): No score in a chunk of neighbouring tokens exceeds its bound.
        chunk: Number of tokens in a chunk.
    """
    num_lines, vocab_size = scores.shape
    count, num_chunks = best.shape[1], bounds.shape[1]
    left, highest = np.empty(num_chunks, np.float32), np.empty(count, np.float32)
    for line in range(num_lines):
        left[:], highest[:], best[line] = bounds[line], -np.inf, vocab_size
        # The most promising chunks first, so that few are read. Where scores are flat, bounds rule out hardly any, and
        # the search for the next chunk would take longer than reading it: the rest is read in order.
        for number in range(_PROMISING + num_chunks):
            place = left.argmax() if number < _PROMISING else number - _PROMISING
            if left[place] < highest[count - 1]:
                if number < _PROMISING:
                    break
            elif left[place] > -np.inf:
                first, end = place * chunk, min((place + 1) * chunk, vocab_size)
                _read_chunk(scores[line], bits[line], infinity, first, end, highest, best[line])
                left[place] = -np.inf
        total = np.float32(0.0)
        for rank in range(count):
            shares[line, rank] = np.exp(highest[rank] - highest[0])
            total += shares[line, rank]
        shares[line] /= total


@inner
def _read_chunk(scores, bits, infinity, first, end, highest, best):
    """Put the tokens from `first` on among the best ones, `best`, as far as their scores are among the `highest`."""
    count, vocab_size = len(best), len(scores)
    for start in range(first, end, _BLOCK):
        stop, last = min(start + _BLOCK, end), best[count - 1]
        if stop - start == _BLOCK and last < vocab_size:
            key, least = _highest_key(bits, start, infinity), _key(bits, last, infinity)
            if key < least or (key == least and start > last):
                continue
        for token in range(start, stop):
            score, rank = scores[token], count
            while rank > 0 and (score > highest[rank - 1] or (score == highest[rank - 1] and token < best[rank - 1])):
                rank -= 1
                if rank < count - 1:
                    highest[rank + 1], best[rank + 1] = highest[rank], best[rank]
            if rank < count:
                highest[rank], best[rank] = score, token


def _key_of(builder, bits, infinity):
    """Return integers that order scores as their bits, scalars or vectors; 0 and -0 are equal, all NaN the highest."""
    kind, width = bits.type, getattr(bits.type, "element", bits.type).width

    def all_of(number):
        return kind([number] * kind.count) if isinstance(kind, ir.VectorType) else kind(number)

    magnitude = builder.and_(bits, all_of(2 ** (width - 1) - 1))
    sign = builder.ashr(bits, all_of(width - 1))  # -1 or 0
    signed = builder.sub(builder.xor(magnitude, sign), sign)
    return builder.select(builder.icmp_signed(">", magnitude, infinity), all_of(2 ** (width - 1) - 1), signed)


@intrinsic
def _key(typing_context, scores, token, infinity):
    """Return the key of one score."""

    def generate(context, builder, signature, args):
        data, narrow = _data(context, builder, signature, args)
        return builder.sext(_key_of(builder, builder.load(builder.gep(data, [args[1]])), narrow), ir.IntType(64))

    return types.int64(scores, types.int64, types.int64), generate


@intrinsic
def _highest_key(typing_context, scores, first, infinity):
    """Return the highest key of the `_BLOCK` scores from `first` on."""

    def generate(context, builder, signature, args):
        data, narrow = _data(context, builder, signature, args)
        count = 512 // narrow.type.width
        kind = ir.VectorType(narrow.type, count)
        limit = ir.Constant(kind, ir.Undefined)
        for place in range(count):
            limit = builder.insert_element(limit, narrow, ir.IntType(32)(place))
        highest = None
        for start in range(0, _BLOCK, count):
            place = builder.gep(data, [builder.add(args[1], ir.IntType(64)(start))])
            loaded = builder.load(builder.bitcast(place, kind.as_pointer()))
            loaded.align = narrow.type.width // 8
            keys = _key_of(builder, loaded, limit)
            if highest is None:
                highest = keys
            else:
                highest = builder.select(builder.icmp_signed(">", keys, highest), keys, highest)
        name = f"llvm.vector.reduce.smax.v{count}i{narrow.type.width}"
        return builder.sext(call(builder, name, narrow.type, highest), ir.IntType(64))

    return types.int64(scores, types.int64, types.int64), generate


def _data(context, builder, signature, args):
    """Return the pointer to the scores' bits, and infinity's bits in their type."""
    array = context.make_array(signature.args[0])(context, builder, args[0])
    return array.data, builder.trunc(args[2], context.get_value_type(signature.args[0].dtype))
