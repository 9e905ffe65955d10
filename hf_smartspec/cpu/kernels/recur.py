"""Recurrent layers of a few tokens: causal convolutions and linear recurrences along the paths of draft trees."""

from math import exp, log, sqrt

import numpy as np

from ...jit import inner
from ...jit.pointers import ahead, float32_at, get, int64_at, like, take
from .gates import exponential
from .multiply import largest_tile, tile_width
from .tiles import add_weighted, most_sums, sum_of_squares, tile

# Compiled code is called with the address of these numbers, int64 each but for `eps` and `scale`, which are float64.
# Numbers at addresses are float32, or of the program's kind where that is said.
# rows: address of int64 `[num_rows, 4]`: the first token of each row, the number of its tokens, the entry of its state,
#   and the token of the row after which its state is stored; -1 if the state stays.
# parents: address of int64 `[num_rows, tail]`: of each token in its row, before their children; -1 for roots.
# inputs (of the kind), outputs: addresses of `[num_tokens, channels]`; `in_stride`, `out_stride`: from one token to the
#   next. Where `outputs` is 0, states are stored only.
# windows: address of `[entries, width - 1, channels]`, the last inputs; weight, bias (or 0): of `[channels, width]` and
#   `[channels]`, all of the kind. Width is 2 to 4. is_silu: whether SiLU is applied.
CONVOLVE_FIELDS = tuple(
    "next threads num_rows tail rows parents channels width is_silu in_stride out_stride inputs windows weight bias "
    "outputs".split()
)
(
    _NEXT, _THREADS, _NUM_ROWS, _TAIL, _ROWS, _PARENTS, _CHANNELS, _WIDTH, _IS_SILU, _IN_STRIDE, _OUT_STRIDE, _INPUTS,
    _WINDOWS, _WEIGHT, _BIAS, _OUTPUTS,
) = range(16)  # fmt: skip
# heads, groups: heads of values, and the number of them that share queries and keys.
# queries, keys: addresses of `[num_tokens, heads / groups, size]`, values, outputs: `[num_tokens, heads,
#   value_size]`; `strides` from one token's to the next one's, those of outputs excepted, which lie side by side.
#   Where `outputs` is 0, states are stored only, and queries and values are not read.
# decays, betas (or 0): addresses of `[num_tokens, heads]`: logarithms of decays, and factors of what is written; where
#   `logs` and `biases` are not 0 but addresses of `[heads]`, decays are `-exp(log) * softplus(x + bias)` of these
#   numbers, and factors their sigmoids. All four are of the kind.
# is_delta: whether what the state returns for a key is subtracted from the value.
# states: address of `[entries, heads, size, value_size]`; writes: of `[num_tokens, heads, value_size]`, filled.
# scale: factor of queries. eps: where not 0, queries and keys are normalized to length 1, `eps` under the root.
# scratch: address of `scratch_size` float32 for each thread.
RECUR_FIELDS = tuple(
    "next threads num_rows tail rows parents heads groups size value_size queries keys values query_stride key_stride "
    "value_stride decays decay_stride betas beta_stride logs biases is_delta states writes outputs scratch "
    "scratch_size scale eps".split()
)
(
    _HEADS, _GROUPS, _SIZE, _VALUE_SIZE, _QUERIES, _KEYS, _VALUES, _QUERY_STRIDE, _KEY_STRIDE, _VALUE_STRIDE, _DECAYS,
    _DECAY_STRIDE, _BETAS, _BETA_STRIDE, _LOGS, _BIASES, _IS_DELTA, _STATES, _WRITES, _RESULTS, _SCRATCH, _SCRATCH_SIZE,
    _SCALE, _EPS,
) = range(6, 30)  # fmt: skip
_SHARE = 512  # channels that a thread takes at a time
_ITEMSIZE = 4  # bytes of float32
_ONE, _ZERO = np.float32(1), np.float32(0)


def scratch_size(tail: int, size: int, value_size: int) -> int:
    """Return the float32 numbers that a thread needs for a head of a row."""
    return 2 * tail * (size + value_size + tail + 1)


@inner
def convolve(a, kind):
    """Take the next channels of a row, until none are left."""
    parts = (a[_CHANNELS] + _SHARE - 1) // _SHARE
    number = take(ahead(a, _NEXT))
    while number < a[_NUM_ROWS] * parts:
        row, begin = number // parts, number % parts * _SHARE
        num = min(_SHARE, a[_CHANNELS] - begin)
        of_row, parents = _row(a, row)
        if a[_OUTPUTS]:
            for token in range(of_row[1]):
                _convolve(a, of_row, parents, token, begin, num, kind)
        if of_row[3] >= 0:
            _shift(a, of_row, parents, begin, num, kind)
        number = take(ahead(a, _NEXT))


@inner
def _row(a, row):
    return ahead(int64_at(a[_ROWS]), 4 * row), ahead(int64_at(a[_PARENTS]), row * a[_TAIL])


@inner
def _before(parents, token):
    """Return the token before one: -1, -2 ... are the last inputs of the window, backwards."""
    return parents[token] if token >= 0 else token - 1


