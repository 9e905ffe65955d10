"""Activations of MLPs, gated or not, and products of numbers."""

from math import exp, log

import numpy as np

from ...jit import inner
from ...jit.pointers import ahead, float32_at, fused, get, int64_at, like, power_of_two, put, rounded, take

# Compiled code is called with the address of these numbers, int64 each.
# inputs: address of `[num_tokens, 2, size]` where `is_gated`, gates before the numbers that they multiply; else of
#   `[num_tokens, size]`.
# outputs: address of `[num_tokens, size]`.
# activation: `SILU`, `GELU_TANH`, `GELU`, `RELU`, `RELU_SQUARED` or `XIELU`.
# positive, negative, slope, top: of xIELU alone, addresses of one number each, of the kind, see `_xielu`; of the first
#   two, the softplus counts.
GATE_FIELDS = tuple(
    "next threads num_tokens size activation is_gated inputs outputs positive negative slope top".split()
)
(
    _NEXT, _THREADS, _NUM_TOKENS, _SIZE, _ACTIVATION, _IS_GATED, _INPUTS, _OUTPUTS, _POSITIVE, _NEGATIVE, _SLOPE, _TOP,
) = range(12)  # fmt: skip
SILU, GELU_TANH, GELU, RELU, RELU_SQUARED, XIELU = range(6)
_SHARE = 512  # numbers that a thread takes at a time
# Gates that are clamped, `g * sigmoid(factor * g) * (up + 1)`: of gates g that are at most `cap`, and numbers `up` from
# `-cap` to `cap`. Both are float64.
# inputs: address of `[num_tokens, size, 2]`, each gate before the number that it multiplies.
CLAMPED_GATE_FIELDS = tuple("next threads num_tokens size inputs outputs factor cap".split())
_PAIRS, _CLAMPED_OUTPUTS, _FACTOR, _CAP = range(4, 8)
# Products of two lines of each token, `x` and factors, whose strides are numbers from one token to the next.
# x: address of float32 if `is_wide`, which are rounded first. outputs: address of `[num_tokens, size]`.
# lines: 0, or the address of int64 `[num_tokens]`: the line of each token's factors.
# is_one: whether a token has one factor; is_sigmoid: whether factors are the sigmoids of numbers, rounded. In both
#   cases, `x` is of the kind.
TIMES_FIELDS = tuple(
    "next threads num_tokens size x x_stride is_wide factors factor_stride lines outputs is_one is_sigmoid".split()
)
_TIMES_X, _X_STRIDE, _IS_WIDE, _FACTORS, _FACTOR_STRIDE, _FACTOR_LINES, _PRODUCTS, _IS_ONE, _IS_SIGMOID = range(4, 13)

_ZERO, _HALF, _ONE, _TWO = np.float32(0), np.float32(0.5), np.float32(1), np.float32(2)
_RISE, _CUBE = np.float32(2 * 0.7978845608028654), np.float32(0.044715)  # of 2 * sqrt(2 / pi) * (x + 0.044715 * x^3)
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


_NEAR = np.float32(0.625)  # of the hyperbolic tangent: from there on, by the exponential
_T0, _T1, _T2 = np.float32(-3.33332819422e-1), np.float32(1.33314422036e-1), np.float32(-5.37397155531e-2)
_T3, _T4 = np.float32(2.06390887954e-2), np.float32(-5.70498872745e-3)
# The normal distribution up to `-x`, by `exp(-x * x / 2) * t * (_N0 + _N1 * t + ...)` with `t = 1 / (1 + 0.3 * x)`: a
# fit for x from 0 to 15, within 4e-9 of each number (cf. erfc in W. Press et al., Numerical Recipes, section 6.2.2).
_PACE = np.float32(0.3)
_N0, _N1 = np.float32(0.1196867166525921), np.float32(0.11957131806264529)
_N2, _N3 = np.float32(0.11023934110776319), np.float32(0.07837225466153841)
_N4, _N5 = np.float32(0.09620481895725365), np.float32(-0.07950895380868414)
_N6, _N7 = np.float32(0.19188302579075966), np.float32(-0.22828458220057896)
_N8, _N9 = np.float32(0.11246470344409089), np.float32(-0.020628644400134736)
# Between -1 and 1, what it is beyond a half, by its Taylor series: `x * (_S0 + _S1 * x ** 2 + ...)`.
_S0, _S1, _S2 = np.float32(0.3989422804014327), np.float32(-0.06649038006690546), np.float32(0.009973557010035819)
_S3, _S4 = np.float32(-0.0011873282154804545), np.float32(0.00011543468761615529)
_S5, _S6 = np.float32(-9.444656259503615e-06), np.float32(6.659693516316652e-07)
_S7, _S8 = np.float32(-4.12266741486269e-08), np.float32(2.2735298243728065e-09)


