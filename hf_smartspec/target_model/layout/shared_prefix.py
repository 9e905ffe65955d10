"""Prefixes that several rows share: they lie in one row's slot, and a step reads them once for all."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from transformers import PreTrainedConfig

from ..compat import WINDOWS, shared_value
from .rows import CacheRow, RowInput

_LIMITS = (*WINDOWS, "attn_logit_softcapping")


def may_share(config: PreTrainedConfig) -> bool:
    """
    Return whether tokens of such a decoder attend to all tokens before them, with scores as flash attention has them.
    """
    has_limits = any(shared_value(config, name) for name in _LIMITS)
    return not has_limits and set(shared_value(config, "layer_types") or ()) <= {"full_attention"}


@dataclass(eq=False)
class SharedPart:
    """
    Columns that all queries of some rows attend to, besides their own.

    Args:
        first_line, num_columns (`int`): First line of the columns, and their number.
        tokens (`torch.Tensor` of shape `[tokens]`): The rows' tokens in the packed sequence.
    """

    sent: ClassVar = ("tokens",)
    first_line: int
    num_columns: int
    tokens: torch.Tensor

    def view(self, memory: torch.Tensor) -> torch.Tensor:
        """
        Return the part's columns of a layer's keys or values `[lines, heads, head_dim]`: `[1, heads, K, head_dim]`.
        """
        line, head, item = memory.stride()
        shape = 1, memory.shape[1], self.num_columns, memory.shape[2]
        return memory.as_strided(shape, (0, head, line, item), memory.storage_offset() + self.first_line * line)


def set_shared_reads(rows: Sequence[CacheRow]) -> None:
    """
    Set `shared_read_len`, the prefix length that this step reads once for all rows sharing it: of rows with a
    `prefix_row`, the length that they share with it; of a `prefix_row` that runs with them, the most that one shares.
    """
    for row in rows:
        row.shared_read_len = row.prefix_len
    sharers = [row for row in rows if row.prefix_row is not None]
    if sharers:
        running = set(rows)
        for row in sharers:
            owner = row.prefix_row
            if owner in running and owner is not None:
                owner.shared_read_len = max(owner.shared_read_len, row.prefix_len)


def shared_reads_of(rows: Sequence[CacheRow]) -> list[tuple[CacheRow, int]]:
    """Return the prefixes that a step reads for several rows at once: the row that holds each, and its length."""
    return list(dict.fromkeys([(row.prefix_row or row, row.shared_read_len) for row in rows if row.shared_read_len]))


def shared_parts(rows: Sequence[RowInput]) -> list[SharedPart]:
    """Return the shared parts of rows, in their order."""
    counts = [item.num_tokens for item in rows]
    ends = np.cumsum(counts)
    parts = []
    for owner, length in shared_reads_of([item.row for item in rows]):
        members = [
            np.arange(end - count, end)
            for item, count, end in zip(rows, counts, ends)
            if item.row.shared_read_len == length and (item.row.prefix_row or item.row) is owner
        ]
        parts.append(SharedPart(owner.line, length, torch.from_numpy(np.concatenate(members))))
    return parts


def pieces_of(row: CacheRow, first: int, end: int) -> Iterator[tuple[int, int, int]]:
    """Yield where a row's tokens from `first` to `end` lie: ranges of tokens, each with the line of its first."""
    if row.prefix_row is not None and first < row.prefix_len:
        middle = min(end, row.prefix_len)
        yield first, middle, row.prefix_row.line + first
        first = middle
    if first < end:
        yield first, end, row.line + first - row.prefix_len
