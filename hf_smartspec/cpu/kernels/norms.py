"""Norms of tokens, and the residual sums before them."""

from math import sqrt

import numpy as np

from ...jit import inner
from ...jit.pointers import ahead, float32_at, get, int64_at, like, put, rounded, take
from .gates import exponential
from .tiles import sum_of, sum_of_squares

# Compiled code is called with the address of these numbers, int64 each but for `eps` and `factor`, which are float64.
# next: incremented by the thread that takes the next token.
# vectors: number of vectors of a token that are normalized, each of `size` numbers, `vector_stride` numbers apart.
# in_stride, out_stride: numbers from one token to the next.
# form: which norm, and where it rounds; see below.
# x, weight, bias, outputs: addresses of numbers of one kind; there may be no bias, 0.
# added: 0, or the address of numbers laid out as `x`: `x` becomes `x + factor * added` before it is normalized.
NORM_FIELDS = tuple(
    "next threads num_tokens vectors size vector_stride in_stride out_stride form x weight bias outputs added eps "
    "factor".split()
)
(
    _NEXT, _THREADS, _NUM_TOKENS, _VECTORS, _SIZE, _VECTOR_STRIDE, _IN_STRIDE, _OUT_STRIDE, _FORM, _X, _WEIGHT, _BIAS,
    _OUTPUTS, _ADDED, _EPS, _FACTOR,
) = range(16)  # fmt: skip
# RMS norms: rounded before the weight is multiplied, too; rounded once; with a factor of one plus the weight, rounded
# once. Layer norms: minus the mean, rounded once; the same with a factor of one plus the weight, which is rounded, too.
# These alone have a bias.
PLAIN, ONCE, SHIFTED, CENTERED, CENTERED_SHIFTED = range(5)
# The norms of recurrent layers. x: address of float32 `[num_tokens, vectors, size]`; gates: of the kind, `gate_stride`
# from one token to the next, whose SiLU the normalized numbers are multiplied by; outputs: of the kind, laid out as x.
GATED_NORM_FIELDS = tuple("next threads num_tokens vectors size x weight gates gate_stride outputs eps".split())
_GATED_X, _GATED_WEIGHT, _GATES, _GATE_STRIDE, _GATED_OUTPUTS, _GATED_EPS = range(5, 11)
_GATED_VECTORS, _GATED_SIZE = 3, 4
# The norms of state spaces (Mamba-2): of `(x + skip * value) * silu(gate)`, in groups, rounded once.
# x: address of float32 `[num_tokens, vectors, size]`, changed; values: of float32, `value_stride` from one token to the
#   next; skips: of `[heads]`, each for as many neighbouring numbers. gates, weight and outputs as above, skips of the
#   kind, too; the weight is `[vectors, size]`.
STATE_NORM_FIELDS = tuple(
    "next threads num_tokens vectors size heads x values value_stride skips weight gates gate_stride outputs "
    "eps".split()
)
_STATE_HEADS, _STATE_X, _VALUES, _VALUE_STRIDE, _SKIPS, _STATE_WEIGHT, _STATE_GATES, _STATE_GATE_STRIDE = range(5, 13)
_STATE_OUTPUTS, _STATE_EPS = 13, 14
# x, added, outputs: addresses of `[num_tokens, size]`: `x` becomes `x + factor * added`, and outputs become `x`. The
# first is left out where `added` is 0, the second where `outputs` is.
# times: 0, or the address of one number, by which `x` is then multiplied.
# lines: 0, or the address of int64 `[num_tokens]`: the line of each token in `x` and `added`.
ADD_FIELDS = tuple("next threads num_tokens size x added times outputs lines factor".split())
_ADD_SIZE, _ADD_X, _ADD_ADDED, _ADD_TIMES, _ADD_OUTPUTS, _ADD_LINES, _ADD_FACTOR = range(3, 10)
_ZERO, _ONE = np.float32(0), np.float32(1)


@inner
def norm(a, numbers, kind):
    """Normalize the next token, until no tokens are left. `numbers` are the fields as float64."""
    size, weight = a[_SIZE], like(kind, a[_WEIGHT])
    token = take(ahead(a, _NEXT))
    while token < a[_NUM_TOKENS]:
        x = ahead(like(kind, a[_X]), token * a[_IN_STRIDE])
        outputs = ahead(like(kind, a[_OUTPUTS]), token * a[_OUT_STRIDE])
        if a[_ADDED]:
            _add(x, ahead(like(kind, a[_ADDED]), token * a[_IN_STRIDE]), size, np.float32(numbers[_FACTOR]))
        for vector in range(a[_VECTORS]):
            begin = vector * a[_VECTOR_STRIDE]
            if a[_FORM] >= CENTERED:
                bias, shift = like(kind, a[_BIAS]), _ONE if a[_FORM] == CENTERED_SHIFTED else _ZERO
                _center(ahead(x, begin), weight, shift, bias, a[_BIAS], ahead(outputs, begin), size, numbers[_EPS])
            else:
                norm_vector(ahead(x, begin), weight, ahead(outputs, begin), size, a[_FORM], numbers[_EPS])
        token = take(ahead(a, _NEXT))


