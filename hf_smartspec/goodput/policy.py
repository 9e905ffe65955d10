"""The contract of length policies: how many draft nodes each row may have drafted, and which of them are verified."""

from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from ..drafts.price import LevelPrice
from ..drafts.tree import DraftTree
from .cost import DraftCost, StepSeconds

__all__ = ["DraftCost", "FixedLength", "LengthPolicy", "NoSpeculation", "StepRows", "StepSeconds"]


@dataclass
class StepRows:
    """
    What is known of a step before anything is drafted.

    Args:
        request_ids (sequence of `Hashable`): One per row.
        context_lens (`np.ndarray` of shape `[rows]`, int): Committed tokens whose keys and values the step reads.
        caps (`np.ndarray` of shape `[rows]`, int): The most nodes that each row may be given.
        num_prefill_tokens (`int`): Prompt tokens that ride in the same forward.
        prefill_context, prefill_pairs (`int`): Columns that these read, and queries times columns. Attention treats
            long prompts apart: they do not widen the other rows.
        num_waiting (`int`): Requests in the queue.
        draft (`DraftCost`): What drafting costs.
        drafts (list of `DraftCost`): The same by row, where the rows' sources differ.
        draft_seconds (`dict`): What drafting took, by kind of source.
        drafter (`DraftCost`, *optional*): What a second, costlier source costs, where there is one to ask.
        has_drafter (`np.ndarray` of shape `[rows]`, bool, *optional*): Which rows it serves; all where not given.
        sources (list of `str`): Whose probabilities each row's draft holds; those of `draft` where not given.
        again (list of `DraftTree`): What the second source has drafted, by row, where it was asked; these nodes are
            among those of the rows' drafts.
        padded_context (`int`, *optional*): Columns that attention reads of the rows, prompts aside. Where not given, as
            many of every row as the longest has.
    """

    request_ids: Sequence[Hashable]
    context_lens: np.ndarray
    caps: np.ndarray
    num_prefill_tokens: int = 0
    prefill_context: int = 0
    prefill_pairs: int = 0
    num_waiting: int = 0
    draft: DraftCost = field(default_factory=DraftCost)
    drafts: list[DraftCost] = field(default_factory=list)
    draft_seconds: dict[DraftCost, float] = field(default_factory=dict)
    drafter: DraftCost | None = None
    has_drafter: np.ndarray | None = None
    sources: list[str] = field(default_factory=list)
    again: list[DraftTree] = field(default_factory=list)
    padded_context: int | None = None

    def __post_init__(self) -> None:
        self.sources = self.sources or [self.draft.source] * len(self)

    def __len__(self) -> int:
        return len(self.request_ids)

    @property
    def num_context(self) -> int:
        """N_context: attention is padded, if not to the longest of all rows."""
        if self.padded_context is not None:
            return self.padded_context
        return len(self) * int(np.max(self.context_lens, initial=0))

    @property
    def num_batched(self) -> int:
        """N_batched without any draft: one token of every row, and the prompts."""
        return len(self) + self.num_prefill_tokens

    def forward_size(self, num_nodes: Any = 0, width: Any = 1) -> tuple[Any, Any, Any]:
        """
        What `CostModel.seconds` asks for, of the step's forward with draft nodes.

        Args:
            num_nodes, width (`int` or arrays that broadcast): Draft nodes of all rows, and tokens of the row that has
                most: one, and its nodes.

        Returns:
            Context, tokens in the forward, and the width, on average over the context.
        """
        context = self.num_context + self.prefill_context
        if context > self.num_context:
            width = (self.num_context * width + self.prefill_pairs) / context
        return context, self.num_batched + num_nodes, width

    def by_source(self, row: np.ndarray) -> Iterator[tuple[str, Any]]:
        """Every source with the index (`slice` or bool `[n]`) of its nodes; `row` (`[n]` int) is that of each node."""
        names = dict.fromkeys(self.sources)
        for name in names:
            yield name, slice(None) if len(names) == 1 else np.array([other == name for other in self.sources])[row]

    def by_draft(self) -> list["StepRows"]:
        """The step once for every kind of source, each time with nothing to draft for the others' rows."""
        kinds = list(dict.fromkeys(self.drafts))
        if len(kinds) < 2:
            return [self]
        masks = ([other == kind for other in self.drafts] for kind in kinds)
        return [replace(self, caps=np.where(mask, self.caps, 0), draft=kind) for kind, mask in zip(kinds, masks)]

    def first(self, num_rows: int) -> "StepRows":
        """The context of the first rows alone; of what is padded, their share."""
        if num_rows == len(self):
            return self
        ids, lens = self.request_ids[:num_rows], self.context_lens[:num_rows]
        share = float(np.sum(lens)) / max(float(np.sum(self.context_lens)), 1.0)
        padded = None if self.padded_context is None else round(share * self.padded_context)
        return replace(self, request_ids=ids, context_lens=lens, padded_context=padded)

    def without_prefill(self) -> "StepRows":
        """The same step without the prompts that ride in it."""
        return replace(self, num_prefill_tokens=0, prefill_context=0, prefill_pairs=0)


