"""Triton's kernels. This module can be imported only where Triton is installed, as with torch for CUDA on Linux."""

import triton
import triton.language as tl

# --- Attention -------------------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["blocks", "num_nodes", "num_rows", "num_tokens"])
def attend(
    query, key, value, output, maxima, sums, rows, trees,
    scale, query_token, query_head, line, head, blocks, num_nodes, window, num_rows, num_tokens, num_heads,
    GROUPS: tl.constexpr, DIM: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr, DIMS: tl.constexpr,
    HAS_TREES: tl.constexpr, HAS_WORDS: tl.constexpr, HAS_WINDOW: tl.constexpr, IS_SPLIT: tl.constexpr,
):  # fmt: skip
    """
    Attend from a block of a row's queries, the heads of a group one after the other, to a piece of the row's keys.
    Without pieces `output` `[N, heads, DIM]` is complete; else it is float32 `[pieces, N, heads, DIM]`, weighted by
    `sums` `[pieces, N, heads]` of exp2(score - `maxima`).
    """
    row, block = tl.program_id(0) // blocks, tl.program_id(0) % blocks
    kv_head, piece, num_pieces = tl.program_id(1), tl.program_id(2), tl.num_programs(2)
    own = rows + row
    start = tl.load(own)
    count = (tl.load(own + 1) - start).to(tl.int32)
    first = tl.load(own + num_rows)
    end = tl.load(own + 2 * num_rows).to(tl.int32)
    places = block * QUERIES + tl.arange(0, QUERIES)
    is_query = places < count * GROUPS
    tokens, heads = start + places // GROUPS, kv_head * GROUPS + places % GROUPS
    if HAS_TREES:
        node = tl.minimum(tl.load(trees + tokens, mask=is_query, other=0), 2**30).to(tl.int32)
        word = tl.load(trees + 2 * num_tokens + tokens, mask=is_query, other=0)
        limit = tl.load(trees + num_tokens + tokens, mask=is_query, other=0).to(tl.int32) + 1
    else:
        limit = end - count + 1 + places // GROUPS
    begin = 0
    if HAS_WINDOW:
        begin = tl.maximum(tl.min(tl.where(is_query, limit, end), 0) - window, 0)
    if IS_SPLIT:
        size = tl.cdiv(tl.cdiv(end - begin, num_pieces), KEYS) * KEYS
        begin = begin + piece * size
        end = tl.minimum(begin + size, end)
    if block * QUERIES >= count * GROUPS:  # no query, no key
        end = begin
    dims = tl.arange(0, DIMS)
    is_dim = dims < DIM
    is_used = is_query[:, None] & is_dim[None, :]
    places_in_query = tokens[:, None] * query_token + heads[:, None] * query_head + dims[None, :]
    queries = tl.load(query + places_in_query, mask=is_used, other=0.0)
    maximum = tl.full([QUERIES], float("-inf"), tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    weighted = tl.zeros([QUERIES, DIMS], tl.float32)
    for place in range(begin, end, KEYS):
        columns = place + tl.arange(0, KEYS)
        is_key = columns < end
        lines = (first + columns) * line + kv_head * head
        is_read = is_key[:, None] & is_dim[None, :]
        keys = tl.load(key + lines[:, None] + dims[None, :], mask=is_read, other=0.0)
        scores = tl.dot(queries, tl.trans(keys), input_precision="ieee") * scale
        is_seen = columns[None, :] < limit[:, None]
        if HAS_WINDOW:
            is_seen = is_seen & (columns[None, :] >= limit[:, None] - window)
        if HAS_TREES:
            offsets = columns[None, :] - node[:, None]
            if HAS_WORDS:
                is_node = (offsets >= 0) & (offsets < num_nodes) & is_query[:, None]
                bits = tl.load(trees + (2 + offsets // 64) * num_tokens + tokens[:, None], mask=is_node, other=0)
            else:
                bits = tl.where(offsets < 64, word[:, None], 0)
            is_seen = tl.where(offsets < 0, is_seen, ((bits >> (offsets & 63)) & 1) != 0)
        scores = tl.where(is_seen & is_key[None, :], scores, float("-inf"))
        larger = tl.maximum(maximum, tl.max(scores, 1))
        shift = tl.where(larger == float("-inf"), 0.0, larger)
        weights = tl.exp2(scores - shift[:, None])
        factor = tl.exp2(maximum - shift)
        values = tl.load(value + lines[:, None] + dims[None, :], mask=is_read, other=0.0)
        total = total * factor + tl.sum(weights, 1)
        weighted = weighted * factor[:, None] + tl.dot(weights.to(values.dtype), values, input_precision="ieee")
        maximum = larger
    results = tokens * num_heads + heads
    if IS_SPLIT:
        results = results + piece.to(tl.int64) * num_tokens * num_heads
        tl.store(maxima + results, maximum, mask=is_query)
        tl.store(sums + results, total, mask=is_query)
    else:
        weighted = weighted / tl.where(total == 0.0, 1.0, total)[:, None]
    tl.store(output + results[:, None] * DIM + dims[None, :], weighted.to(output.dtype.element_ty), mask=is_used)


@triton.jit(do_not_specialize=["num_pieces"])
def merge(
    pieces, maxima, sums, output, num_pieces, num_lines,
    DIM: tl.constexpr, DIMS: tl.constexpr, PIECES: tl.constexpr,
):  # fmt: skip
    """Add what `attend` left in pieces of one query and head."""
    line = tl.program_id(0).to(tl.int64)
    numbers, dims = tl.arange(0, PIECES), tl.arange(0, DIMS)
    is_piece = numbers < num_pieces
    lines = numbers.to(tl.int64) * num_lines + line
    maximum = tl.load(maxima + lines, mask=is_piece, other=float("-inf"))
    largest = tl.max(maximum, 0)
    factor = tl.exp2(maximum - tl.where(largest == float("-inf"), 0.0, largest))
    total = tl.sum(factor * tl.load(sums + lines, mask=is_piece, other=0.0), 0)
    is_read = is_piece[:, None] & (dims < DIM)[None, :]
    weighted = tl.load(pieces + lines[:, None] * DIM + dims[None, :], mask=is_read, other=0.0)
    found = tl.sum(weighted * factor[:, None], 0) / tl.where(total == 0.0, 1.0, total)
    tl.store(output + line * DIM + dims, found.to(output.dtype.element_ty), mask=dims < DIM)


# --- Norms, rotary embeddings, gates: rounded wherever torch's operators round, called one by one --------------------


@triton.jit
def norm(x, weight, output, size, eps, IS_SHIFTED: tl.constexpr, SIZE: tl.constexpr):
    """RMS norm of one line."""
    row = tl.program_id(0).to(tl.int64)
    places = tl.arange(0, SIZE)
    is_inside = places < size
    kind = output.dtype.element_ty
    numbers = tl.load(x + row * size + places, mask=is_inside, other=0.0).to(tl.float32)
    factors = tl.load(weight + places, mask=is_inside, other=0.0).to(tl.float32)
    normed = numbers * tl.rsqrt(tl.sum(numbers * numbers, 0) / size + eps)
    found = normed * (factors + 1.0) if IS_SHIFTED else normed.to(kind).to(tl.float32) * factors
    tl.store(output + row * size + places, found.to(kind), mask=is_inside)


@triton.jit
def rotate_and_write(
    rotated, values, cosines, sines, lines, keys_memory, values_memory,
    rotated_token, rotated_head, values_token, values_head, table_token, memory_line, memory_head, half,
    QUERY_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, HALVES: tl.constexpr, DIMS: tl.constexpr,
    HEADS: tl.constexpr, HAS_REST: tl.constexpr,
):  # fmt: skip
    """
    Rotate a token's queries in place, and its keys on their way to the memory; write its values there. `half` is half
    of the dimensions that are rotated.
    """
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    kind = rotated.dtype.element_ty
    target = tl.load(lines + token) * memory_line
    near = tl.arange(0, HALVES)
    is_rotated = (heads < QUERY_HEADS + KV_HEADS)[:, None] & (near < half)[None, :]
    is_table = near < half
    cos_first = tl.load(cosines + token * table_token + near, mask=is_table, other=0.0).to(tl.float32)
    cos_second = tl.load(cosines + token * table_token + half + near, mask=is_table, other=0.0).to(tl.float32)
    sin_first = tl.load(sines + token * table_token + near, mask=is_table, other=0.0).to(tl.float32)
    sin_second = tl.load(sines + token * table_token + half + near, mask=is_table, other=0.0).to(tl.float32)
    place = rotated + token * rotated_token + heads[:, None] * rotated_head + near[None, :]
    first = tl.load(place, mask=is_rotated, other=0.0).to(tl.float32)
    second = tl.load(place + half, mask=is_rotated, other=0.0).to(tl.float32)
    one = (first * cos_first[None, :]).to(kind).to(tl.float32) + (second * sin_first[None, :]).to(kind).to(tl.float32)
    two = (second * cos_second[None, :]).to(kind).to(tl.float32) + (first * sin_second[None, :]).to(kind).to(tl.float32)
    is_query = (heads < QUERY_HEADS)[:, None] & is_rotated
    tl.store(place, one.to(kind), mask=is_query)
    tl.store(place + half, two.to(kind), mask=is_query)
    own = heads - QUERY_HEADS
    is_key = (own >= 0)[:, None] & is_rotated
    memory = keys_memory + target + own[:, None] * memory_head + near[None, :]
    tl.store(memory, one.to(kind), mask=is_key)
    tl.store(memory + half, two.to(kind), mask=is_key)
    dims = tl.arange(0, DIMS)
    if HAS_REST:  # dimensions that are not rotated
        is_rest = ((own >= 0) & (own < KV_HEADS))[:, None] & ((dims >= 2 * half) & (dims < DIM))[None, :]
        rest = tl.load(
            rotated + token * rotated_token + heads[:, None] * rotated_head + dims[None, :], mask=is_rest, other=0.0
        )
        tl.store(keys_memory + target + own[:, None] * memory_head + dims[None, :], rest, mask=is_rest)
    of_values = own - KV_HEADS
    is_value = ((of_values >= 0) & (of_values < KV_HEADS))[:, None] & (dims < DIM)[None, :]
    moved = tl.load(
        values + token * values_token + of_values[:, None] * values_head + dims[None, :], mask=is_value, other=0.0
    )
    tl.store(values_memory + target + of_values[:, None] * memory_head + dims[None, :], moved, mask=is_value)


@triton.jit
def gate(hidden, output, size, SIZE: tl.constexpr):
    """SiLU of the first half of a token's numbers times the second half, a block of them."""
    token = tl.program_id(0).to(tl.int64)
    places = tl.program_id(1) * SIZE + tl.arange(0, SIZE)
    is_inside = places < size
    kind = output.dtype.element_ty
    numbers = tl.load(hidden + token * 2 * size + places, mask=is_inside, other=0.0).to(tl.float32)
    up = tl.load(hidden + token * 2 * size + size + places, mask=is_inside, other=0.0).to(tl.float32)
    activated = (numbers / (1.0 + tl.exp(-numbers))).to(kind).to(tl.float32)
    tl.store(output + token * size + places, (activated * up).to(kind), mask=is_inside)
