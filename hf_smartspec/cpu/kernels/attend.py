"""Attention of a few tokens, each over neighbouring lines of keys and values."""

import numpy as np

from ...jit import inner
from ...jit.pointers import ahead, float32_at, get, int64_at, itemsize_of, like, prefetch, put, read, rounded, take
from ...jit.writing import LINE
from .gates import exponential, hyperbolic_tangent
from .multiply import largest_tile, tile_width
from .softmax import UNITS, exponentiate, largest
from .tiles import add_weighted, most_sums, tile, tokens_at

# Compiled code is called with the address of these numbers, int64 each but for `scale` and `cap`, which are float64.
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
# places: 0, or the address of int64 `[tokens]`: the place of each token in queries and gates.
# gates: 0, or the address of the first token's gates, by the sigmoids of which outputs are multiplied: `size` numbers
#   for each head, `2 * size` numbers apart, and `gate_stride` numbers from one token to the next.
# sinks: 0, or the address of `[heads]` numbers of the type of queries: logits without values, which join the scores.
# prefixes, prefix_counts: 0, or addresses of int64 `[tokens]`: the first line, and the number of lines, that each token
#   attends to before these; the same for all tokens of a run.
# turned_size: 0, or the numbers of rotated queries and keys beside others, whose scores are added. Then all heads share
#   `keys`, `[lines, size]`, which are values as well, and rotated keys, `[lines, turned_size]`, at address `values`.
#   Queries, outputs and rotated queries, at `turned`, lie head by head: `[heads, room, ...]`.
# scratch: address of `scratch_size` float32 for each thread.
# cap: 0, or the bound within which scores are squashed after they are scaled.
ATTEND_FIELDS = tuple(
    "next threads num_runs runs parts kv_heads groups size firsts counts nodes bits distance prefixes "
    "prefix_counts queries keys values outputs places gates gate_stride sinks room turned_size turned scratch "
    "scratch_size scale cap".split()
)
(
    _NEXT, _THREADS, _NUM_RUNS, _RUNS, _PARTS, _KV_HEADS, _GROUPS, _SIZE, _FIRSTS, _COUNTS, _NODES, _BITS, _DISTANCE,
    _PREFIXES, _PREFIX_COUNTS, _QUERIES, _KEYS, _VALUES, _OUTPUTS, _PLACES, _GATES, _GATE_STRIDE,
    _SINKS, _ROOM, _TURNED_SIZE, _TURNED, _SCRATCH, _SCRATCH_SIZE, _SCALE, _CAP,
) = range(30)  # fmt: skip
MOST_TOKENS = 8  # tokens of a run
# Lines that are read for all heads and tokens before the next ones are: `_SMALL_BLOCK` where queries are so few that
# reading takes longer than computing.
_BLOCK, _SMALL_BLOCK = 64, 32
MOST_AS_THEY_LIE = 6  # queries of a head, up to which values are multiplied as they lie in memory

_ITEMSIZE = 4  # bytes of float32
_UNITS = np.float32(UNITS)
_ZERO, _ONE, _UNLIKELY = np.float32(0.0), np.float32(1.0), np.float32(-np.inf)


