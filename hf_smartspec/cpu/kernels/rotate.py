"""Rotary embeddings of queries and keys; keys and values are written to the cache."""

from ...jit import inner
from ...jit.pointers import ahead, get, int64_at, like, put, rounded, take

# Compiled code is called with the address of these numbers, int64 each.
# heads, kv_heads: numbers of query heads and of key heads.
# size: numbers of a head, of which the first `dim` are rotated.
# states: address of `[num_tokens, heads + 2 * kv_heads, size]`, queries before keys before values; if `has_gates`, of
#   `[num_tokens, 2 * heads + 2 * kv_heads, size]`: every query is followed by a gate, which is not read.
# cos, sin: addresses of `[num_tokens, dim]`, with the sign of the rotation in the sine, as in `Halves.tables`.
# queries: address of `[num_tokens, heads, size]`; keys, values: addresses of `[lines, kv_heads, size]`.
# lines: address of int64 `[num_tokens]`, where keys and values are written.
ROTATE_FIELDS = tuple(
    "next threads num_tokens heads kv_heads has_gates size dim states cos sin queries keys values lines".split()
)
(
    _NEXT,
    _THREADS,
    _NUM_TOKENS,
    _HEADS,
    _KV_HEADS,
    _HAS_GATES,
    _SIZE,
    _DIM,
    _STATES,
    _COS,
    _SIN,
    _QUERIES,
    _KEYS,
    _VALUES,
    _LINES,
) = range(15)
_SHARE = 4  # heads that a thread takes at a time


@inner
def rotate(a, kind):
    """Take the next heads of a token, until none are left."""
    heads, kv_heads, size, dim = a[_HEADS], a[_KV_HEADS], a[_SIZE], a[_DIM]
    every = heads + 2 * kv_heads
    parts = (every + _SHARE - 1) // _SHARE
    number = take(ahead(a, _NEXT))
    while number < a[_NUM_TOKENS] * parts:
        token, begin = number // parts, number % parts * _SHARE
        line = int64_at(a[_LINES])[token]
        for head in range(begin, min(begin + _SHARE, every)):
            further = min(head, heads) if a[_HAS_GATES] else 0
            place = token * (every + (heads if a[_HAS_GATES] else 0)) + head + further
            states = ahead(like(kind, a[_STATES]), place * size)
            if head < heads:
                outputs = ahead(like(kind, a[_QUERIES]), (token * heads + head) * size)
            elif head < heads + kv_heads:
                outputs = ahead(like(kind, a[_KEYS]), (line * kv_heads + head - heads) * size)
            else:
                outputs = ahead(like(kind, a[_VALUES]), (line * kv_heads + head - heads - kv_heads) * size)
            first = 0
            if head < heads + kv_heads and dim:
                _rotate(
                    states,
                    ahead(like(kind, a[_COS]), token * dim),
                    ahead(like(kind, a[_SIN]), token * dim),
                    outputs,
                    dim,
                )
                first = dim
            for index in range(first, size):
                outputs[index] = states[index]
        number = take(ahead(a, _NEXT))


@inner
def _rotate(states, cos, sin, outputs, dim):
    """Round products and their sum, as transformers does."""
    half = dim // 2
    for index in range(half):
        x, y = get(states, index), get(states, half + index)
        put(outputs, index, rounded(outputs, x * get(cos, index)) + rounded(outputs, y * get(sin, index)))
        other = rounded(outputs, y * get(cos, half + index)) + rounded(outputs, x * get(sin, half + index))
        put(outputs, half + index, other)
