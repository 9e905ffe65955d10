"""The interface of length policies, which decide how many nodes each row drafts, and which of them are verified."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from ..drafts.price import FREE, LevelPrice
from ..drafts.tree import DraftTree
from .cost import StepSeconds
from .draft_cost import DraftCost
from .stage import Stage

__all__ = [
    "DraftCost",
    "FixedLength",
    "LengthPolicy",
    "NoSpeculation",
    "Stage",
    "StepOutcome",
    "StepRows",
    "StepSeconds",
]


@dataclass
class StepRows:
    """
    A step's rows and sources before drafting.

    Args:
        request_ids (sequence of `Hashable`): One per row.
        context_lens (`np.ndarray` of shape `[rows]`, int): Committed tokens whose keys and values the step reads.
        caps (`np.ndarray` of shape `[rows]`, int): The largest number of nodes of each row, before the policy
            decides.
        num_prefill_tokens (`int`): Prompt tokens in the same forward.
        prefill_context, prefill_pairs (`int`): Columns that these tokens attend to, and their queries times columns.
            Attention runs long prompts apart: they do not widen the other rows.
        num_waiting (`int`): Requests in an engine's queue, for users' policies: those of this package ignore it.
        stages (list of `Stage`): The sources that may be asked, in this order. By default, one that costs no time.
        padded_context (`int`, *optional*): Columns that attention reads for the rows, without prompts. By default, as
            many for every row as for the longest.
        num_remaining (`np.ndarray` of shape `[rows]`, int, *optional*): Tokens that each row still generates at most,
            where all rows are waited for together: one call of `generate` returns when its last row has ended.
        num_left (`np.ndarray` of shape `[rows]`, int, *optional*): Tokens that each row still generates at most, waited
            for or not.
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
    num_remaining: np.ndarray | None = None
    num_left: np.ndarray | None = None
    shapes: tuple[Any, Sequence[tuple[int, ...]]] | None = field(default=None, init=False)  # of a `ShapedDrafts`

    def __post_init__(self) -> None:
        self.stages = self.stages or [Stage(DraftCost(), self.caps)]

    def __len__(self) -> int:
        return len(self.request_ids)

    @property
    def end_together(self) -> bool:
        """Return whether several rows are waited for together (`num_remaining`)."""
        return self.num_remaining is not None and len(self) > 1

    @property
    def num_context(self) -> int:
        """N_context, the columns that attention reads, padding included."""
        if self.padded_context is not None:
            return self.padded_context
        return len(self) * int(np.max(self.context_lens, initial=0))

    @property
    def num_batched(self) -> int:
        """N_batched without drafts: one token of every row, and the prompts' tokens."""
        return len(self) + self.num_prefill_tokens

    def forward_size(self, num_nodes: Any = 0, width: Any = 1) -> tuple[Any, Any, Any]:
        """
        Return the arguments of `CostModel.seconds` for the step's forward with draft nodes.

        Args:
            num_nodes, width (`int` or arrays that broadcast): Draft nodes of all rows, and tokens of the widest row:
                one, and its nodes.

        Returns:
            Context, tokens in the forward, and the mean width over the context.
        """
        context = self.num_context + self.prefill_context
        if context > self.num_context:
            width = (self.num_context * width + self.prefill_pairs) / context
        return context, self.num_batched + num_nodes, width

    def first(self, num_rows: int) -> "StepRows":
        """Return the first rows alone, with their share of the padded context."""
        if num_rows == len(self):
            return self
        ids, lens = self.request_ids[:num_rows], self.context_lens[:num_rows]
        share = float(np.sum(lens)) / max(float(np.sum(self.context_lens)), 1.0)
        padded = None if self.padded_context is None else round(share * self.padded_context)
        caps, remaining = self.caps[:num_rows], None if self.num_remaining is None else self.num_remaining[:num_rows]
        return replace(
            self, request_ids=ids, context_lens=lens, caps=caps, padded_context=padded, num_remaining=remaining,
            num_left=None if self.num_left is None else self.num_left[:num_rows],
        )  # fmt: skip

    def without_prefill(self) -> "StepRows":
        """Return the step without its prompts."""
        if not (self.num_prefill_tokens or self.prefill_context or self.prefill_pairs):
            return self
        return replace(self, num_prefill_tokens=0, prefill_context=0, prefill_pairs=0)