@inner
def _input(a, of_row, token, begin, kind):
    if token >= 0:
        return ahead(like(kind, a[_INPUTS]), (of_row[0] + token) * a[_IN_STRIDE] + begin)
    line = (of_row[2] + 1) * (a[_WIDTH] - 1) + token
    return ahead(like(kind, a[_WINDOWS]), line * a[_CHANNELS] + begin)


@inner
def _convolve(a, of_row, parents, token, begin, num, kind):
    width, second = a[_WIDTH], _before(parents, token)
    third = _before(parents, second) if width > 2 else second
    fourth = _before(parents, third) if width > 3 else third
    x, y = _input(a, of_row, token, begin, kind), _input(a, of_row, second, begin, kind)
    z, last = _input(a, of_row, third, begin, kind), _input(a, of_row, fourth, begin, kind)
    outputs = ahead(float32_at(a[_OUTPUTS]), (of_row[0] + token) * a[_OUT_STRIDE] + begin)
    weight = ahead(like(kind, a[_WEIGHT]), begin * width)
    if width == 4:
        for index in range(num):
            at = 4 * index
            total = get(last, index) * get(weight, at) + get(z, index) * get(weight, at + 1)
            total += get(y, index) * get(weight, at + 2) + get(x, index) * get(weight, at + 3)
            outputs[index] = total
    elif width == 3:
        for index in range(num):
            at = 3 * index
            total = get(z, index) * get(weight, at) + get(y, index) * get(weight, at + 1)
            outputs[index] = total + get(x, index) * get(weight, at + 2)
    elif width > 4:
        _convolve_wide(a, of_row, parents, token, begin, num, outputs, kind)
    else:
        for index in range(num):
            at = 2 * index
            outputs[index] = get(y, index) * get(weight, at) + get(x, index) * get(weight, at + 1)
    if a[_BIAS]:
        bias = ahead(like(kind, a[_BIAS]), begin)
        for index in range(num):
            outputs[index] += get(bias, index)
    if a[_IS_SILU]:
        for index in range(num):
            total = outputs[index]
            outputs[index] = total / (_ONE + exponential(-total))


@inner
def _convolve_wide(a, of_row, parents, token, begin, num, outputs, kind):
    width = a[_WIDTH]
    weight = ahead(like(kind, a[_WEIGHT]), begin * width)
    for index in range(num):
        outputs[index] = _ZERO
    for place in range(width - 1, -1, -1):
        x = _input(a, of_row, token, begin, kind)
        for index in range(num):
            outputs[index] += get(x, index) * get(weight, index * width + place)
        token = _before(parents, token)


@inner
def _shift(a, of_row, parents, begin, num, kind):
    """Store the last inputs of a path in the window, from the oldest on, since those may lie in the window."""
    for line in range(a[_WIDTH] - 1):
        token = of_row[3]
        for _ in range(a[_WIDTH] - 2 - line):
            token = _before(parents, token)
        target = _input(a, of_row, line - a[_WIDTH] + 1, begin, kind)
        source = _input(a, of_row, token, begin, kind)
        for index in range(num):
            target[index] = source[index]


@inner
def recur(a, numbers, kind):
    """Take the next head of a row, until none are left."""
    thread, heads, number = take(ahead(a, _THREADS)), a[_HEADS], take(ahead(a, _NEXT))
    scratch = float32_at(a[_SCRATCH] + thread * a[_SCRATCH_SIZE] * _ITEMSIZE)
    while number < a[_NUM_ROWS] * heads:
        row, head = number // heads, number % heads
        of_row, parents = _row(a, row)
        num, size = of_row[1], a[_SIZE]
        keys, queries = scratch, ahead(scratch, num * size)
        sums = ahead(queries, num * size)
        rates = ahead(sums, 2 * num * a[_VALUE_SIZE])
        _prepare(a, numbers, of_row, head, keys, queries, rates, kind)
        state = ahead(float32_at(a[_STATES]), (of_row[2] * heads + head) * size * a[_VALUE_SIZE])
        if a[_RESULTS]:
            _recur(a, of_row, parents, head, keys, sums, rates, ahead(rates, 2 * num), state, kind)
        if of_row[3] >= 0:
            _advance(a, of_row, parents, head, keys, queries, sums, rates, state)
        number = take(ahead(a, _NEXT))


@inner
def _prepare(a, numbers, of_row, head, keys, queries, rates, kind):
    """
    Fill keys of a head `[tokens, size]`, normalized, and decays `[tokens]`; and queries, normalized and scaled, unless
    states are stored only: these may be gone by then.
    """
    size, scale, own = a[_SIZE], np.float32(numbers[_SCALE]), head // a[_GROUPS] * a[_SIZE]
    eps, decays = np.float32(numbers[_EPS]), like(kind, a[_DECAYS])
    for token in range(of_row[1]):
        place = of_row[0] + token
        rates[token] = _rate(a, get(decays, place * a[_DECAY_STRIDE] + head), head, kind)
        key = ahead(float32_at(a[_KEYS]), place * a[_KEY_STRIDE] + own)
        by_key, by_query = _ONE, scale
        if eps:
            by_key = _ONE / np.float32(sqrt(sum_of_squares(key, size, _ZERO) + eps))
        for index in range(size):
            keys[token * size + index] = key[index] * by_key
        if a[_RESULTS]:
            query = ahead(float32_at(a[_QUERIES]), place * a[_QUERY_STRIDE] + own)
            if eps:
                by_query = scale / np.float32(sqrt(sum_of_squares(query, size, _ZERO) + eps))
            for index in range(size):
                queries[token * size + index] = query[index] * by_query


