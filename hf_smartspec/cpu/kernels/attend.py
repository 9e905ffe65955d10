"""Attention of a few tokens, each over neighbouring lines of keys and values."""

import numpy as np

from ...jit import inner
from ...jit.pointers import ahead, float32_at, get, int64_at, like, power_of_two, prefetch, put, rounded, take
from .gates import exponential
from .multiply import largest_tile, tile_width
from .tiles import MOST_SUMS, add_weighted, largest, tile

# Compiled code is called with the address of these numbers, int64 each but for `scale`, which is float64.
# next: incremented by the thread that takes the next share of the work; threads: by each thread that takes part.
# num_runs, runs: runs are successive tokens that attend to lines of one row; the address of int64 `[runs + 1]`, the
#   first token of each run and the end of the last one.
# parts: number of parts that the `kv_heads` of a run are divided into.
# size: numbers of a head; groups: query heads that share a key/value head.
# firsts, counts: addresses of int64 `[tokens]`, the first line that each token attends to, and the number of lines
#   from that one to its own.
# nodes, bits: 0, or addresses of int64 `[tokens]` and `[words, tokens]`: from line `nodes` on, a token attends only to
#   lines with a set bit. distance: numbers from one word of a token's bits to the next.
# queries, outputs, keys, values: addresses of `[tokens, heads, size]` twice and `[lines, kv_heads, size]` twice.
# gates: 0, or the address of the first token's gates, by the sigmoids of which outputs are multiplied: `size` numbers
#   for each head, `2 * size` numbers apart, and `gate_stride` numbers from one token to the next.
# prefixes, prefix_counts: 0, or addresses of int64 `[tokens]`: the first line, and the number of lines, that each token
#   attends to before these; the same for all tokens of a run.
# scratch: address of `scratch_size` float32 for each thread.
ATTEND_FIELDS = tuple(
    "next threads num_runs runs parts kv_heads groups size firsts counts nodes bits distance prefixes "
    "prefix_counts queries keys values outputs gates gate_stride scratch scratch_size scale".split()
)
(
    _NEXT, _THREADS, _NUM_RUNS, _RUNS, _PARTS, _KV_HEADS, _GROUPS, _SIZE, _FIRSTS, _COUNTS, _NODES, _BITS, _DISTANCE,
    _PREFIXES, _PREFIX_COUNTS, _QUERIES, _KEYS, _VALUES, _OUTPUTS, _GATES, _GATE_STRIDE, _SCRATCH,
    _SCRATCH_SIZE, _SCALE,
) = range(24)  # fmt: skip
MOST_TOKENS = 8  # tokens of a run
_BLOCK = 32  # lines that are read for all heads and tokens before the next ones are
_LINE = 16  # numbers, which fill a line of the processor's cache in float32

_ITEMSIZE = 4  # bytes of float32
_UNITS = np.float32(2.0**33)  # of sums of exponentials; sums stay below 2 ** 63
_LEAST = np.float32(-87.0)  # exponentials of lower numbers would be subnormal
_PER_LOG2, _HALF = np.float32(1.4426950408889634), np.float32(0.5)
_LOG2_HIGH, _LOG2_LOW = np.float32(0.693359375), np.float32(-2.12194440e-4)
# Coefficients of the exponential up to half the logarithm of 2, by Cephes (Moshier).
_P0, _P1, _P2 = np.float32(1.9875691500e-4), np.float32(1.3981999507e-3), np.float32(8.3334519073e-3)
_P3, _P4, _P5 = np.float32(4.1665795894e-2), np.float32(1.6666665459e-1), np.float32(5.0000001201e-1)
_ZERO, _ONE, _UNLIKELY = np.float32(0.0), np.float32(1.0), np.float32(-np.inf)


def scratch_size(heads: int, size: int, most_lines: int) -> int:
    """Return the float32 numbers that a thread needs for a token with `heads` heads: results, queries, and scores."""
    return heads * (2 * size + most_lines)


@inner
def attend(a, numbers, kind):
    """
    Take the next run, or part of one, until no runs are left. Queries, keys, values and outputs are of the type that
    `kind` points to; `numbers` are the fields as float64.
    """
    queries, keys, values = like(kind, a[_QUERIES]), like(kind, a[_KEYS]), like(kind, a[_VALUES])
    outputs, scale = like(kind, a[_OUTPUTS]), np.float32(numbers[_SCALE])
    scratch = a[_SCRATCH] + take(ahead(a, _THREADS)) * a[_SCRATCH_SIZE] * _ITEMSIZE
    number = take(ahead(a, _NEXT))
    while number < a[_NUM_RUNS] * a[_PARTS]:
        run, begin, end = _share(a, number)
        first, last = int64_at(a[_RUNS])[run], int64_at(a[_RUNS])[run + 1]
        num, some = (last - first) * a[_GROUPS], (end - begin) * a[_SIZE]
        own = like(kind, scratch + num * some * _ITEMSIZE)
        for head in range(begin, end):
            _gather(a, first, last, head, queries, ahead(own, (head - begin) * num * a[_SIZE]))
        results, scores = float32_at(scratch), float32_at(scratch + 2 * num * some * _ITEMSIZE)
        _attend(a, first, last, begin, end, scale, own, keys, values, results, scores)
        for head in range(begin, end):
            _scatter(a, first, last, head, ahead(results, (head - begin) * num * a[_SIZE]), outputs)
        number = take(ahead(a, _NEXT))


