"""Rotary embeddings of queries and keys; keys and values are written to the cache."""

from ...jit import inner
from ...jit.pointers import ahead, float32_at, get, int64_at, like, put, rounded, take
from .norms import norm_vector

# Compiled code is called with the address of these numbers, int64 each.
# heads, kv_heads: numbers of query heads and of key heads.
# size: numbers of a head, of which the first `dim` are rotated: halves of them in pairs or, if `is_interleaved`,
#   neighbours, which become pairs of halves if that is `TO_HALVES`.
# states: address of `[num_tokens, width, size]`. Of a token's places, queries have every `query_step`-th, keys those
#   from `key_place` on that are `key_step` apart, and values likewise.
# cos, sin: addresses of `[num_tokens, dim]`, with the sign of the rotation in the sine, as in `Rotation.tables`; if
#   `is_wide`, in float32, and rotated numbers are rounded once.
# queries: address of `[num_tokens, heads, size]`; keys, values: addresses of `[lines, kv_heads, size]`.
# lines: address of int64 `[num_tokens]`, where keys and values are written.
# rank: 0, or the size of latents, of which keys and values are made. Then the last `dim` numbers of a query are
#   rotated, and written to `turned`, an address of `[heads, room, dim]`, and the others to `queries`, of `[heads, room,
#   size - dim]`; keys get the latents in `compressed`, an address of `[num_tokens, rank + dim]`, as `[lines, rank]`,
#   and values the numbers after these, rotated, as `[lines, dim]`.
# query_weight, key_weight: 0, or addresses of `[size]`, the weights of RMS norms of each query and key after its
#   rotation; their form, and their `eps`, which is float64.
ROTATE_FIELDS = tuple(
    "next threads num_tokens heads kv_heads size dim width query_step key_place key_step value_place value_step "
    "is_interleaved is_wide states cos sin queries keys values lines rank room compressed turned query_weight "
    "key_weight form eps".split()
)
(
    _NEXT, _THREADS, _NUM_TOKENS, _HEADS, _KV_HEADS, _SIZE, _DIM, _WIDTH, _QUERY_STEP, _KEY_PLACE, _KEY_STEP,
    _VALUE_PLACE, _VALUE_STEP, _IS_INTERLEAVED, _IS_WIDE, _STATES, _COS, _SIN, _QUERIES, _KEYS, _VALUES, _LINES,
    _RANK, _ROOM, _COMPRESSED, _TURNED, _QUERY_WEIGHT, _KEY_WEIGHT, _FORM, _EPS,
) = range(30)  # fmt: skip
TO_HALVES = 2
# x: address of `[heads, room, size]`; outputs: of `[num_tokens, heads, size]`.
MERGE_FIELDS = tuple("next threads num_tokens heads size room x outputs".split())
_MERGE_ROOM, _MERGE_X, _MERGE_OUTPUTS = 5, 6, 7
_MERGE_SIZE = 4
_SHARE = 4  # heads that a thread takes at a time


@inner
def rotate(a, numbers, kind):
    """Take the next heads of a token, until none are left. `numbers` are the fields as float64."""
    heads, kv_heads, size, dim = a[_HEADS], a[_KV_HEADS], a[_SIZE], a[_DIM]
    every = heads + 1 if a[_RANK] else heads + 2 * kv_heads
    parts = (every + _SHARE - 1) // _SHARE
    number = take(ahead(a, _NEXT))
    while number < a[_NUM_TOKENS] * parts:
        token, begin = number // parts, number % parts * _SHARE
        line = int64_at(a[_LINES])[token]
        for head in range(begin, min(begin + _SHARE, every)):
            if a[_RANK]:
                _divide(a, token, head, line, kind)
                continue
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
            if value < 0 and a[_QUERY_WEIGHT]:
                weight = like(kind, a[_QUERY_WEIGHT] if key < 0 else a[_KEY_WEIGHT])
                norm_vector(outputs, weight, outputs, size, a[_FORM], numbers[_EPS])
        number = take(ahead(a, _NEXT))


@inner
def _divide(a, token, head, line, kind):
    """Write a query, or after the last one what keys and values are made of, and rotate the last numbers."""
    heads, dim, size = a[_HEADS], a[_DIM], a[_SIZE] - a[_DIM]
    if head < heads:
        states, place = ahead(like(kind, a[_STATES]), (token * heads + head) * a[_SIZE]), head * a[_ROOM] + token
        outputs, turned = ahead(like(kind, a[_QUERIES]), place * size), ahead(like(kind, a[_TURNED]), place * dim)
    else:
        size = a[_RANK]
        states = ahead(like(kind, a[_COMPRESSED]), token * (size + dim))
        outputs, turned = ahead(like(kind, a[_KEYS]), line * size), ahead(like(kind, a[_VALUES]), line * dim)
    for index in range(size):
        outputs[index] = states[index]
    _rotate(a, token, ahead(states, size), turned, kind)


@inner
def merge(a, kind):
    """Write the heads of the next token next to one another, until no tokens are left."""
    heads, size = a[_HEADS], a[_MERGE_SIZE]
    token = take(ahead(a, _NEXT))
    while token < a[_NUM_TOKENS]:
        for head in range(heads):
            x = ahead(like(kind, a[_MERGE_X]), (head * a[_MERGE_ROOM] + token) * size)
            outputs = ahead(like(kind, a[_MERGE_OUTPUTS]), (token * heads + head) * size)
            for index in range(size):
                outputs[index] = x[index]
        token = take(ahead(a, _NEXT))


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
    # A loop for each form, since compilers use vectors where strides are constant.
    if a[_IS_INTERLEAVED] == TO_HALVES:
        for index in range(half):
            _rotate_pair(states, cos, sin, outputs, products, 2 * index, 2 * index + 1, (index, half + index))
    elif a[_IS_INTERLEAVED]:
        for index in range(half):
            _rotate_pair(states, cos, sin, outputs, products, 2 * index, 2 * index + 1, (2 * index, 2 * index + 1))
    else:
        for index in range(half):
            _rotate_pair(states, cos, sin, outputs, products, index, half + index, (index, half + index))


@inner
def _rotate_pair(states, cos, sin, outputs, products, first, second, places):
    x, y = get(states, first), get(states, second)
    put(outputs, places[0], rounded(products, x * get(cos, first)) + rounded(products, y * get(sin, first)))
    put(outputs, places[1], rounded(products, y * get(cos, second)) + rounded(products, x * get(sin, second)))
