"""Attention of a few queries a row over one memory of keys and values, trees included, in one or two calls."""

import math

import torch

from .support import next_power

MOST_QUERIES = 64  # of a row, on average; for more, flash attention is faster
_MOST_PIECES, _LEAST_KEYS, _FULL = 64, 256, 512  # pieces of a row's keys; keys of a piece; programs that fill a device


def few_query_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    rows: torch.Tensor,
    most_queries: int,
    most_keys: int,
    trees: torch.Tensor | None = None,
    window: int | None = None,
    scaling: float | None = None,
) -> torch.Tensor:
    """
    Compute the attention of packed queries, by default each row causal from its last query and key backwards.

    Args:
        query (`torch.Tensor` of shape `[N, heads, head_dim]`): Queries, in half precision.
        key, value (`torch.Tensor` of shape `[lines, kv_heads, head_dim]`): Memory, of the same strides.
        rows (`torch.Tensor` of shape `[3, R + 1]`, int64): The start of each row's queries, the first line of its keys,
            and their number; a last entry for the end of the queries.
        most_queries, most_keys (`int`): The most of a row, by which the work is divided.
        trees (`torch.Tensor` of shape `[2 + words, N]`, int64, *optional*): For each token the column of its row's
            first node, its position, and bits of the nodes that it attends to, 64 in each word. Tokens of no tree
            attend to all columns up to their own; their first node comes after these.
        window (`int`, *optional*): Length of the sliding window; of trees, at least the number of their nodes.
        scaling (`float`, *optional*): Factor of the scores.

    Returns:
        `torch.Tensor` of shape `[N, heads, head_dim]`.
    """
    from . import kernels  # needs Triton

    (num_tokens, num_heads, dim), kv_heads, num_rows = query.shape, key.shape[1], rows.shape[1]
    groups, dims = num_heads // kv_heads, max(next_power(dim), 16)
    queries = min(max(next_power(most_queries * groups), 16), 64)
    blocks = -(-most_queries * groups // queries)
    programs = (num_rows - 1) * blocks * kv_heads
    num_pieces = max(min(most_keys // _LEAST_KEYS, _FULL // programs, _MOST_PIECES), 1)
    output = torch.empty_like(query, memory_format=torch.contiguous_format)
    pieces, maxima, sums = output, rows, rows  # the latter are not used
    if num_pieces > 1:
        pieces = query.new_empty(num_pieces, num_tokens, num_heads, dim, dtype=torch.float32)
        maxima, sums = query.new_empty(2, num_pieces, num_tokens, num_heads, dtype=torch.float32)
    scale = (dim**-0.5 if scaling is None else scaling) * math.log2(math.e)
    with torch.cuda.device_of(query):  # Triton launches on the current device
        kernels.attend[(num_rows - 1) * blocks, kv_heads, num_pieces](
            query, key, value, pieces, maxima, sums, rows, rows if trees is None else trees, scale,
            query.stride(0), query.stride(1), key.stride(0), key.stride(1),
            blocks, 0 if trees is None else 64 * (len(trees) - 2), window or 0, num_rows, num_tokens, num_heads,
            GROUPS=groups, DIM=dim, QUERIES=queries, KEYS=64 if dims <= 128 else 32, DIMS=dims,
            HAS_TREES=trees is not None, HAS_WORDS=trees is not None and len(trees) > 3,
            HAS_WINDOW=window is not None, IS_SPLIT=num_pieces > 1,
        )  # fmt: skip
        if num_pieces > 1:
            sizes = {"DIM": dim, "DIMS": dims, "PIECES": next_power(num_pieces)}
            num_lines = num_tokens * num_heads
            kernels.merge[(num_lines,)](pieces, maxima, sums, output, num_pieces, num_lines, **sizes)
    return output
