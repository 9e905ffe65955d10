"""The rows of a packed forward: where a request's keys and values lie, and what it brings."""

from dataclasses import dataclass, field

import numpy as np
import torch

from ...drafts.tree import DraftTree


@dataclass(eq=False)
class CacheRow:
    """
    One request's row of a `SlotCache`: the slot of a slab that it lies in, the number of committed tokens it holds, and
    that of the draft nodes behind them, which wait for `commit`.

    A token's position is `position_offset` more than the number of those before it: images may take fewer positions
    than tokens.

    The lengths are for rotary embeddings that depend on that of the text: plain decoding takes the longest row's
    (`rotary.seen_lengths`).

    A row may share its beginning with others: its first `shared` tokens then lie in the slot of its `base`, and its own
    slot holds those behind them (`shared_prefix`).

    Args:
        ahead (`int`): Tokens by which the longest row of the batch is longer than this one.
        least_length (`int`): What all tokens see at least: the longest prompt, in whose forward all prompts are run.
        renewal (`int`, *optional*): The model computes all keys and values anew when the row outgrows this length
            (Phi-3, on its way from short to long texts).
        in_one_piece (`bool`): Its prompt must not be spread over several forwards.
        line, stride (`int`): The first line of the slot in the cache's memory, and the lines of each of its slab's.
            Where not given, the slots are in one slab, and of any length.
        base (`CacheRow`, *optional*), shared (`int`): Whose first tokens are this row's, and how many.
        num_sharers (`int`): Rows whose base this one is: it must not go, nor be cut below what they share.
        lead (`int`): The first tokens, which the step that is laid out reads for several rows at once.
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
    base: "CacheRow | None" = None
    shared: int = 0
    num_sharers: int = 0
    lead: int = 0

    def __post_init__(self) -> None:
        if self.line < 0:
            self.line = self.slot * self.stride

    @property
    def num_held(self) -> int:
        """Tokens in the row's own slot, draft nodes included."""
        return self.length - self.shared + self.num_nodes

    @property
    def start(self) -> int:
        """The line of the first token that the row's attention reads for itself."""
        return self.line + self.lead - self.shared

    @property
    def own(self) -> int:
        """Committed tokens from there on."""
        return self.length - self.lead

    @property
    def origin(self) -> int:
        """Where the slab would begin if all of its rows began as this one does, in lines."""
        return self.start - self.slot * self.stride

    def is_due(self, length: int) -> bool:
        """Whether the row's keys and values must be computed anew before those of a text of so many tokens."""
        return self._renews and self.renewal is not None and length > self.renewal

    def renew(self) -> None:
        """Forgets all keys and values; those of the whole text see the length at which the model does so."""
        assert self.renewal is not None, "nothing is ever computed anew"
        self.length, self.num_nodes, self.least_length = 0, 0, self.renewal + self.ahead + 1

    def room(self, length: int) -> int | None:
        """How deep a draft behind a text of so many tokens may be; None if as deep as it likes."""
        return self.renewal - length if self._renews and self.renewal is not None else None

    @property
    def _renews(self) -> bool:
        return self.renewal is not None and self.least_length <= self.renewal + self.ahead


@dataclass
class RowInput:
    """
    What one row brings to a packed forward.

    Args:
        row (`CacheRow`): Where the row's keys and values lie.
        feed (`np.ndarray` of shape `[f]`): Committed tokens that are not cached yet; draft trees hang on the last one.
            May be empty when only further nodes of a tree follow.
        tree (`DraftTree`): The row's draft.
        first_node (`int`): Nodes before this one were part of an earlier forward and are in the cache; `feed` is empty
            then.
        features (`torch.Tensor` of shape `[f + nodes, D]`, *optional*): What these tokens and new nodes bring beside
            their ids, for forwards that take it.
    """

    row: CacheRow
    feed: np.ndarray
    tree: DraftTree = field(default_factory=DraftTree.empty)
    first_node: int = 0
    features: torch.Tensor | None = None

    def __post_init__(self) -> None:
        self.num_nodes = len(self.tree.tokens) - self.first_node
        self.num_tokens = len(self.feed) + self.num_nodes

    def split(self, num_tokens: int) -> "tuple[RowInput, RowInput]":
        """The first tokens of a long feed, and what is left."""
        first = RowInput(self.row, self.feed[:num_tokens])
        rest = RowInput(self.row, self.feed[num_tokens:], self.tree, self.first_node)
        if self.features is not None:
            first.features, rest.features = self.features[:num_tokens], self.features[num_tokens:]
        return first, rest
