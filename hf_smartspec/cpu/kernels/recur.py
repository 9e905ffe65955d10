"""
Recurrent layers of compiled forwards: causal convolutions and linear recurrences along the paths of draft trees.

A recurrence runs token by token, each from the state after its parent. So neither its numbers nor the states that it
leaves depend on how a text is cut into forwards, or on other branches.
"""

from math import exp, log, sqrt

import numpy as np

from ...jit import inner
from ...jit.pointers import ahead, float32_at, get, int64_at, like, take
from .gates import exponential
from .tiles import add_outer, add_weighted, sum_of_squares, tile

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
#   numbers x, and factors sigmoids of betas, or `softplus(x + bias)` where there are none. All four are of the kind.
# is_delta: whether what the state returns for a key is subtracted from the value.
# states: address of `[entries, heads, size, value_size]`; writes: of `[num_tokens, heads, value_size]`, filled.
# scale: factor of queries. eps: where not 0, queries and keys are normalized to length 1, `eps` under the root.
# scratch: address of `scratch_size` float32 for each thread; these have room for the states of as many tokens at once.
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
_COLUMNS = 64  # of a state that are run at once: all lines of these fit the level 1 cache, as most states do not
_ITEMSIZE, _LINE = 4, 16  # bytes of float32, and numbers in a line of the cache, which vectors should not cross
_ONE, _ZERO = np.float32(1), np.float32(0)


def most_states(parents: np.ndarray) -> int:
    """
    Return the most states that are needed at once for one of the rows with these `parents`, `[R, T]`: one, and one for
    each token whose parent has further children; no more than there are tokens.
    """
    branches = (parents[:, 1:] != np.arange(parents.shape[1] - 1)) & (parents[:, 1:] >= -1)
    # At least half of the children of a parent that has several do not come right after it.
    return min(1 + 2 * int(branches.sum(axis=1).max()), parents.shape[1])