@inner
def _share(a, number):
    """
    Return a run, and the range of its key/value heads that work item `number` covers. Runs with the same heads follow
    one another, so that lines of a prefix that several rows share are still in the cache.
    """
    part, parts = number // a[_NUM_RUNS], a[_PARTS]
    return number % a[_NUM_RUNS], a[_KV_HEADS] * part // parts, a[_KV_HEADS] * (part + 1) // parts


@inner
def _gather(a, first, last, head, queries, own):
    """Copy the queries of a key/value head of some tokens next to one another."""
    length = a[_GROUPS] * a[_SIZE]
    for token in range(first, last):
        place = (token * a[_KV_HEADS] + head) * length
        for index in range(length):
            own[(token - first) * length + index] = queries[place + index]


@inner
def _scatter(a, first, last, head, results, outputs):
    length = a[_GROUPS] * a[_SIZE]
    for token in range(first, last):
        place = (token * a[_KV_HEADS] + head) * length
        for index in range(length):
            put(outputs, place + index, results[(token - first) * length + index])
        if a[_GATES]:
            for group in range(a[_GROUPS]):
                _gate(a, token, head * a[_GROUPS] + group, ahead(outputs, place + group * a[_SIZE]))


@inner
def _gate(a, token, head, outputs):
    gates = ahead(like(outputs, a[_GATES]), token * a[_GATE_STRIDE] + 2 * head * a[_SIZE])
    for index in range(a[_SIZE]):
        put(outputs, index, get(outputs, index) * rounded(outputs, _ONE / (_ONE + exponential(-get(gates, index)))))


@inner
def _attend(a, first_token, last_token, begin, end, scale, queries, keys, values, results, scores):
    """
    Compute attention of all queries of some tokens that belong to key/value heads from `begin` to `end`. Queries and
    results are `[heads, tokens, groups, size]`, scores have as many rows, one number for each line of the run.
    """
    firsts, counts, groups, size = int64_at(a[_FIRSTS]), int64_at(a[_COUNTS]), a[_GROUPS], a[_SIZE]
    first, last = firsts[first_token], firsts[first_token] + counts[first_token]
    low, high = first, last  # lines that all tokens attend to; none, where their windows have none in common
    for token in range(first_token + 1, last_token):
        first, last = min(first, firsts[token]), max(last, firsts[token] + counts[token])
        low, high = max(low, firsts[token]), min(high, firsts[token] + counts[token])
    high = max(low, high)
    prefix, shared = 0, 0
    if a[_PREFIXES]:
        prefix, shared = int64_at(a[_PREFIXES])[first_token], int64_at(a[_PREFIX_COUNTS])[first_token]
    num, some = shared + last - first, (last_token - first_token) * groups  # of lines, and of a head's queries
    for block in range(prefix, prefix + shared, _BLOCK):
        stop = min(block + _BLOCK, prefix + shared)
        for head in range(end - begin):
            own = ahead(scores, head * some * num - prefix)
            _score(
                a, begin + head, some, block, stop, prefix + shared, num, ahead(queries, head * some * size), keys, own
            )
    for block in range(first, last, _BLOCK):
        # Also for lines that some tokens do not attend to, whose scores are not read.
        stop = min(block + _BLOCK, last)
        for head in range(end - begin):
            own = ahead(scores, head * some * num + shared - first)
            _score(a, begin + head, some, block, stop, last, num, ahead(queries, head * some * size), keys, own)
    for row in range((end - begin) * some):
        token = first_token + row % some // groups
        # Rows with a prefix attend to all of their lines, so that these follow those of the prefix.
        own = ahead(scores, row * num + firsts[token] - first)
        _hide(a, token, ahead(own, shared), _UNLIKELY)
        share = _ONE / _exponentiate(own, shared + counts[token], scale)
        for line in range(shared + counts[token]):
            own[line] *= share
        _hide(a, token, ahead(own, shared), _ZERO)
    for index in range((end - begin) * some * size):
        results[index] = _ZERO
    for block in range(prefix, prefix + shared, _BLOCK):
        stop = min(block + _BLOCK, prefix + shared)
        for head in range(end - begin):
            own, sums = ahead(scores, head * some * num - prefix), ahead(results, head * some * size)
            _add(a, begin + head, some, block, stop, num, own, values, sums)
    for block in range(first, last, _BLOCK):
        stop = min(block + _BLOCK, last)
        for head in range(end - begin):
            own, sums = ahead(scores, head * some * num + shared - first), ahead(results, head * some * size)
            # Each token's lines in their order: those before the ones that all attend to, these, and those after them.
            _add_own(a, first_token, last_token, begin + head, block, min(stop, low), num, own, values, sums)
            _add(a, begin + head, some, max(block, low), min(stop, high), num, own, values, sums)
            _add_own(a, first_token, last_token, begin + head, max(block, high), stop, num, own, values, sums)


