"""Attention of a few tokens, each over neighbouring lines of keys and values."""

import numpy as np

from ...jit import inner
from ...jit.pointers import ahead, float32_at, int64_at, like, power_of_two, put, take
from .multiply import largest_tile
from .tiles import MOST_SUMS, add_weighted, tile

# Compiled code is called with the address of these numbers, int64 each but for `scale`, which is float64.
# next: incremented by the thread that takes the next share of the work; threads: incremented by each thread.
# num_runs, runs: runs are successive tokens that attend to lines of one row; the address of int64 `[runs + 1]`, the
#   first token of each run and the end of the last one.
# parts: number of parts that the `kv_heads` of a run are divided into.
# size: numbers of a head; groups: query heads that share a key/value head.
# firsts, counts: addresses of int64 `[tokens]`, the first line that each token attends to, and the number of lines
#   from that one to its own.
# nodes, bits: 0, or addresses of int64 `[tokens]`: from line `nodes` on, a token attends only to lines with a set bit.
# queries, outputs, keys, values: addresses of `[tokens, heads, size]` twice and `[lines, kv_heads, size]` twice.
# prefixes, prefix_counts: 0, or addresses of int64 `[tokens]`: the first line, and the number of lines, that each token
#   attends to before these; the same for all tokens of a run.
# scratch: address of `scratch_size` float32 for each thread.
ATTEND_FIELDS = tuple(
    "next threads num_runs runs parts kv_heads groups size firsts counts nodes bits prefixes prefix_counts queries "
    "keys values outputs scratch scratch_size scale".split()
)
(
    _NEXT, _THREADS, _NUM_RUNS, _RUNS, _PARTS, _KV_HEADS, _GROUPS, _SIZE, _FIRSTS, _COUNTS, _NODES, _BITS, _PREFIXES,
    _PREFIX_COUNTS, _QUERIES, _KEYS, _VALUES, _OUTPUTS, _SCRATCH, _SCRATCH_SIZE, _SCALE,
) = range(21)  # fmt: skip
MOST_TOKENS = 8  # tokens of a run
_BLOCK = 32  # lines that are read for all heads and tokens before the next ones are

_LEAST = np.float32(-87.0)  # exponentials of lower numbers would be subnormal
_PER_LOG2, _HALF = np.float32(1.4426950408889634), np.float32(0.5)
_LOG2_HIGH, _LOG2_LOW = np.float32(0.693359375), np.float32(-2.12194440e-4)
# Coefficients of the exponential up to half the logarithm of 2, by Cephes (Moshier).
_P0, _P1, _P2 = np.float32(1.9875691500e-4), np.float32(1.3981999507e-3), np.float32(8.3334519073e-3)
_P3, _P4, _P5 = np.float32(4.1665795894e-2), np.float32(1.6666665459e-1), np.float32(5.0000001201e-1)
_ZERO, _ONE, _UNLIKELY = np.float32(0.0), np.float32(1.0), np.float32(-np.inf)


def scratch_size(heads: int, size: int, most_lines: int) -> int:
    """Return the float32 numbers that a thread needs for a token with `heads` heads: results, and scores."""
    return heads * (size + most_lines)


@inner
def attend(a, numbers, kind):
    """
    Take the next run, or part of one, until no runs are left. Queries, keys, values and outputs are of the type that
    `kind` points to; `numbers` are the fields as float64.
    """
    queries, keys, values = like(kind, a[_QUERIES]), like(kind, a[_KEYS]), like(kind, a[_VALUES])
    outputs, scratch, scale, runs = (
        like(kind, a[_OUTPUTS]),
        _scratch(a),
        np.float32(numbers[_SCALE]),
        int64_at(a[_RUNS]),
    )
    number = take(ahead(a, _NEXT))
    while number < a[_NUM_RUNS] * a[_PARTS]:
        run, begin, end = _share(a, number)
        _attend(a, run, begin, end, scale, queries, keys, values, scratch)
        for token in range(runs[run], runs[run + 1]):
            results, place, num = _results(a, run, token, begin, end)
            for index in range(num):
                put(outputs, place + index, scratch[results + index])
        number = take(ahead(a, _NEXT))


@inner
def _scratch(a):
    return ahead(float32_at(a[_SCRATCH]), take(ahead(a, _THREADS)) * a[_SCRATCH_SIZE])


@inner
def _share(a, number):
    """
    Return a run, and the range of its key/value heads that work item `number` covers. Runs with the same heads follow
    one another, so that lines of a prefix that several rows share are still in the cache.
    """
    part, parts = number // a[_NUM_RUNS], a[_PARTS]
    return number % a[_NUM_RUNS], a[_KV_HEADS] * part // parts, a[_KV_HEADS] * (part + 1) // parts


@inner
def _results(a, run, token, begin, end):
    """
    Return where a token's results for these heads are in the scratch memory, where they go, and how many they are.
    """
    num = (end - begin) * a[_GROUPS] * a[_SIZE]
    place = (token * a[_KV_HEADS] + begin) * a[_GROUPS] * a[_SIZE]
    return (token - int64_at(a[_RUNS])[run]) * num, place, num


