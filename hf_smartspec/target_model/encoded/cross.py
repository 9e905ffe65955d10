"""Cross attention of a packed step: the encoder outputs that each token attends to."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch

from ..layout.row_groups import runs_of
from ..layout.rows import CacheRow
from ..layout.step_layout import PaddedPart


@dataclass(eq=False)
class CrossLayout:
    """
    Layout of a packed step of N tokens for cross attention: each token attends to all outputs for its own row.

    Args:
        parts (list of `PaddedPart`): Parts of the cache of encoder outputs; they gather tokens from the whole step.
        scatter (`torch.Tensor` of shape `[N]`, *optional*): Index of every token among the parts' queries, padding
            included, one part after the other; None where tokens are in that order.
    """

    sent: ClassVar = ("scatter",)
    parts: list[PaddedPart]
    scatter: torch.Tensor | None


def cross_layout(rows: Sequence[tuple[CacheRow, int]], call: int) -> CrossLayout:
    """
    Lay out the cross attention of a step.

    Args:
        rows: For every row of the step, in the order of its tokens, its row in the cache of encoder outputs, and its
        number of tokens.
        call (`int`): Cost of one more call of attention, in columns (`row_groups.call_columns`).
    """
    counts = np.array([num for _, num in rows])
    starts = np.cumsum(counts) - counts
    by_line = sorted(range(len(rows)), key=lambda index: rows[index][0].line)
    ordered = [rows[index][0] for index in by_line]
    runs = runs_of(ordered, [row.length for row in ordered], counts[by_line].tolist(), call)
    parts: list[PaddedPart] = []
    scatter, num_queries = np.empty(int(counts.sum()), np.int64), 0
    for run in runs:
        numbers = by_line[run]
        part, tokens, queries = _part([rows[number][0] for number in numbers], starts[numbers], counts[numbers])
        scatter[tokens] = num_queries + queries
        num_queries += part.num_rows * part.width
        parts.append(part)
    is_in_order = num_queries == len(scatter) and bool((scatter == np.arange(num_queries)).all())
    if is_in_order and len(parts) == 1:
        parts[0].gather = None
    return CrossLayout(parts, None if is_in_order else torch.from_numpy(scatter))


def _part(rows: list[CacheRow], starts: np.ndarray, counts: np.ndarray) -> tuple[PaddedPart, np.ndarray, np.ndarray]:
    """
    Return the part for rows, given in the order of their lines, and the indices of their tokens in the step and among
    the part's queries.
    """
    first, width = rows[0], int(counts.max())
    num_rows, num_columns = rows[-1].slot - first.slot + 1, max([row.length for row in rows])
    slots = np.array([row.slot for row in rows]) - first.slot
    within = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
    tokens, queries = np.repeat(starts, counts) + within, np.repeat(slots * width, counts) + within
    limits = np.ones((num_rows, width), np.int64)  # padding attends to one column: a softmax over none is NaN
    limits[slots] = np.array([row.length for row in rows])[:, None]
    gather = np.zeros(num_rows * width, np.int64)
    gather[queries] = tokens
    part = PaddedPart(
        tokens=slice(None),
        first_line=first.line,
        stride=first.stride,
        num_rows=num_rows,
        width=width,
        num_columns=num_columns,
        limits=torch.from_numpy(limits),
        tree_pairs=None,
        query_positions=None,
        nodes=None,
        gather=torch.from_numpy(gather),
        scatter=None,
        sees_all=int(limits.min()) == num_columns,
    )
    return part, tokens, queries
