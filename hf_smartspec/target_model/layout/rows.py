"""The rows of a packed forward: the place of a request's keys and values, and its inputs."""

from collections.abc import Collection
from dataclasses import dataclass, field

import numpy as np
import torch

from ...drafts.tree import DraftTree


@dataclass(eq=False)
class CacheRow:
    """
    One request's row of a `SlotCache`: its slot in a slab, the number of committed tokens that it holds, and that of
    the draft nodes after them, which wait for `commit`.

    A token's position is `position_offset` plus the number of tokens before it: images may take fewer positions than
    tokens.

    `ahead` and `least_length` are for rotary embeddings that depend on the length of the text: without speculation,
    they go by the longest row (`rotary.seen_lengths`).

    A row may share a prefix with others: its first `prefix_len` tokens then lie in the slot of its `prefix_row`, and
    its own slot holds the tokens after them (`shared_prefix`).

    Args:
        ahead (`int`): Tokens by which the longest row of the batch is longer than this one.
        least_length (`int`): Least length that embeddings go by: the longest prompt, in whose forward all prompts are
            run.
        renewal (`int`, *optional*): The model recomputes all keys and values when the row outgrows this length (Phi-3,
            on its way from short to long texts).
        in_one_piece (`bool`): Whether the prompt must be run in a single forward.
        line, stride (`int`): The first line of the slot in the cache's memory, and the number of lines of each slot of
            its slab. If not given, the slots are in one slab, and of any length.
        prefix_row (`CacheRow`, *optional*), prefix_len (`int`): A row whose first `prefix_len` tokens are also this
            row's.
        num_sharers (`int`): Rows whose `prefix_row` this one is: it must not be removed, nor cut below what they share.
        shared_read_len (`int`): Length of the prefix that the current step reads for several rows at once.
        marks (collection of `int`): Lengths at which states are kept: a step ends the row's feed there, unless only its
            last token lies beyond.
    """

    slot: int
    length: int = 0
    num_nodes: int = 0
    position_offset: int = 0
    ahead: int = 0
    least_length: int = 0
    renewal: int | None = None
    in_one_piece: bool = False
    line: int = -1
    stride: int = 2**32
    prefix_row: "CacheRow | None" = None
    prefix_len: int = 0
    num_sharers: int = 0
    shared_read_len: int = 0
    marks: Collection[int] = ()

    def __post_init__(self) -> None:
        if self.line < 0:
            self.line = self.slot * self.stride

    @property
    def num_held(self) -> int:
        """Tokens in the row's own slot, draft nodes included."""
        return self.length - self.prefix_len + self.num_nodes

    @property
    def start(self) -> int:
        """Line of the first token that the row's attention reads for this row alone."""
        return self.line + self.shared_read_len - self.prefix_len

    @property
    def own(self) -> int:
        """Committed tokens from `start` on."""
        return self.length - self.shared_read_len

    @property
    def origin(self) -> int:
        """Line at which the slab would begin if all of its rows began as this one does."""
        return self.start - self.slot * self.stride

    def until_mark(self, num_tokens: int) -> int:
        """Return how many of the next tokens to feed at once."""
        ends = [mark - self.length for mark in self.marks]
        return min([end for end in ends if 0 < end < num_tokens - 1], default=num_tokens)

    def is_due(self, length: int) -> bool:
        """Return whether the row's keys and values must be recomputed before those of a text of `length` tokens."""
        return self._renews and self.renewal is not None and length > self.renewal

    def renew(self) -> None:
        """
        Drop all keys and values; the whole text is then computed with the length at which the model recomputes it.
        """
        assert self.renewal is not None, "the model keeps its keys and values"
        self.length, self.num_nodes, self.least_length = 0, 0, self.renewal + self.ahead + 1

    def room(self, length: int) -> int | None:
        """Return the largest depth of a draft after a text of `length` tokens; None if it is unlimited."""
        return self.renewal - length if self._renews and self.renewal is not None else None

    @property
    def _renews(self) -> bool:
        return self.renewal is not None and self.least_length <= self.renewal + self.ahead


@dataclass
class RowInput:
    """
    Input of one row to a packed forward.

    Args:
        row (`CacheRow`): The row that holds the keys and values.
        feed (`np.ndarray` of shape `[f]`): Committed tokens that are not cached yet; draft trees hang on the last one.
            May be empty when only further nodes of a tree follow.
        tree (`DraftTree`): The row's draft.
        first_node (`int`): Nodes before this one were part of an earlier forward and are in the cache; `feed` is empty
            then.
        features (`torch.Tensor` of shape `[f + nodes, D]`, *optional*): Features of these tokens and new nodes, for
            forwards that take them.
        best_only (`bool`): Whether the best tokens of the row's lines are enough, in place of logits.
    """

    row: CacheRow
    feed: np.ndarray
    tree: DraftTree = field(default_factory=DraftTree.empty)
    first_node: int = 0
    features: torch.Tensor | None = None
    best_only: bool = False

    def __post_init__(self) -> None:
        self.num_nodes = len(self.tree.tokens) - self.first_node
        self.num_tokens = len(self.feed) + self.num_nodes

    def split(self, num_tokens: int) -> "tuple[RowInput, RowInput]":
        """Split off the first `num_tokens` of a long feed; return both parts."""
        first = RowInput(self.row, self.feed[:num_tokens], best_only=self.best_only)
        rest = RowInput(self.row, self.feed[num_tokens:], self.tree, self.first_node, best_only=self.best_only)
        if self.features is not None:
            first.features, rest.features = self.features[:num_tokens], self.features[num_tokens:]
        return first, rest
