"""Layouts of few sizes: layouts that differ little get the same shape, and so the same recording."""

from dataclasses import replace
from functools import cache

import torch

from ..layout.spans import Spans
from ..layout.step_layout import PaddedPart, Rounding, StepLayout

_LEAST_COLUMNS, _LEAST_PAIRS = 64, 16
MOST_TOKENS = 512  # in larger steps, launches take no longer than the work that they launch


def rounded(number: int) -> int:
    """Return the next of 0, 1, 2, 3, 4, 6, 8, 12, 16, 20, 24, 28, 32, 40, ...: beyond 16, a quarter more at most."""
    if number < 4:
        return number
    step = (1 << (number - 1).bit_length()) // (8 if number > 16 else 4)
    return -(-number // step) * step


def rounded_columns(number: int) -> int:
    """Return the rounded number of columns that attention reads, where a few more make no difference."""
    return max(rounded(number), _LEAST_COLUMNS)


ROUNDING = Rounding(rounded, rounded_columns)


def pad(layout: StepLayout) -> None:
    """
    Pad a layout that was built with `rounded` sizes, and has not been sent, to a rounded number of tokens. Added tokens
    repeat the last one in every respect: they compute the same values, and write these to the same line.
    """
    num = layout.tokens.shape[1]
    size = rounded(num)
    if layout.spans is not None:
        layout.spans = _padded_spans(layout.spans, num, size)
    layout.tokens, layout.positions, layout.lines = (
        extended(tensor, size) for tensor in (layout.tokens, layout.positions, layout.lines)
    )
    if layout.kept is not None:
        layout.kept = extended(layout.kept, rounded(len(layout.kept)))
    layout.is_padded = True
    if size > num:
        _add_tokens(layout.parts[-1], size)
    for part in layout.parts:
        if part.tree_pairs is not None and part.nodes is not None:
            pairs = part.tree_pairs  # drafters may change later ones, so the first is repeated
            part.tree_pairs = torch.cat([pairs, pairs[:1].expand(_rounded_pairs(len(pairs)) - len(pairs))])
            part.nodes = extended(part.nodes, _rounded_pairs(part.nodes.shape[1]))


def extended(tensor: torch.Tensor, size: int) -> torch.Tensor:
    """Repeat the last entry: `[..., n]` to `[..., size]`."""
    more = size - tensor.shape[-1]
    return torch.cat([tensor, tensor[..., -1:].expand(*tensor.shape[:-1], more)], dim=-1) if more else tensor


def _add_tokens(part: PaddedPart, end: int) -> None:
    """Add tokens up to `end` to the last part; they attend as its last token does."""
    num_padded = part.num_rows * part.width
    gather = torch.arange(num_padded) if part.gather is None else part.gather
    scatter = torch.arange(num_padded) if part.scatter is None else part.scatter
    part.tokens = slice(part.tokens.start, end)
    part.gather, part.scatter = gather, extended(scatter, end - part.tokens.start)


def _padded_spans(spans: Spans, num_tokens: int, size: int) -> Spans:
    """
    Pad spans: every further token is a row of its own, with the keys of the last row; further rows have no queries.
    Where each row has one query there are none: flash attention then takes grouped heads for queries, one row a query.
    """
    starts, *others = spans.rows
    num_rows = size if spans.most_queries == 1 else rounded(len(starts) - 1) + _most_added(size)
    begins = torch.arange(num_tokens, size + 1)
    starts = extended(torch.cat([starts[:-1], begins]), num_rows + 1)
    # The last entry is an end, or unused: further rows repeat the one before it.
    own = [torch.cat([extended(item[:-1], num_rows), item[-1:]]) for item in others]
    return replace(
        spans,
        rows=torch.stack([starts, *own]),
        trees=None if spans.trees is None else extended(spans.trees, size),
        most_queries=rounded(spans.most_queries),
        most_keys=rounded_columns(spans.most_keys),
    )


def _rounded_pairs(number: int) -> int:
    return max(rounded(number), _LEAST_PAIRS)


@cache
def _most_added(size: int) -> int:
    """Return the largest number of tokens that padding to `size` adds."""
    return size - 1 - max([number for number in range(size) if rounded(number) == number])
