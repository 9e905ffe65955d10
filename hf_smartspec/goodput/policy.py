"""The contract of length policies: how many draft nodes each row may have drafted, and which of them are verified."""

from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from ..drafts.price import FREE, LevelPrice
from ..drafts.tree import DraftTree
from .cost import StepSeconds
from .draft_cost import DraftCost
from .stage import Stage

__all__ = ["DraftCost", "FixedLength", "LengthPolicy", "NoSpeculation", "Stage", "StepRows", "StepSeconds"]


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
        stages (list of `Stage`): The sources that may be asked, in this order. Where none are given, one that costs
            nothing.
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
    stages: list[Stage] = field(default_factory=list)
    padded_context: int | None = None

    def __post_init__(self) -> None:
        self.stages = self.stages or [Stage(DraftCost(), self.caps)]

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
        if not (self.num_prefill_tokens or self.prefill_context or self.prefill_pairs):
            return self
        return replace(self, num_prefill_tokens=0, prefill_context=0, prefill_pairs=0)


class LengthPolicy(ABC):
    """
    Decides how much to speculate, anew at every step: before each stage drafts (drafting may cost), and in the end,
    when the probabilities of all drafted nodes are known. A last call tells what came of it.

    Steps may have no rows at all (prompts only).

    Attributes:
        learns_late (`bool`): Whether `observe` may come when the next step's drafts have been selected: on an
            accelerator, the host then learns while the device runs that step's forward. Not unless a policy says so.
    """

    learns_late = False

    @abstractmethod
    def max_nodes(self, rows: StepRows, stage: Stage, trees: Sequence[DraftTree]) -> np.ndarray | list[int]:
        """
        The number of nodes that the stage's source may propose for each row, no more than `stage.caps`; 0 where it is
        not asked. `trees` are what the stages before it have drafted, by row.
        """

    def most_nodes(self, usual: int, most: int) -> int:
        """
        Draft nodes per row and step at most, of a source whose drafts usually have `usual` and never more than `most`:
        by default `usual`. `most` is for policies that set prices, by which sources know where to end.
        """
        return usual

    def price(self, rows: StepRows, stage: Stage) -> LevelPrice | None:
        """
        What a further level of an autoregressive draft, or a node of any other, must be worth in this step, for sources
        that go by it. None, the default, has drafts of their usual size.
        """
        return None

    def calibrated(self, rows: StepRows, stage: Stage, trees: Sequence[DraftTree]) -> list[DraftTree]:
        """What the stage has drafted, with probabilities that can be relied on; by default, the source's own."""
        return list(trees)

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
            rows (`StepRows`): The one that `max_nodes` got; by now its stages say what they were asked and proposed.
            proposed, verified (sequences of `DraftTree`): What `select` was given, and what was verified in the end.
            accepted (sequence of `int`): Accepted nodes of each row.
            seconds (`StepSeconds`): What the step took.
            tokens (sequence of `np.ndarray`, *optional*): The tokens that each row committed, with which nodes that
                were not verified teach as well. Without them, only chains do.
        """

    def renew(self, source: str, number: int) -> None:  # noqa: B027
        """
        The source of this name has learnt, for the `number`-th time: what its drafts were worth before says little.
        Comes with every request that it drafts for, mostly with the same number.
        """

    def forget(self, request_id: Hashable) -> None:  # noqa: B027
        """The request has ended. Unknown ids are ignored."""


class FixedLength(LengthPolicy):
    """
    The same number of nodes for every row at every step.

    Args:
        num_nodes (`int`): At least 0.
        is_usual (`bool`): Whether that is just the size that drafts of the source usually have. They may then be
            smaller, where the source finds nothing likely; else it is asked for as many as there can be.
    """

    def __init__(self, num_nodes: int, is_usual: bool = False):
        if isinstance(num_nodes, bool) or not isinstance(num_nodes, (int, np.integer)) or num_nodes < 0:
            raise ValueError(f"`num_nodes` must be an integer of at least 0, got {num_nodes!r}.")
        self.num_nodes, self.is_usual = int(num_nodes), is_usual

    def max_nodes(self, rows: StepRows, stage: Stage, trees: Sequence[DraftTree]) -> np.ndarray:
        return stage.limits(self.num_nodes, trees)

    def most_nodes(self, usual: int, most: int) -> int:
        return self.num_nodes

    def price(self, rows: StepRows, stage: Stage) -> LevelPrice | None:
        heeds = stage.cost.heeds_prices and not stage.cost.is_autoregressive
        return FREE if heeds and not self.is_usual else None

    def select(self, rows: StepRows, trees: Sequence[DraftTree]) -> list[DraftTree]:
        most = self.num_nodes
        return [tree if len(tree.tokens) <= most else tree.most_likely(most) for tree in trees]


class NoSpeculation(FixedLength):
    """Plain decoding: nothing is drafted."""

    def __init__(self) -> None:
        super().__init__(0)
