"""The rows of a step for attention without masks: offsets into one memory of keys and values."""

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import torch


@dataclass(eq=False)
class Spans:
    """
    Places of the keys of every row of a step in the memory of a layer, `[lines, heads, head_dim]`.

    Args:
        rows (`torch.Tensor` of shape `[4, rows + 1]`): For each row, the start of its queries in the packed step; the
            start of its slot; its number of keys, those of this step included; and the number of first keys that all of
            its queries attend to. The last entries are the ends of the first two, and unused for the others.
        bases (`torch.Tensor` of shape `[slots]`): The last of these numbers for every slot of every part; 0 where there
            is no row.
        most_queries, most_keys, most_common (`int`): The largest of these numbers of a row.
        extents (list of `int`): For each part, the most keys of a row that only some of its queries attend to.
        has_trees (`bool`): Whether some draft is more than a chain. Otherwise all rows are causal.
    """

    sent: ClassVar = ("rows", "bases")
    rows: torch.Tensor
    bases: torch.Tensor
    most_queries: int
    most_keys: int
    most_common: int
    extents: list[int]
    has_trees: bool

    @cached_property
    def flash_rows(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """`rows` in the form of flash attention's arguments, int32: `[rows + 1]` twice, `[rows]` twice."""
        queries, keys, used, common = self.rows.to(torch.int32)
        return queries, keys, used[:-1], common[:-1]
