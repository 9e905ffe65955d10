"""The rows of a step as attention without masks reads them: offsets into one memory of keys and values."""

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import torch


@dataclass(eq=False)
class Spans:
    """
    Where the keys of every row of a step lie in the memory of a layer, `[lines, heads, head_dim]`.

    Args:
        rows (`torch.Tensor` of shape `[4, rows + 1]`): Where each row's queries begin in the packed step; where its
            slot begins; its number of keys, with those of this step; how many of them, the first ones, all of its
            queries see. Of the first two the last entry is the end, of the others it means nothing.
        bases (`torch.Tensor` of shape `[slots]`): The last of these for every slot of every part; 0 where there is no
            row.
        most_queries, most_keys, most_common (`int`): Of any row.
        extents (list of `int`): For each part, the most keys of a row that only some of its queries see.
        has_trees (`bool`): Whether some draft is more than a chain. Otherwise all is causal.
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
        """`rows` as flash attention takes them, int32: `[rows + 1]` twice, `[rows]` twice."""
        queries, keys, used, common = self.rows.to(torch.int32)
        return queries, keys, used[:-1], common[:-1]
