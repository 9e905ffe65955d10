"""Beginnings that several rows share: they lie in one row's slot, and a step reads them once for all."""

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
    """Whether tokens of such a decoder see all that is before them, and scores are what they are in flash attention."""
    has_limits = any(shared_value(config, name) for name in _LIMITS)
    return not has_limits and set(shared_value(config, "layer_types") or ()) <= {"full_attention"}


@dataclass(eq=False)
class SharedPart:
    """
    Columns that all queries of some rows see, whatever else they see.

    Args:
        first_line, num_columns (`int`): Where they lie.
        tokens (`torch.Tensor` of shape `[tokens]`): The rows' tokens in the packed sequence.
    """

    sent: ClassVar = ("tokens",)
    first_line: int
    num_columns: int
    tokens: torch.Tensor

    def view(self, memory: torch.Tensor) -> torch.Tensor:
        """What the part reads of a layer's keys or values `[lines, heads, head_dim]`: `[1, heads, K, head_dim]`."""
        line, head, item = memory.stride()
        shape = 1, memory.shape[1], self.num_columns, memory.shape[2]
        return memory.as_strided(shape, (0, head, line, item), memory.storage_offset() + self.first_line * line)


def find_leads(rows: Sequence[CacheRow]) -> None:
    """
    Says to the rows of a step what is read for them together: to those with a base what they share with it, and to a
    base that runs with them the most that one of them shares.
    """
    for row in rows:
        row.lead = row.shared
    sharers = [row for row in rows if row.base is not None]
    if sharers:
        running = set(rows)
        for row in sharers:
            base = row.base
            if base in running and base is not None:
                base.lead = max(base.lead, row.shared)


def leads_of(rows: Sequence[CacheRow]) -> list[tuple[CacheRow, int]]:
    """What a step reads for several rows at once: first tokens of which row, and how many."""
    return list(dict.fromkeys([(row.base or row, row.lead) for row in rows if row.lead]))


def shared_parts(rows: Sequence[RowInput], counts: np.ndarray) -> list[SharedPart]:
    """Of rows with so many tokens each (`[rows]`), in the order of these."""
    ends = np.cumsum(counts)
    parts = []
    for base, length in leads_of([item.row for item in rows]):
        members = [
            np.arange(end - count, end)
            for item, count, end in zip(rows, counts, ends)
            if item.row.lead == length and (item.row.base or item.row) is base
        ]
        parts.append(SharedPart(base.line, length, torch.from_numpy(np.concatenate(members))))
    return parts


def pieces_of(row: CacheRow, first: int, end: int) -> Iterator[tuple[int, int, int]]:
    """Where a row's tokens from `first` to `end` lie: ranges of them, and the line of the first of each."""
    if row.base is not None and first < row.shared:
        middle = min(end, row.shared)
        yield first, middle, row.base.line + first
        first = middle
    if first < end:
        yield first, end, row.line + first - row.shared