@inner
def _attend(a, run, begin, end, scale, queries, keys, values, results):
    """Compute attention of all queries of a run that belong to key/value heads from `begin` to `end`."""
    first_token, last_token = int64_at(a[_RUNS])[run], int64_at(a[_RUNS])[run + 1]
    firsts, counts, groups, size = int64_at(a[_FIRSTS]), int64_at(a[_COUNTS]), a[_GROUPS], a[_SIZE]
    first, last = firsts[first_token], firsts[first_token] + counts[first_token]
    for token in range(first_token + 1, last_token):
        first, last = min(first, firsts[token]), max(last, firsts[token] + counts[token])
    prefix, shared = 0, 0
    if a[_PREFIXES]:
        prefix, shared = int64_at(a[_PREFIXES])[first_token], int64_at(a[_PREFIX_COUNTS])[first_token]
    num, num_queries = shared + last - first, (last_token - first_token) * (end - begin) * groups
    scores = ahead(results, num_queries * size)
    for block in range(prefix, prefix + shared, _BLOCK):
        for token in range(first_token, last_token):
            high, query = min(block + _BLOCK, prefix + shared), (token - first_token) * (end - begin) * groups
            for head in range(begin, end):
                own = ahead(scores, (query + (head - begin) * groups) * num - prefix)
                _score(a, token, head, block, high, prefix + shared, num, queries, keys, own)
    for block in range(first, last, _BLOCK):
        for token in range(first_token, last_token):
            low, high = max(block, firsts[token]), min(block + _BLOCK, firsts[token] + counts[token])
            query = (token - first_token) * (end - begin) * groups
            for head in range(begin, end):
                own = ahead(scores, (query + (head - begin) * groups) * num + shared - first)
                _score(a, token, head, low, high, last, num, queries, keys, own)
    for token in range(first_token, last_token):
        start = (token - first_token) * (end - begin) * groups
        for query in range((end - begin) * groups):
            # Rows with a prefix attend to all of their lines, so that these follow those of the prefix.
            own = ahead(scores, (start + query) * num + firsts[token] - first)
            _hide(a, token, ahead(own, shared), _UNLIKELY)
            total = _exponentiate(own, shared + counts[token], scale)
            share = _ONE / np.float32(total)
            for line in range(shared + counts[token]):
                own[line] *= share
            _hide(a, token, ahead(own, shared), _ZERO)
    for index in range(num_queries * size):
        results[index] = _ZERO
    for block in range(prefix, prefix + shared, _BLOCK):
        for token in range(first_token, last_token):
            high, query = min(block + _BLOCK, prefix + shared), (token - first_token) * (end - begin) * groups
            for head in range(begin, end):
                own = query + (head - begin) * groups
                weights, sums = ahead(scores, own * num - prefix), ahead(results, own * size)
                _add(a, head, block, high, num, weights, values, sums)
    for block in range(first, last, _BLOCK):
        for token in range(first_token, last_token):
            low, high = max(block, firsts[token]), min(block + _BLOCK, firsts[token] + counts[token])
            query = (token - first_token) * (end - begin) * groups
            for head in range(begin, end):
                own = query + (head - begin) * groups
                weights, sums = ahead(scores, own * num + shared - first), ahead(results, own * size)
                _add(a, head, low, high, num, weights, values, sums)


@inner
def _hide(a, token, scores, value):
    """Put `value` in place of the scores of nodes that the token does not attend to."""
    if a[_NODES]:
        line, bits = int64_at(a[_NODES])[token] - int64_at(a[_FIRSTS])[token], int64_at(a[_BITS])[token]
        for node in range(max(-line, 0), int64_at(a[_COUNTS])[token] - line if bits != -1 else 0):
            if not bits >> node & 1:
                scores[line + node] = value


@inner
def _score(a, token, head, low, high, last, num, queries, keys, scores):
    """Compute the scores of one token's queries of a key/value head, for lines from `low` to `high`."""
    groups, size, stride = a[_GROUPS], a[_SIZE], a[_KV_HEADS] * a[_SIZE]
    query = (token * a[_KV_HEADS] + head) * groups * size
    line, none = low, float32_at(0)
    most_rows, most_queries = largest_tile(groups)
    while line < high:
        rows = most_rows if line + most_rows <= high else 1
        key, group = ahead(keys, line * stride + head * size), 0
        distance = stride * _BLOCK if line + _BLOCK + rows <= last else 0
        while group < groups:
            some = min(most_queries, groups - group) if rows > 1 else 1
            own, found = ahead(queries, query + group * size), ahead(scores, group * num + line)
            tile(rows, some, key, own, none, found, size, stride, num, distance, 0, rows)
            group += some
        line += rows


@inner
def _add(a, head, low, high, num, weights, values, sums):
    """Add up the values of lines from `low` to `high` with the weights of the queries of a key/value head."""
    groups, size, stride = a[_GROUPS], a[_SIZE], a[_KV_HEADS] * a[_SIZE]
    group = 0
    while group < groups and low < high:
        some = min(MOST_SUMS, groups - group)
        own, rows = ahead(weights, group * num + low), ahead(values, low * stride + head * size)
        add_weighted(some, own, num, rows, stride, high - low, size, ahead(sums, group * size))
        group += some


@inner
def _exponentiate(scores, num, scale):
    """Replace scores by exponentials of their scaled distance to the highest; return the exponentials' sum."""
    highest = scores[0]
    for line in range(1, num):
        highest = max(highest, scores[line])
    for line in range(num):
        scores[line] = _exponential((scores[line] - highest) * scale)
    total = 0.0
    for line in range(num):
        total += scores[line]
    return total


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