@inner
def gate(a, kind):
    """Take the next share of a token's numbers, until none is left; round after the activation, too."""
    size = a[_SIZE]
    parts = (size + _SHARE - 1) // _SHARE
    number = take(ahead(a, _NEXT))
    while number < a[_NUM_TOKENS] * parts:
        token, begin = number // parts, number % parts * _SHARE
        num = min(_SHARE, size - begin)
        gates = ahead(like(kind, a[_INPUTS]), (2 if a[_IS_GATED] else 1) * token * size + begin)
        outputs = ahead(like(kind, a[_OUTPUTS]), token * size + begin)
        if a[_ACTIVATION] == XIELU:
            _activate_by(a, gates, outputs, num, kind)
        else:
            _activate(gates, outputs, num, a[_ACTIVATION])
        if a[_IS_GATED]:
            ups = ahead(gates, size)
            for index in range(num):
                put(outputs, index, get(outputs, index) * get(ups, index))
        number = take(ahead(a, _NEXT))


@inner
def clamped_gate(a, numbers, kind):
    """
    Take the next share of a token's numbers, until none is left; round once. `numbers` are the fields as float64.
    """
    size, factor, cap = a[_SIZE], np.float32(numbers[_FACTOR]), np.float32(numbers[_CAP])
    parts = (size + _SHARE - 1) // _SHARE
    number = take(ahead(a, _NEXT))
    while number < a[_NUM_TOKENS] * parts:
        begin = number // parts * size + number % parts * _SHARE
        inputs, outputs = ahead(like(kind, a[_PAIRS]), 2 * begin), ahead(like(kind, a[_CLAMPED_OUTPUTS]), begin)
        for index in range(min(_SHARE, size - number % parts * _SHARE)):
            own, up = get(inputs, 2 * index), get(inputs, 2 * index + 1)
            own = cap if own > cap else own  # so that NaN stays NaN
            up = cap if up > cap else -cap if up < -cap else up
            put(outputs, index, own / (_ONE + exponential(-factor * own)) * (up + _ONE))
        number = take(ahead(a, _NEXT))


@inner
def times(a, kind):
    """Take the next token, until none is left."""
    size = a[_SIZE]
    token = take(ahead(a, _NEXT))
    while token < a[_NUM_TOKENS]:
        line = int64_at(a[_FACTOR_LINES])[token] if a[_FACTOR_LINES] else token
        factors = ahead(like(kind, a[_FACTORS]), line * a[_FACTOR_STRIDE])
        outputs = ahead(like(kind, a[_PRODUCTS]), token * size)
        if a[_IS_ONE]:
            x, factor = ahead(like(kind, a[_TIMES_X]), token * a[_X_STRIDE]), get(factors, 0)
            if a[_IS_SIGMOID]:
                factor = rounded(outputs, _sigmoid(factor))
            for index in range(size):
                put(outputs, index, get(x, index) * factor)
        elif a[_IS_SIGMOID]:
            x = ahead(like(kind, a[_TIMES_X]), token * a[_X_STRIDE])
            for index in range(size):
                put(outputs, index, get(x, index) * rounded(outputs, _sigmoid(get(factors, index))))
        elif a[_IS_WIDE]:
            wide = ahead(float32_at(a[_TIMES_X]), token * a[_X_STRIDE])
            for index in range(size):
                put(outputs, index, rounded(outputs, wide[index]) * get(factors, index))
        else:
            x = ahead(like(kind, a[_TIMES_X]), token * a[_X_STRIDE])
            for index in range(size):
                put(outputs, index, get(x, index) * get(factors, index))
        token = take(ahead(a, _NEXT))