class StepOutcome(NamedTuple):
    """
    Outcome of a step, which a policy learns from.

    Args:
        rows (`StepRows`): The object passed to `max_nodes`; its stages now hold how many nodes they were asked for and
            their proposals.
        proposed, verified (sequences of `DraftTree`): Trees passed to `select`, and trees that were verified.
        accepted (sequence of `int`): Number of accepted nodes of each row.
        seconds (`StepSeconds`): Time of the step.
        tokens (sequence of `np.ndarray`, *optional*): Tokens that each row committed, by which also nodes that were
            not verified can be judged. Without them, only chains can.
    """

    rows: StepRows
    proposed: Sequence[DraftTree]
    verified: Sequence[DraftTree]
    accepted: Sequence[int]
    seconds: StepSeconds
    tokens: Sequence[np.ndarray] | None = None

    @property
    def sizes(self) -> list[int]:
        """Number of verified nodes of each row."""
        return [len(tree) for tree in self.verified]

    @property
    def num_tokens(self) -> int:
        """Tokens of all rows: accepted nodes, and one more of each row."""
        return len(self.rows) + sum(self.accepted)

    @property
    def forward_size(self) -> tuple[Any, Any, Any]:
        """`StepRows.forward_size` of the step's forward."""
        sizes = self.sizes
        return self.rows.forward_size(sum(sizes), 1 + max(sizes, default=0))


class LengthPolicy(ABC):
    """
    Base class of policies that decide at every step how much to speculate: before each stage drafts (`max_nodes`), and
    after drafting, when the probabilities of all nodes are known (`select`). `observe` then passes the step's outcome.

    Steps may have no rows (prompts only).

    Attributes:
        learns_late (`bool`): Whether `observe` may be called after the next step's drafts have been selected: on an
            accelerator, the host then learns while the device runs that step's forward. False by default.
        chooses_batches (`bool`): Whether an engine asks `num_to_run` how many waiting requests may begin. False by
            default: all begin for which there is room.
    """

    learns_late = False
    chooses_batches = False

    @abstractmethod
    def max_nodes(self, rows: StepRows, stage: Stage, trees: Sequence[DraftTree]) -> np.ndarray | list[int]:
        """
        Return the number of nodes that the stage's source may propose for each row, at most `stage.caps`; 0 for rows
        that it is not asked for. `trees` are the drafts of earlier stages, one per row.
        """

    def rests(self, request_ids: Sequence[Hashable]) -> bool:
        """
        Return whether a step of these rows, without prompts, is to have no drafts, so that only `rested` is called for
        it. False by default.
        """
        return False

    def asks_first(self, request_ids: Sequence[Hashable]) -> bool:
        """
        Return whether a step of these rows, without prompts, begins with the first source, if that drafts in one call:
        it is asked for as much as the rows' caps allow, at the price of the latest step. Where it proposes nothing,
        only `rested` is called for the step. Else the step goes on as ever, with the proposal in place of another call.
        False by default.
        """
        return False

    def rested(self, num_rows: int, seconds: StepSeconds) -> None:  # noqa: B027
        """Count a step without drafts that was not decided about, of so many rows and seconds; a no-op by default."""

    def most_nodes(self, usual: int, most: int) -> int:
        """
        Return the largest number of draft nodes per row and step for a source whose drafts have `usual` nodes by
        default and never more than `most`: by default `usual`. Policies that set prices return `most`, since sources
        end drafts by these.
        """
        return usual

    def price(self, rows: StepRows, stage: Stage) -> LevelPrice | None:
        """
        Return the least worth of a further level of an autoregressive draft, or of a further node of any other, for
        sources that heed prices. None, the default, gives drafts of their usual size.
        """
        return None

    def calibrated(self, rows: StepRows, stage: Stage, trees: Sequence[DraftTree]) -> list[DraftTree]:
        """Return the stage's drafts with corrected probabilities; by default, the source's own."""
        return list(trees)

    def select(self, rows: StepRows, trees: Sequence[DraftTree]) -> list[DraftTree]:
        """Return the part of each row's tree that is verified; it must be closed under parents."""
        return list(trees)

    def num_to_run(self, queue: StepRows, least: int, has_slots: Callable[[int, int], bool]) -> int:
        """
        Return how many requests of an engine run in the next step, out of a queue that begins with those that run now.

        Args:
            queue (`StepRows`): Running and waiting requests, in this order, without prompts.
            least (`int`): The number of those that run now; they go on in any case.
            has_slots (`Callable`): Returns whether memory has room for the first so many requests, with drafts of so
                many nodes each.
        """
        return len(queue)

    def observe(self, outcome: StepOutcome) -> None:  # noqa: B027
        """Learn from a step; a no-op by default."""

    def renew(self, source: str, number: int) -> None:  # noqa: B027
        """
        Reset estimates of a source whose weights have changed for the `number`-th time. Called for every request that
        the source drafts for, mostly with the same number.
        """

    def forget(self, request_id: Hashable) -> None:  # noqa: B027
        """Delete the state of a request that has ended. Unknown ids are ignored."""


class FixedLength(LengthPolicy):
    """
    The same number of nodes for every row at every step.

    Args:
        num_nodes (`int`): Draft nodes per row, at least 0.
        is_usual (`bool`): Whether `num_nodes` is the source's default size. Drafts may then be smaller, if the source
            finds few likely tokens; otherwise it is asked for as many as possible.
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
    """Plain decoding: no source is asked for drafts."""

    def __init__(self) -> None:
        super().__init__(0)

    def rests(self, request_ids: Sequence[Hashable]) -> bool:
        return True
