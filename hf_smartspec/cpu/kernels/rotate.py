"""Rotary embeddings of queries and keys; keys and values are written to the cache."""

from ...jit import inner
from ...jit.pointers import ahead, float32_at, get, int64_at, like, put, rounded, take

# Compiled code is called with the address of these numbers, int64 each.
# heads, kv_heads: numbers of query heads and of key heads.
# size: numbers of a head, of which the first `dim` are rotated: halves of them in pairs or, if `is_interleaved`,
#   neighbours.
# states: address of `[num_tokens, width, size]`. Of a token's places, queries have every `query_step`-th, keys those
#   from `key_place` on that are `key_step` apart, and values likewise.
# cos, sin: addresses of `[num_tokens, dim]`, with the sign of the rotation in the sine, as in `Rotation.tables`; if
#   `is_wide`, in float32, and rotated numbers are rounded once.
# queries: address of `[num_tokens, heads, size]`; keys, values: addresses of `[lines, kv_heads, size]`.
# lines: address of int64 `[num_tokens]`, where keys and values are written.
ROTATE_FIELDS = tuple(
    "next threads num_tokens heads kv_heads size dim width query_step key_place key_step value_place value_step "
    "is_interleaved is_wide states cos sin queries keys values lines".split()
)
(
    _NEXT, _THREADS, _NUM_TOKENS, _HEADS, _KV_HEADS, _SIZE, _DIM, _WIDTH, _QUERY_STEP, _KEY_PLACE, _KEY_STEP,
    _VALUE_PLACE, _VALUE_STEP, _IS_INTERLEAVED, _IS_WIDE, _STATES, _COS, _SIN, _QUERIES, _KEYS, _VALUES, _LINES,
) = range(22)  # fmt: skip
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
            key, value = head - heads, head - heads - kv_heads
            if key < 0:
                place, outputs = head * a[_QUERY_STEP], ahead(like(kind, a[_QUERIES]), (token * heads + head) * size)
            elif value < 0:
                place = a[_KEY_PLACE] + key * a[_KEY_STEP]
                outputs = ahead(like(kind, a[_KEYS]), (line * kv_heads + key) * size)
            else:
                place = a[_VALUE_PLACE] + value * a[_VALUE_STEP]
                outputs = ahead(like(kind, a[_VALUES]), (line * kv_heads + value) * size)
            states, first = ahead(like(kind, a[_STATES]), (token * a[_WIDTH] + place) * size), 0
            if value < 0 and dim:
                _rotate(a, token, states, outputs, kind)
                first = dim
            for index in range(first, size):
                outputs[index] = states[index]
        number = take(ahead(a, _NEXT))


@inner
def _rotate(a, token, states, outputs, kind):
    begin = token * a[_DIM]
    if a[_IS_WIDE]:
        cos, sin = ahead(float32_at(a[_COS]), begin), ahead(float32_at(a[_SIN]), begin)
        _rotate_by(a, states, cos, sin, outputs, cos)
    else:
        cos, sin = ahead(like(kind, a[_COS]), begin), ahead(like(kind, a[_SIN]), begin)
        _rotate_by(a, states, cos, sin, outputs, outputs)


@inner
def _rotate_by(a, states, cos, sin, outputs, products):
    """Round products and their sum, as transformers does; products as numbers that `products` points to."""
    half = a[_DIM] // 2
    if a[_IS_INTERLEAVED]:
        for index in range(half):
            _rotate_pair(states, cos, sin, outputs, products, 2 * index, 2 * index + 1)
    else:
        for index in range(half):
            _rotate_pair(states, cos, sin, outputs, products, index, half + index)


@inner
def _rotate_pair(states, cos, sin, outputs, products, first, second):
    x, y = get(states, first), get(states, second)
    put(outputs, first, rounded(products, x * get(cos, first)) + rounded(products, y * get(sin, first)))
    put(outputs, second, rounded(products, y * get(cos, second)) + rounded(products, x * get(sin, second)))