class LengthPolicy(ABC):
    """
    Decides how much to speculate, anew at every step, in two calls: before the sources draft (drafting may cost) and
    after, when the probabilities of the drafted nodes are known. A third call tells what came of it.

    Steps may have no rows at all (prompts only).
    """

    @abstractmethod
    def max_nodes(self, rows: StepRows) -> np.ndarray | list[int]:
        """The number of nodes that sources may propose for each row; no more than its cap."""

    def level_price(self, draft: DraftCost) -> LevelPrice | None:
        """
        What a further level of an autoregressive draft, or a node of any other, must be worth in this step, for sources
        that go by it: `draft`, one of `rows.drafts` or `rows.drafter`. None, the default, has drafts of their usual
        size.
        """
        return None

    def drafter_nodes(self, rows: StepRows, trees: Sequence[DraftTree]) -> np.ndarray | None:
        """
        Where `rows.drafter` is a second source: the number of nodes that it may add to each row's tree; 0 where it is
        not asked. None, the default, leaves it to the source.
        """
        return None

    def select(self, rows: StepRows, trees: Sequence[DraftTree]) -> list[DraftTree]:
        """The part of each row's tree that is verified; closed under parents."""
        return list(trees)

    def observe(  # noqa: B027
        self,
        rows: StepRows,
        proposed: Sequence[DraftTree],
        verified: Sequence[DraftTree],
        accepted: Sequence[int],
        seconds: StepSeconds,
        tokens: Sequence[np.ndarray] | None = None,
    ) -> None:
        """
        Learns from a step; by default, nothing.

        Args:
            rows (`StepRows`): The one that `max_nodes` got; by now with the `sources` of the drafts that were made.
            proposed, verified (sequences of `DraftTree`): What `select` was given, and what was verified in the end.
            accepted (sequence of `int`): Accepted nodes of each row.
            seconds (`StepSeconds`): What the step took.
            tokens (sequence of `np.ndarray`, *optional*): The tokens that each row committed, with which nodes that
                were not verified teach as well. Without them, only chains do.
        """

    def forget(self, request_id: Hashable) -> None:  # noqa: B027
        """The request has ended. Unknown ids are ignored."""


class FixedLength(LengthPolicy):
    """
    The same number of nodes for every row at every step.

    Args:
        num_nodes (`int`): At least 0.
    """

    def __init__(self, num_nodes: int):
        if isinstance(num_nodes, bool) or not isinstance(num_nodes, (int, np.integer)) or num_nodes < 0:
            raise ValueError(f"`num_nodes` must be an integer of at least 0, got {num_nodes!r}.")
        self.num_nodes = int(num_nodes)

    def max_nodes(self, rows: StepRows) -> np.ndarray:
        return np.minimum(rows.caps, self.num_nodes)

    def select(self, rows: StepRows, trees: Sequence[DraftTree]) -> list[DraftTree]:
        return [tree.most_likely(self.num_nodes) for tree in trees]


class NoSpeculation(FixedLength):
    """Plain decoding: nothing is drafted."""

    def __init__(self) -> None:
        super().__init__(0)