@inner
def gated_norm(a, numbers, kind):
    """Normalize the next token, until no tokens are left."""
    num, size, weight = a[_GATED_VECTORS], a[_GATED_SIZE], like(kind, a[_GATED_WEIGHT])
    token = take(ahead(a, _NEXT))
    while token < a[_NUM_TOKENS]:
        for vector in range(num):
            begin = (token * num + vector) * size
            outputs = ahead(like(kind, a[_GATED_OUTPUTS]), begin)
            gates = ahead(like(kind, a[_GATES]), token * a[_GATE_STRIDE] + vector * size)
            norm_vector(ahead(float32_at(a[_GATED_X]), begin), weight, outputs, size, PLAIN, numbers[_GATED_EPS])
            for index in range(size):
                gate = get(gates, index)
                put(outputs, index, get(outputs, index) * (gate / (_ONE + exponential(-gate))))
        token = take(ahead(a, _NEXT))


@inner
def state_norm(a, numbers, kind):
    """Normalize the next token, until no tokens are left."""
    num, size, heads = a[_GATED_VECTORS], a[_GATED_SIZE], a[_STATE_HEADS]
    weight, skips, own = like(kind, a[_STATE_WEIGHT]), like(kind, a[_SKIPS]), num * size // heads
    token = take(ahead(a, _NEXT))
    while token < a[_NUM_TOKENS]:
        x = ahead(float32_at(a[_STATE_X]), token * num * size)
        values = ahead(float32_at(a[_VALUES]), token * a[_VALUE_STRIDE])
        gates = ahead(like(kind, a[_STATE_GATES]), token * a[_STATE_GATE_STRIDE])
        for head in range(heads):
            skip = get(skips, head)
            for index in range(head * own, (head + 1) * own):
                gate = get(gates, index)
                x[index] = (x[index] + skip * values[index]) * (gate / (_ONE + exponential(-gate)))
        for vector in range(num):
            begin = vector * size
            outputs = ahead(like(kind, a[_STATE_OUTPUTS]), token * num * size + begin)
            norm_vector(ahead(x, begin), ahead(weight, begin), outputs, size, ONCE, numbers[_STATE_EPS])
        token = take(ahead(a, _NEXT))


@inner
def norm_vector(x, weight, outputs, size, form, eps):
    """Write the RMS norm of a vector."""
    scale = _scale(x, size, _ZERO, eps)
    if form == PLAIN:
        for index in range(size):
            put(outputs, index, rounded(outputs, get(x, index) * scale) * get(weight, index))
    elif form == ONCE:
        for index in range(size):
            put(outputs, index, get(x, index) * scale * get(weight, index))
    else:
        for index in range(size):
            put(outputs, index, get(x, index) * scale * (get(weight, index) + _ONE))


@inner
def _center(x, weight, shift, bias, has_bias, outputs, size, eps):
    mean = np.float32(sum_of(x, size) / np.float32(size))
    scale = _scale(x, size, mean, eps)
    if has_bias:
        for index in range(size):
            factor = rounded(weight, get(weight, index) + shift)
            put(outputs, index, (get(x, index) - mean) * scale * factor + get(bias, index))
    else:
        for index in range(size):
            factor = rounded(weight, get(weight, index) + shift)
            put(outputs, index, (get(x, index) - mean) * scale * factor)


@inner
def _scale(x, size, center, eps):
    square = np.float32(sum_of_squares(x, size, center) / np.float32(size) + np.float32(eps))
    return _ONE / np.float32(sqrt(square))


@inner
def add(a, numbers, kind):
    """Add to the numbers of the next token, and copy them, until no tokens are left."""
    size, factor = a[_ADD_SIZE], np.float32(numbers[_ADD_FACTOR])
    token = take(ahead(a, _NEXT))
    while token < a[_NUM_TOKENS]:
        begin = (int64_at(a[_ADD_LINES])[token] if a[_ADD_LINES] else token) * size
        x = ahead(like(kind, a[_ADD_X]), begin)
        if a[_ADD_ADDED]:
            _add(x, ahead(like(kind, a[_ADD_ADDED]), begin), size, factor)
        if a[_ADD_TIMES]:
            number = get(like(kind, a[_ADD_TIMES]), 0)
            for index in range(size):
                put(x, index, get(x, index) * number)
        if a[_ADD_OUTPUTS]:
            outputs = ahead(like(kind, a[_ADD_OUTPUTS]), token * size)
            for index in range(size):
                outputs[index] = x[index]
        token = take(ahead(a, _NEXT))


@inner
def _add(x, added, size, factor):
    """
    Add in place, and round where torch does: each product, and each sum. With a second pointer for outputs, the
    compiled loop would take the numbers one by one where both are equal.
    """
    for index in range(size):
        put(x, index, get(x, index) + rounded(x, get(added, index) * factor))
