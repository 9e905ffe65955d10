"""RMS norms of a few tokens."""

from math import sqrt

import numpy as np

from ...jit import callback, inner
from ...jit.pointers import ahead, bfloat16_at, float32_at, float64_at, int64_at, narrowed, widened
from .tiles import sum_of_squares

# Compiled code is called with the address of these numbers, int64 each but for `eps`, which is float64.
# size: numbers of a token; is_shifted: one is added to weights; x, weight, outputs: addresses of numbers of one kind.
NORM_FIELDS = tuple("num_tokens size is_shifted x weight outputs eps".split())
_NUM_TOKENS, _SIZE, _IS_SHIFTED, _X, _WEIGHT, _OUTPUTS, _EPS = range(7)
_ONE = np.float32(1)


@callback
def norm_float32(address):
    a = int64_at(address)
    size, weight = a[_SIZE], float32_at(a[_WEIGHT])
    more = _ONE if a[_IS_SHIFTED] else np.float32(0)
    for token in range(a[_NUM_TOKENS]):
        x, outputs = ahead(float32_at(a[_X]), token * size), ahead(float32_at(a[_OUTPUTS]), token * size)
        scale = _scale(x, size, float64_at(address)[_EPS])
        for index in range(size):
            outputs[index] = x[index] * scale * (weight[index] + more)


@callback
def norm_bfloat16(address):
    """Round where models do: after the normalization, too, unless weights are shifted."""
    a = int64_at(address)
    size, weight = a[_SIZE], bfloat16_at(a[_WEIGHT])
    for token in range(a[_NUM_TOKENS]):
        x, outputs = ahead(bfloat16_at(a[_X]), token * size), ahead(bfloat16_at(a[_OUTPUTS]), token * size)
        scale = _scale(x, size, float64_at(address)[_EPS])
        if a[_IS_SHIFTED]:
            for index in range(size):
                outputs[index] = narrowed(widened(x[index]) * scale * (widened(weight[index]) + _ONE))
        else:
            for index in range(size):
                number = widened(narrowed(widened(x[index]) * scale))
                outputs[index] = narrowed(number * widened(weight[index]))


@inner
def _scale(x, size, eps):
    return _ONE / np.float32(sqrt(np.float32(sum_of_squares(x, size) / np.float32(size) + np.float32(eps))))