def scratch_size(queries: int, size: int, most_lines: int, turned_size: int = 0) -> int:
    """
    Return the float32 numbers that a thread needs for so many queries: sums of exponentials, highest scores, results,
    the queries themselves, rotated ones, a block of values and of scores of rotated keys, and scores.
    """
    line, more = LINE // _ITEMSIZE, turned_size + _BLOCK if turned_size else 0
    return -(-(queries * (2 + 1 + 2 * size + more + most_lines) + _BLOCK * size) // line) * line


@inner
def attend(a, numbers, kind):
    """
    Take the next run, or part of one, until no runs are left. Queries, keys, values and outputs are of the type that
    `kind` points to; `numbers` are the fields as float64.
    """
    queries, keys, turned = like(kind, a[_QUERIES]), like(kind, a[_KEYS]), like(kind, a[_TURNED])
    values = like(kind, a[_KEYS] if a[_TURNED_SIZE] else a[_VALUES])
    outputs, scale, cap = like(kind, a[_OUTPUTS]), np.float32(numbers[_SCALE]), np.float32(numbers[_CAP])
    scratch = a[_SCRATCH] + take(ahead(a, _THREADS)) * a[_SCRATCH_SIZE] * _ITEMSIZE
    number = take(ahead(a, _NEXT))
    while number < a[_NUM_RUNS] * a[_PARTS]:
        run, begin, end = _share(a, number)
        first, last = int64_at(a[_RUNS])[run], int64_at(a[_RUNS])[run + 1]
        num = (last - first) * a[_GROUPS]  # queries of a head
        place = scratch + 3 * (end - begin) * num * _ITEMSIZE
        results, own = float32_at(place), tokens_at(kind, place + (end - begin) * num * a[_SIZE] * _ITEMSIZE)
        own_turned = tokens_at(kind, place + 2 * (end - begin) * num * a[_SIZE] * _ITEMSIZE)
        for head in range(begin, end):
            row = (head - begin) * num
            _gather(a, first, last, head, a[_SIZE], queries, ahead(own, row * a[_SIZE]))
            if a[_TURNED_SIZE]:
                _gather(a, first, last, head, a[_TURNED_SIZE], turned, ahead(own_turned, row * a[_TURNED_SIZE]))
        _attend(a, (first, last, begin, end), scale, cap, own, keys, values, results, scratch)
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
def _gather(a, first, last, head, size, queries, own):
    """Copy the queries of a key/value head of some tokens next to one another."""
    for token in range(first, last):
        for group in range(a[_GROUPS]):
            place = _query_place(a, _place_of(a, token), head, group) * size
            row = ((token - first) * a[_GROUPS] + group) * size
            for index in range(size):
                put(own, row + index, get(queries, place + index))


@inner
def _query_place(a, token, head, group):
    """Return the place of a query of a key/value head, and of its output, among those of all heads and tokens."""
    if a[_TURNED_SIZE]:
        return (head * a[_GROUPS] + group) * a[_ROOM] + token
    return (token * a[_KV_HEADS] + head) * a[_GROUPS] + group


@inner
def _stride(a):
    """Return the numbers from one line to the next."""
    return a[_SIZE] if a[_TURNED_SIZE] else a[_KV_HEADS] * a[_SIZE]


@inner
def _place_of_head(a, head):
    """Return where a head's numbers begin in a line."""
    return 0 if a[_TURNED_SIZE] else head * a[_SIZE]


@inner
def _place_of(a, token):
    return int64_at(a[_PLACES])[token] if a[_PLACES] else token


@inner
def _scatter(a, first, last, head, results, outputs):
    size = a[_SIZE]
    for token in range(first, last):
        for group in range(a[_GROUPS]):
            own = ahead(outputs, _query_place(a, token, head, group) * size)
            row = ((token - first) * a[_GROUPS] + group) * size
            for index in range(size):
                put(own, index, results[row + index])
            if a[_GATES]:
                _gate(a, token, head * a[_GROUPS] + group, own)


@inner
def _gate(a, token, head, outputs):
    gates = ahead(like(outputs, a[_GATES]), _place_of(a, token) * a[_GATE_STRIDE] + 2 * head * a[_SIZE])
    for index in range(a[_SIZE]):
        put(outputs, index, get(outputs, index) * rounded(outputs, _ONE / (_ONE + exponential(-get(gates, index)))))


@inner
def _attend(a, run, scale, cap, queries, keys, values, results, scratch):
    """
    Compute attention of a run's queries. `run` holds its first token, the end of its last one, its first key/value
    head, and the end of its last one. Queries and results are `[heads, tokens, groups, size]`, scores have as many
    rows, one number for each line of the run.
    """
    first_token, last_token, begin, end = run
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
    rows = (end - begin) * some
    totals, highest = int64_at(scratch), float32_at(scratch + 2 * rows * _ITEMSIZE)
    wide = float32_at(scratch + (3 + 2 * size + a[_TURNED_SIZE]) * rows * _ITEMSIZE)
    block_scores = ahead(wide, _BLOCK * size)  # of rotated keys
    scores = ahead(block_scores, some * _BLOCK) if a[_TURNED_SIZE] else block_scores
    before, own = (prefix, prefix + shared, prefix, prefix + shared), (first, last, low, high)
    before_scores, own_scores = ahead(scores, -prefix), ahead(scores, shared - first)  # entries are those of lines
    # What is read next is prefetched: first all keys, then all values, then the next run's keys.
    first_key, to_values = first * _stride(a), 0 if a[_TURNED_SIZE] else (a[_VALUES] - a[_KEYS]) // itemsize_of(keys)
    first_value = to_values + (prefix * _stride(a) if shared else first_key)
    turned_queries = tokens_at(keys, scratch + (3 + 2 * size) * rows * _ITEMSIZE)
    turned = turned_queries, like(keys, a[_VALUES]), block_scores
    _score_lines(a, run, before, num, queries, keys, before_scores, first_key, turned)
    _score_lines(a, run, own, num, queries, keys, own_scores, first_value, turned)
    if cap > _ZERO:
        for index in range(rows * num):
            scores[index] = cap * hyperbolic_tangent(scores[index] * scale / cap)
        scale = _ONE
    for row in range(rows):
        token = first_token + row % some // groups
        # Rows with a prefix attend to all of their lines, so that these follow those of the prefix.
        seen = ahead(scores, row * num + firsts[token] - first)
        _hide(a, token, ahead(seen, shared))
        totals[row], highest[row] = 0, largest(seen, shared + counts[token])
    for index in range(rows * size):
        results[index] = _ZERO
    _add_lines(a, run, before, num, scale, before_scores, values, wide, highest, totals, results, first_key)
    then = _next_keys(a, first, begin) - to_values
    _add_lines(a, run, own, num, scale, own_scores, values, wide, highest, totals, results, then)
    for row in range(rows):
        share, result = _UNITS / np.float32(totals[row]), ahead(results, row * size)
        if a[_SINKS]:
            sink = get(like(values, a[_SINKS]), (begin + row // some) * groups + row % groups)
            share = _ONE / (_ONE / share + exponential(sink - scale * highest[row]))
        for index in range(size):
            result[index] *= share


@inner
def _next_keys(a, first, begin):
    """
    Return the distance in numbers from line 0 and head `begin` to where the run that is likely to be taken next begins;
    to line `first`, which has been read, where there is none.
    """
    number = read(ahead(a, _NEXT))
    if number < a[_NUM_RUNS] * a[_PARTS]:
        run, head, _ = _share(a, number)
        distance = _place_of_head(a, head) - _place_of_head(a, begin)
        return int64_at(a[_FIRSTS])[int64_at(a[_RUNS])[run]] * _stride(a) + distance
    return first * _stride(a)


@inner
def _score_lines(a, run, lines, num, queries, keys, scores, then, turned):
    """
    Compute the scores of lines for all tokens; a token ignores those of lines that it does not attend to. For `then`,
    see `_to_prefetch`; `turned` are rotated queries, rotated keys, and memory for a block's scores.
    """
    (first_token, last_token, begin, end), (first, last, _, _) = run, lines
    some, step = (last_token - first_token) * a[_GROUPS], _lines_at_once(a, run)
    turned_queries, turned_keys, more = turned
    for block in range(first, last, step):
        stop, distance = min(block + step, last), _to_prefetch(lines, _stride(a), block, step, then)
        for head in range(end - begin):
            own, found = ahead(queries, head * some * a[_SIZE]), ahead(scores, head * some * num)
            size, stride, apart, rows, results, later = a[_SIZE], _stride(a), num, keys, found, distance
            place = _place_of_head(a, begin + head)
            for part in range(2 if a[_TURNED_SIZE] else 1):
                if part:  # rotated keys, which are few: none are prefetched
                    size = stride = a[_TURNED_SIZE]
                    own, rows, place = ahead(turned_queries, head * some * size), turned_keys, 0
                    apart, results, later = _BLOCK, ahead(more, -block), 0
                _score((size, stride, place), some, block, stop, apart, own, rows, results, later)
            if a[_TURNED_SIZE]:
                for query in range(some):
                    for line in range(block, stop):
                        found[query * num + line] += more[query * _BLOCK + line - block]


@inner
def _lines_at_once(a, run):
    """Return the lines that are read for all heads and tokens before the next ones are."""
    return _SMALL_BLOCK if (run[1] - run[0]) * a[_GROUPS] <= MOST_AS_THEY_LIE else _BLOCK


@inner
def _add_lines(a, run, lines, num, scale, scores, values, wide, highest, totals, results, then):
    """
    Replace the scores of lines by exponentials of their scaled distance to the highest, and add these to the queries'
    totals, and the values that they weigh to their results. For `then`, see `_to_prefetch`.
    """
    (first_token, last_token, begin, end), (first, last, low, high) = run, lines
    some, size, step = (last_token - first_token) * a[_GROUPS], a[_SIZE], _lines_at_once(a, run)
    for block in range(first, last, step):
        stop = min(block + step, last)
        part, distance = (block, stop, low, high), _to_prefetch(lines, _stride(a), block, step, then)
        for head in range(end - begin):
            row = head * some
            own = ahead(values, _place_of_head(a, begin + head))
            weights, sums = ahead(scores, row * num), ahead(results, row * size)
            for query in range(some):
                start, count = _seen_part(a, first_token + query // a[_GROUPS], part)
                if count > 0:
                    found = ahead(weights, query * num + start)
                    totals[row + query] += exponentiate(found, count, highest[row + query], scale)
            if some <= MOST_AS_THEY_LIE:
                _add_part(a, run, part, num, weights, own, _stride(a), sums, distance)
            else:
                _widen(a, block, stop, own, wide, distance)
                _add_part(a, run, part, num, weights, ahead(wide, -block * size), size, sums, None)


@inner
def _to_prefetch(lines, stride, block, step, then):
    """
    Return the distance in numbers from a block's lines to those that are prefetched meanwhile: later ones of these
    lines, and after the last one the first of those that begin `then` numbers after line 0. Lines lie `stride` numbers
    apart.
    """
    first, last, _, _ = lines
    num = last - first
    later = num - max((num - step - 1) // step, 0) * step  # so that a block prefetches no lines of both
    return later * stride if block + later < last else then + (later - last) * stride


@inner
def _seen_part(a, token, part):
    """Return the first of the lines, and the number of them, that a token attends to."""
    block, stop, low, high = part
    if low <= block and stop <= high:  # as in a prefix, to all of which all tokens attend
        return block, stop - block
    first = int64_at(a[_FIRSTS])[token]
    start = max(block, first)
    return start, min(stop, first + int64_at(a[_COUNTS])[token]) - start


@inner
def _widen(a, block, stop, values, wide, distance):
    """Copy the values of lines next to one another, as float32; prefetch those `distance` later."""
    size, stride = a[_SIZE], _stride(a)
    for line in range(block, stop):
        own, rows = ahead(wide, (line - block) * size), ahead(values, line * stride)
        for index in range(0, size, LINE // itemsize_of(values)):
            prefetch(rows, distance + index)
        for index in range(size):
            own[index] = get(rows, index)


@inner
def _add_part(a, run, part, num, weights, values, stride, sums, distance):
    """Add up values, each token's lines in their order: first and last those that not all tokens attend to."""
    block, stop, low, high = part
    _add_own(a, run, block, min(stop, low), num, weights, values, stride, sums, distance)
    some = (run[1] - run[0]) * a[_GROUPS]
    _add(a, some, max(block, low), min(stop, high), num, weights, values, stride, sums, distance)
    _add_own(a, run, max(block, high), stop, num, weights, values, stride, sums, distance)


@inner
def _add_own(a, run, low, high, num, weights, values, stride, sums, distance):
    """Add up the values of lines from `low` to `high`, each token those that it attends to."""
    for token in range(run[0], run[1]):
        begin, row = int64_at(a[_FIRSTS])[token], (token - run[0]) * a[_GROUPS]
        own, found, end = ahead(weights, row * num), ahead(sums, row * a[_SIZE]), begin + int64_at(a[_COUNTS])[token]
        _add(a, a[_GROUPS], max(low, begin), min(high, end), num, own, values, stride, found, distance)


@inner
def _hide(a, token, scores):
    """Set the scores of nodes that the token does not attend to to minus infinity, so that they weigh nothing."""
    if a[_NODES]:
        line, place = int64_at(a[_NODES])[token] - int64_at(a[_FIRSTS])[token], token
        end = int64_at(a[_COUNTS])[token] - line
        for first in range(0, end, 64):
            bits = int64_at(a[_BITS])[place]
            for node in range(max(-line, first), min(first + 64, end) if bits != -1 else 0):
                if not bits >> (node - first) & 1:
                    scores[line + node] = _UNLIKELY
            place += a[_DISTANCE]


@inner
def _score(form, num_queries, low, high, num, queries, keys, scores, distance):
    """
    Compute the scores of neighbouring queries of a key/value head, for lines from `low` to `high`; prefetch the keys
    `distance` later. The `form` of keys is their size, the numbers from one line to the next, and where they begin.
    """
    size, stride, place = form
    line, none = low, float32_at(0)
    most_rows, most_queries = largest_tile(num_queries, None)
    while line < high:
        rows = most_rows
        if high - low < rows:
            rows = 1
        elif line + rows > high:  # lines before these are computed once more, with the same results
            line = high - rows
        key, query = ahead(keys, line * stride + place), 0
        for row in range(rows):
            for index in range(0, size, LINE // itemsize_of(keys)):
                prefetch(ahead(key, distance + row * stride), index)
        while query < num_queries:
            some = tile_width(num_queries - query, most_queries) if rows > 1 else 1
            own, found = ahead(queries, query * size), ahead(scores, query * num + line)
            tile(rows, some, key, own, none, found, size, stride, num, None, None, None)
            query += some
        line += rows


@inner
def _add(a, num_queries, low, high, num, weights, values, stride, sums, distance):
    """
    Add up the values of lines from `low` to `high`, which lie `stride` numbers apart, with the weights of neighbouring
    queries; prefetch those `distance` later, unless that is None.
    """
    size, query = a[_SIZE], 0
    while query < num_queries and low < high:
        some = tile_width(num_queries - query, most_sums())
        own = ahead(weights, query * num + low)
        rows, found = ahead(values, low * stride), ahead(sums, query * size)
        add_weighted(some, own, num, rows, stride, high - low, size, found, distance)
        query += some
