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
        rows (`torch.Tensor` of shape `[3, rows + 1]`): For each row, the start of its queries in the packed step; the
            start of its slot; and its number of keys, those of this step included. The last entries are the ends of the
            first two, and unused for the third.
        trees (`torch.Tensor` of shape `[2 + words, N]`, *optional*): For each token the column of its row's first node,
            its position, and bits of the nodes that it attends to, 64 in each word; for tokens of no tree, the first is
            `NO_TREE`, and they attend to all columns up to their own. None where all drafts are chains.
        most_queries, most_keys (`int`): The largest of these numbers of a row.
        has_few_queries (`bool`): Whether compiled code attends, not flash attention.
    """

    sent: ClassVar = ("rows", "trees")
    rows: torch.Tensor
    trees: torch.Tensor | None
    most_queries: int
    most_keys: int
    has_few_queries: bool

    @cached_property
    def flash_rows(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """`rows` in the form of flash attention's arguments, int32: `[rows + 1]` twice, `[rows]`."""
        queries, keys, used = self.rows.to(torch.int32)
        return queries, keys, used[:-1]

    def set_seen_nodes(self, nodes: torch.Tensor) -> None:
        """
        Let tree nodes attend to other nodes than those that they were laid out with.

        Args:
            nodes (`torch.Tensor` of shape `[most, N]`, int64): For each token, the numbers of these nodes in its tree,
                its own included.
        """
        assert self.trees is not None, "chains see all that comes before"
        bits = torch.ones_like(nodes) << nodes % 64
        words = [torch.where(nodes // 64 == word, bits, 0).sum(dim=0) for word in range(len(self.trees) - 2)]
        self.trees = torch.cat([self.trees[:2], torch.stack(words)])
