"""Gated activations."""

import numpy as np

from ...jit import inner
from ...jit.pointers import ahead, fused, get, like, power_of_two, put, rounded, take

# Compiled code is called with the address of these numbers, int64 each.
# inputs: address of `[num_tokens, 2, size]`, gates before the numbers that they multiply.
# outputs: address of `[num_tokens, size]`.
# activation: `SILU` or `GELU_TANH`.
GATE_FIELDS = tuple("next threads num_tokens size activation inputs outputs".split())
_NEXT, _THREADS, _NUM_TOKENS, _SIZE, _ACTIVATION, _INPUTS, _OUTPUTS = range(7)
SILU, GELU_TANH = range(2)
_SHARE = 512  # numbers that a thread takes at a time

_ONE = np.float32(1)
_SLOPE, _CUBE = np.float32(2 * 0.7978845608028654), np.float32(0.044715)  # of 2 * sqrt(2 / pi) * (x + 0.044715 * x^3)
# The exponential as torch's vectors compute it (Sleef's, within 1.0 units in the last place), to the same bits.
_PER_LOG2, _LOG2_HIGH, _LOG2_LOW = (
    np.float32(1.4426950408889634),
    np.float32(-0.693145751953125),
    np.float32(-1.428606765330187e-06),
)
_LEAST, _MOST = np.float32(-104), np.float32(100)  # below 0, above infinite
_P2, _P3, _P4 = np.float32(0.5), np.float32(0.166666671633720397949219), np.float32(0.0416664853692054748535156)
_P5, _P6 = np.float32(0.00833336077630519866943359), np.float32(0.00139304355252534151077271)
_P7 = np.float32(0.000198527617612853646278381)


@inner
def gate(a, kind):
    """Take the next share of a token's numbers, until none is left; round after the activation, too."""
    size = a[_SIZE]
    parts = (size + _SHARE - 1) // _SHARE
    number = take(ahead(a, _NEXT))
    while number < a[_NUM_TOKENS] * parts:
        token, begin = number // parts, number % parts * _SHARE
        num = min(_SHARE, size - begin)
        gates = ahead(like(kind, a[_INPUTS]), 2 * token * size + begin)
        ups, outputs = ahead(gates, size), ahead(like(kind, a[_OUTPUTS]), token * size + begin)
        if a[_ACTIVATION] == SILU:
            for index in range(num):
                x = get(gates, index)
                put(outputs, index, rounded(outputs, x / (_ONE + exponential(-x))) * get(ups, index))
        else:
            for index in range(num):
                x = get(gates, index)
                slope = _SLOPE * (x + _CUBE * x * x * x)
                put(outputs, index, rounded(outputs, x / (_ONE + exponential(-slope))) * get(ups, index))
        number = take(ahead(a, _NEXT))


@inner
def exponential(x):
    """Return the exponential of a float32; NaN stays NaN."""
    bounded = min(max(x, _LEAST), _MOST)
    whole = np.float32(np.rint(bounded * _PER_LOG2))
    rest = fused(whole, _LOG2_LOW, fused(whole, _LOG2_HIGH, bounded))
    powers = fused(fused(fused(fused(fused(_P7, rest, _P6), rest, _P5), rest, _P4), rest, _P3), rest, _P2)
    power = np.int32(whole)
    half = power >> 1
    found = (_ONE + fused(rest * rest, powers, rest)) * power_of_two(half) * power_of_two(power - half)
    if x < _LEAST:
        found = np.float32(0)
    if x > _MOST:
        found = np.float32(np.inf)
    return found if x == x else x