@inner
def _sigmoid(number):
    return _ONE / (_ONE + exponential(-number))


@inner
def _activate(numbers, outputs, num, activation):
    if activation == SILU:
        for index in range(num):
            put(outputs, index, _silu(get(numbers, index)))
    elif activation == GELU_TANH:
        for index in range(num):
            put(outputs, index, _gelu_tanh(get(numbers, index)))
    elif activation == GELU:
        for index in range(num):
            put(outputs, index, _gelu(get(numbers, index)))
    elif activation == RELU:
        for index in range(num):
            put(outputs, index, _relu(get(numbers, index)))
    else:
        for index in range(num):
            put(outputs, index, _relu_squared(get(numbers, index)))


@inner
def _activate_by(a, numbers, outputs, num, kind):
    slope, top = get(like(kind, a[_SLOPE]), 0), get(like(kind, a[_TOP]), 0)
    positive = _softplus(get(like(kind, a[_POSITIVE]), 0))
    negative = slope + _softplus(get(like(kind, a[_NEGATIVE]), 0))
    for index in range(num):
        put(outputs, index, _xielu(get(numbers, index), positive, negative, slope, top))


@inner
def _softplus(x):
    return x if x > np.float32(20) else np.float32(log(1.0 + exp(x)))


@inner
def _xielu(x, positive, negative, slope, top):
    """Return the xIELU (https://arxiv.org/abs/2411.13010) of a float32, whose exponent is at most `top`."""
    below = (_exponential_less_one(min(x, top)) - x) * negative
    return (positive * x * x if x > _ZERO else below) + slope * x


@inner
def _exponential_less_one(x):
    """Return `exp(x) - 1`, near 0 by its Taylor series."""
    series = _ONE
    for index in range(8, 1, -1):
        series = fused(series, x / np.float32(index), _ONE)
    return series * x if abs(x) < _HALF else exponential(x) - _ONE


@inner
def _silu(x):
    return x / (_ONE + exponential(-x))


@inner
def _gelu_tanh(x):
    slope = _RISE * (x + _CUBE * x * x * x)
    return x / (_ONE + exponential(-slope))


@inner
def _gelu(x):
    far, square = abs(x), x * x
    t = _ONE / (_ONE + _PACE * far)
    powers = fused(fused(fused(fused(_N9, t, _N8), t, _N7), t, _N6), t, _N5)
    powers = fused(fused(fused(fused(fused(powers, t, _N4), t, _N3), t, _N2), t, _N1), t, _N0)
    part = x * (exponential(-_HALF * square) * t * powers)
    series = fused(fused(fused(fused(_S8, square, _S7), square, _S6), square, _S5), square, _S4)
    series = fused(fused(fused(fused(series, square, _S3), square, _S2), square, _S1), square, _S0)
    near = fused(square, series, _HALF * x)
    beyond = x if part != part else x - part  # infinity times 0 is no number
    return near if far < _ONE else part if x < _ZERO else beyond


@inner
def _relu(x):
    return _ZERO if x < _ZERO else x


@inner
def _relu_squared(x):
    return _ZERO if x < _ZERO else x * x


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


@inner
def hyperbolic_tangent(x):
    """Return the hyperbolic tangent of a float32, by Cephes (Moshier)."""
    square = x * x
    powers = fused(fused(fused(fused(_T4, square, _T3), square, _T2), square, _T1), square, _T0)
    near = fused(powers * square, x, x)
    far = _ONE - _TWO / (exponential(_TWO * x) + _ONE)
    return near if abs(x) < _NEAR else far
