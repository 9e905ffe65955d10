"""Copies of tokens' numbers in another order."""

from ...jit import inner
from ...jit.pointers import ahead, int64_at, like, take

# Compiled code is called with the address of these numbers, int64 each.
# x, outputs: addresses of `[num_tokens, size]`, of the kind.
# parts: address of int64 `[num_parts, 2]`: for each part of a token's outputs, where it begins in `x`, and its length.
ARRANGE_FIELDS = tuple("next threads num_tokens size num_parts x parts outputs".split())
_NEXT, _THREADS, _NUM_TOKENS, _SIZE, _NUM_PARTS, _X, _PARTS, _OUTPUTS = range(8)


@inner
def arrange(a, kind):
    """Take the next token, until none is left."""
    parts = int64_at(a[_PARTS])
    token = take(ahead(a, _NEXT))
    while token < a[_NUM_TOKENS]:
        x = ahead(like(kind, a[_X]), token * a[_SIZE])
        outputs = ahead(like(kind, a[_OUTPUTS]), token * a[_SIZE])
        for part in range(a[_NUM_PARTS]):
            begin, length = parts[2 * part], parts[2 * part + 1]
            for index in range(length):
                outputs[index] = x[begin + index]
            outputs = ahead(outputs, length)
        token = take(ahead(a, _NEXT))