def scratch_size(tail: int, states: int, size: int, value_size: int) -> int:
    """Return the float32 numbers that a thread needs for a head of a row."""
    columns = min(value_size, _COLUMNS)
    num = (states * size + 2) * columns + tail * (2 * size + 5)
    return -(-num // _LINE) * _LINE


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
        vectors = ahead(scratch, a[_SCRATCH_SIZE] - (2 * size + 5) * a[_TAIL])
        rates = ahead(vectors, 2 * num * size)
        rest = ahead(rates, 3 * num)
        _prepare(a, numbers, of_row, head, vectors, rates, kind)
        state = ahead(float32_at(a[_STATES]), (of_row[2] * heads + head) * size * a[_VALUE_SIZE])
        if a[_RESULTS]:
            _recur(a, of_row, parents, head, scratch, vectors, rates, rest, state)
        elif of_row[3] >= 0:
            _advance(a, of_row, parents, head, vectors, rates, rest, state)
        number = take(ahead(a, _NEXT))


@inner
def _prepare(a, numbers, of_row, head, vectors, rates, kind):
    """
    Fill the query and the key of a head at every token, `[tokens, 2, size]`, normalized, queries scaled; and, one after
    the other, decays, factors of what is written, and products of query and key, `[3, tokens]`. Where states are stored
    only, there are no queries: these may be gone by then.
    """
    num, size, scale, own = of_row[1], a[_SIZE], np.float32(numbers[_SCALE]), head // a[_GROUPS] * a[_SIZE]
    eps, decays, none = np.float32(numbers[_EPS]), like(kind, a[_DECAYS]), float32_at(0)
    betas, products = ahead(rates, num), ahead(rates, 2 * num)
    for token in range(num):
        place, query, key = of_row[0] + token, ahead(vectors, 2 * token * size), ahead(vectors, (2 * token + 1) * size)
        rates[token] = _rate(a, get(decays, place * a[_DECAY_STRIDE] + head), head, kind)
        _normalize(ahead(float32_at(a[_KEYS]), place * a[_KEY_STRIDE] + own), key, size, _ONE, eps)
        if a[_RESULTS]:
            betas[token] = _beta(a, place, head, kind)
            _normalize(ahead(float32_at(a[_QUERIES]), place * a[_QUERY_STRIDE] + own), query, size, scale, eps)
            tile(1, 1, key, query, none, ahead(products, token), size, size, 1, None, None, None)


@inner
def _normalize(vector, found, size, scale, eps):
    factor = scale
    if eps:
        factor = scale / np.float32(sqrt(sum_of_squares(vector, size, _ZERO) + eps))
    for index in range(size):
        found[index] = vector[index] * factor


@inner
def _beta(a, place, head, kind):
    """Return the factor of what a token writes."""
    if not a[_BETAS]:
        number = get(like(kind, a[_DECAYS]), place * a[_DECAY_STRIDE] + head)
        return np.float32(_softplus(a, number, head, kind)) if a[_LOGS] else _ONE
    beta = get(like(kind, a[_BETAS]), place * a[_BETA_STRIDE] + head)
    return _ONE / (_ONE + exponential(-beta)) if a[_LOGS] else beta


@inner
def _rate(a, number, head, kind):
    """Return the decay of a head at a token."""
    if not a[_LOGS]:
        return exponential(number)
    softplus = _softplus(a, number, head, kind)
    return np.float32(exp(-exp(np.float64(get(like(kind, a[_LOGS]), head))) * softplus))


@inner
def _softplus(a, number, head, kind):
    """Return the softplus of a number and the bias of its head, in float64."""
    x = np.float64(number + get(like(kind, a[_BIASES]), head))
    return x if x > 20 else log(1 + exp(x))


@inner
def _recur(a, of_row, parents, head, scratch, vectors, rates, rest, state):
    """Compute what every token of a row writes, and its output; store the state after the last one where it stays."""
    num, size, value_size, stride = of_row[1], a[_SIZE], a[_VALUE_SIZE], a[_HEADS] * a[_VALUE_SIZE]
    betas, products, places, columns = ahead(rates, num), ahead(rates, 2 * num), rest, min(value_size, _COLUMNS)
    sums, states = scratch, ahead(scratch, 2 * columns)
    _place_states(num, parents, places, ahead(rest, num))
    for begin in range(0, value_size, _COLUMNS):
        length, memory = min(value_size - begin, _COLUMNS), ahead(state, begin)
        for token in range(num):
            parent, place, rate = parents[token], of_row[0] + token, rates[token]
            query, key = ahead(vectors, 2 * token * size), ahead(vectors, (2 * token + 1) * size)
            before, line = memory, value_size
            if parent >= 0:
                before, line = ahead(states, np.int64(places[parent]) * size * columns), columns
            for index in range(2 * length):
                sums[index] = _ZERO
            add_weighted(2 if a[_IS_DELTA] else 1, query, size, before, line, size, length, sums, None)
            by_query, by_key = sums, ahead(sums, length)  # the second is 0 without the delta rule
            value = ahead(float32_at(a[_VALUES]), place * a[_VALUE_STRIDE] + head * value_size + begin)
            written = ahead(float32_at(a[_WRITES]), place * stride + head * value_size + begin)
            output = ahead(float32_at(a[_RESULTS]), place * stride + head * value_size + begin)
            beta, product = betas[token], products[token]
            for index in range(length):
                written[index] = beta * (value[index] - rate * by_key[index])
            for index in range(length):
                output[index] = rate * by_query[index] + product * written[index]
            if token == of_row[3]:
                add_outer(key, rate, written, before, line, memory, value_size, size, length)
            elif places[token] >= 0:
                own = ahead(states, np.int64(places[token]) * size * columns)
                add_outer(key, rate, written, before, line, own, columns, size, length)


@inner
def _place_states(num, parents, places, children):
    """Give every token with children a place for its state: that of its parent, unless that has other children."""
    for token in range(num):
        children[token] = _ZERO
    for token in range(num):
        if parents[token] >= 0:
            children[parents[token]] += _ONE
    count = _ZERO
    for token in range(num):
        parent = parents[token]
        if children[token] == 0:
            places[token] = -_ONE
        elif parent >= 0 and children[parent] == 1:
            places[token] = places[parent]
        else:
            places[token] = count
            count += _ONE


@inner
def _advance(a, of_row, parents, head, vectors, rates, path, state):
    """Store the state after a path, from what its tokens have written."""
    size, value_size, heads = a[_SIZE], a[_VALUE_SIZE], a[_HEADS]
    length, token = 0, of_row[3]
    while token >= 0:
        path[length] = np.float32(token)
        length, token = length + 1, parents[token]
    for begin in range(0, value_size, _COLUMNS):
        columns, memory = min(value_size - begin, _COLUMNS), ahead(state, begin)
        for place in range(length - 1, -1, -1):
            token = np.int64(path[place])
            key, first = ahead(vectors, (2 * token + 1) * size), (of_row[0] + token) * heads + head
            written = ahead(float32_at(a[_WRITES]), first * value_size + begin)
            add_outer(key, rates[token], written, memory, value_size, memory, value_size, size, columns)