@inner
def _add_own(a, first_token, last_token, head, low, high, num, weights, values, sums):
    """Add up the values of lines from `low` to `high`, each token those that it attends to, as `_add` does."""
    for token in range(first_token, last_token):
        begin, row = int64_at(a[_FIRSTS])[token], (token - first_token) * a[_GROUPS]
        own, found = ahead(weights, row * num), ahead(sums, row * a[_SIZE])
        _add(
            a,
            head,
            a[_GROUPS],
            max(low, begin),
            min(high, begin + int64_at(a[_COUNTS])[token]),
            num,
            own,
            values,
            found,
        )


@inner
def _hide(a, token, scores, value):
    """Put `value` in place of the scores of nodes that the token does not attend to."""
    if a[_NODES]:
        line, place = int64_at(a[_NODES])[token] - int64_at(a[_FIRSTS])[token], token
        end = int64_at(a[_COUNTS])[token] - line
        for first in range(0, end, 64):
            bits = int64_at(a[_BITS])[place]
            for node in range(max(-line, first), min(first + 64, end) if bits != -1 else 0):
                if not bits >> (node - first) & 1:
                    scores[line + node] = value
            place += a[_DISTANCE]


@inner
def _score(a, head, num_queries, low, high, last, num, queries, keys, scores):
    """Compute the scores of neighbouring queries of a key/value head, for lines from `low` to `high`."""
    size, stride = a[_SIZE], a[_KV_HEADS] * a[_SIZE]
    line, none = low, float32_at(0)
    most_rows, most_queries = largest_tile(num_queries)
    while line < high:
        rows = most_rows
        if high - low < rows:
            rows = 1
        elif line + rows > high:  # lines before these are computed once more, with the same results
            line = high - rows
        key, query = ahead(keys, line * stride + head * size), 0
        if line + _BLOCK + rows <= last:
            for row in range(_BLOCK, _BLOCK + rows):
                for index in range(0, size, _LINE):
                    prefetch(ahead(key, row * stride), index)
        while query < num_queries:
            some = tile_width(num_queries - query, most_queries) if rows > 1 else 1
            own, found = ahead(queries, query * size), ahead(scores, query * num + line)
            tile(rows, some, key, own, none, found, size, stride, num, 0, 0)
            query += some
        line += rows


@inner
def _add(a, head, num_queries, low, high, num, weights, values, sums):
    """Add up the values of lines from `low` to `high` with the weights of neighbouring queries of a key/value head."""
    size, stride, query = a[_SIZE], a[_KV_HEADS] * a[_SIZE], 0
    while query < num_queries and low < high:
        some = tile_width(num_queries - query, MOST_SUMS)
        own, rows = ahead(weights, query * num + low), ahead(values, low * stride + head * size)
        add_weighted(some, own, num, rows, stride, high - low, size, ahead(sums, query * size))
        query += some


@inner
def _exponentiate(scores, num, scale):
    """Replace scores by exponentials of their scaled distance to the highest; return the exponentials' sum."""
    highest = largest(scores, num)
    total = np.int64(0)  # in fixed point, so that no order of addition changes the sum
    for line in range(num):
        found = _exponential((scores[line] - highest) * scale)
        scores[line] = found
        total += np.int64(found * _UNITS)  # any number for a NaN, whose own weight stays NaN
    return np.float32(total) / _UNITS


@inner
def _exponential(x):
    """Return the exponential of a float32 of at most 0, exact but for the last bit or two; NaN stays NaN."""
    if x < _LEAST:
        x = _LEAST
    power = np.int32(x * _PER_LOG2 - _HALF)
    whole = np.float32(power)
    x = x - whole * _LOG2_HIGH - whole * _LOG2_LOW
    sum_of_powers = ((((_P0 * x + _P1) * x + _P2) * x + _P3) * x + _P4) * x + _P5
    return (sum_of_powers * x * x + x + _ONE) * power_of_two(power)