@inner
def _rate(a, number, head, kind):
    """Return the decay of a head at a token."""
    if not a[_LOGS]:
        return exponential(number)
    x = np.float64(number + get(like(kind, a[_BIASES]), head))
    softplus = x if x > 20 else log(1 + exp(x))
    return np.float32(exp(-exp(np.float64(get(like(kind, a[_LOGS]), head))) * softplus))


@inner
def _recur(a, of_row, parents, head, keys, sums, rates, products, state, kind):
    """
    Compute what every token of a row writes, and its output: sums over its ancestors, each with the decays from there
    on, and what the state returns, with those of the whole path.
    """
    num, heads, size, value_size = of_row[1], a[_HEADS], a[_SIZE], a[_VALUE_SIZE]
    totals, stride = ahead(rates, num), heads * value_size
    writes = ahead(float32_at(a[_WRITES]), (of_row[0] * heads + head) * value_size)
    for index in range(2 * num * value_size):
        sums[index] = _ZERO
    first = 0 if a[_IS_DELTA] else num  # without the delta rule, no key reads the state
    while first < 2 * num:
        some = min(2 * num - first, most_sums())
        own = ahead(sums, first * value_size)
        add_weighted(some, ahead(keys, first * size), size, state, value_size, size, value_size, own, None)
        first += some
    _multiply(num, size, keys, products)
    for token in range(num):
        parent, beta, place = parents[token], _ONE, of_row[0] + token
        rate = rates[token]
        total = rate * totals[parent] if parent >= 0 else rate
        totals[token] = total
        if a[_BETAS]:
            beta = get(like(kind, a[_BETAS]), place * a[_BETA_STRIDE] + head)
            if a[_LOGS]:
                beta = _ONE / (_ONE + exponential(-beta))
        value = ahead(float32_at(a[_VALUES]), place * a[_VALUE_STRIDE] + head * value_size)
        left, found = ahead(sums, token * value_size), ahead(sums, (num + token) * value_size)
        for index in range(value_size):
            left[index] = value[index] - total * left[index]
        for index in range(value_size):
            found[index] = total * found[index]
        while parent >= 0:
            written = ahead(writes, parent * stride)
            if a[_IS_DELTA]:
                factor = rate * products[token * num + parent]
                for index in range(value_size):
                    left[index] -= factor * written[index]
            factor = rate * products[(num + token) * num + parent]
            for index in range(value_size):
                found[index] += factor * written[index]
            rate, parent = rate * rates[parent], parents[parent]
        own, factor = ahead(writes, token * stride), products[(num + token) * num + token]
        for index in range(value_size):
            own[index] = beta * left[index]
        outputs = ahead(float32_at(a[_RESULTS]), (place * heads + head) * value_size)
        for index in range(value_size):
            outputs[index] = found[index] + factor * own[index]


@inner
def _multiply(num, size, keys, products):
    """Multiply all keys and queries `[2 * num, size]` by the keys; the products are `[2 * num, num]`."""
    most_rows, most = largest_tile(2 * num, None)
    row, none = 0, float32_at(0)
    while row < num:
        rows = most_rows if num >= most_rows else 1
        row = min(row, num - rows)  # rows before this one are computed once more, with the same results
        token = 0
        while token < 2 * num:
            some = tile_width(2 * num - token, most) if rows > 1 else 1
            own, found = ahead(keys, token * size), ahead(products, token * num + row)
            tile(rows, some, ahead(keys, row * size), own, none, found, size, size, num, None, None, None)
            token += some
        row += rows


@inner
def _advance(a, of_row, parents, head, keys, weights, rows, rates, state):
    """Store the state after a path: what its tokens have written, each with the decays after it, is added."""
    size, value_size, heads = a[_SIZE], a[_VALUE_SIZE], a[_HEADS]
    writes = ahead(float32_at(a[_WRITES]), (of_row[0] * heads + head) * value_size)
    length, token = 0, of_row[3]
    while token >= 0:
        length, token = length + 1, parents[token]
    rate, token = _ONE, of_row[3]
    for place in range(length):
        written = ahead(writes, token * heads * value_size)
        for index in range(value_size):
            rows[place * value_size + index] = written[index]
        for index in range(size):
            weights[index * length + place] = rate * keys[token * size + index]
        rate, token = rate * rates[token], parents[token]
    line = 0
    while line < size:
        some = min(size - line, most_sums())
        own = ahead(state, line * value_size)
        for index in range(some * value_size):
            own[index] *= rate
        add_weighted(some, ahead(weights, line * length), length, rows, value_size, length, value_size, own, None)
        line += some
