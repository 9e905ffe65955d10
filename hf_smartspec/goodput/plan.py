"""State of an auction within one step."""

import operator
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from ..drafts.forest import Forest
from ..drafts.price import LevelPrice
from ..drafts.tree import DraftTree
from .cost import CostModel
from .policy import StepRows
from .stage import Stage


class Before(NamedTuple):
    """Drafts of earlier stages when a stage was asked."""

    forest: Forest
    profits: np.ndarray  # [n] float64: expected tokens of each node, less the cost of verifying it; at least 0
    promises: np.ndarray  # [rows] float64: sums of profits, in tokens

    @property
    def num_nodes(self) -> int:
        """Number of nodes that are worth verifying."""
        return int(np.count_nonzero(self.profits))

    @property
    def width(self) -> int:
        """Number of such nodes in the row that has most."""
        return int(np.bincount(self.forest.row, self.profits > 0).max(initial=0)) if len(self.profits) else 0


@dataclass(eq=False)
class Held:
    """The best levels of some rows, which are not weighed again in the next steps."""

    request_ids: Sequence[Hashable]
    levels: np.ndarray  # [rows] int64
    num_steps: int
    price: LevelPrice | None = None  # of further levels


class Won(NamedTuple):
    """Result of an auction."""

    num_nodes: int
    tokens: float  # expected tokens of the step
    seconds: float  # expected time of its forward, without prompts


@dataclass
class Plan:
    """
    Decisions and estimates of an auction in the current step.

    Args:
        rows (`StepRows`): The step's rows.
        plain_seconds, prefill_seconds (`float`): T without drafts and prompts, and the time that prompts add to it.
        price (`float`): Lambda, the price of time: tokens per second.
        row_seconds (`float`, *optional*): Part of `plain_seconds` that each row adds; computed where it is needed.
        worth (`float` or `np.ndarray` of shape `[rows]`): Worth of a token of each row, 1 in the mean.
        is_baseline (`bool`): Whether the step runs without speculation, so that the cost of such steps stays known.
        pays (`bool`): Whether a source that drafts in one call is asked since its calls pay, and not as a trial.
        plain_tokens (`float`): Tokens that plain decoding would have yielded in the step's time.
        break_even (`float`, *optional*): Where more nodes are verified than pay by the expected costs: seconds of the
            forward, without prompts, above which they do not.
        added_seconds (`float`): Expected time that verifying drafts adds to the forward.
        probing (`Stage`, *optional*): A stage that was asked as a trial, and for nothing else.
        shares (`dict`): Share of each stage that was asked in what the drafts save.
        before (`dict`): Earlier stages' drafts when each stage was asked.
        held (`dict`): The levels of each stage that holds them, or keeps them from this step on.
        drafted (`dict`): Drafts of each stage, with its own probabilities.
        forest (`Forest`, *optional*): The latest forest of the step's trees.
    """

    rows: StepRows
    plain_seconds: float = 0.0
    prefill_seconds: float = 0.0
    price: float = 0.0
    row_seconds: float | None = None
    worth: Any = 1.0
    is_baseline: bool = False
    pays: bool = False
    plain_tokens: float = 0.0
    break_even: float | None = None
    added_seconds: float = 0.0
    probing: Stage | None = None
    shares: dict[Stage, float] = field(default_factory=dict)
    before: dict[Stage, Before] = field(default_factory=dict)
    held: dict[Stage, Held] = field(default_factory=dict)
    drafted: dict[Stage, Forest] = field(default_factory=dict)
    forest: Forest | None = None

    def seconds_of_a_row(self, cost: CostModel) -> float:
        """Return `row_seconds`, of two or more rows."""
        if self.row_seconds is None:
            rows, plain = self.rows, self.plain_seconds
            alone = float(cost.seconds(*rows.without_prefill().first(1).forward_size()))
            self.row_seconds = min(max(plain - alone, 0.0) / (len(rows) - 1), plain / len(rows))
        return self.row_seconds

    def forest_of(self, trees: Sequence[DraftTree]) -> Forest:
        """Return the latest forest if it was made of these trees, else another."""
        if not any([len(tree.tokens) for tree in trees]):
            return _empty_forest(len(trees))
        known = self.forest
        if known is None or len(known.trees) != len(trees) or not all(map(operator.is_, known.trees, trees)):
            self.forest = known = Forest(trees)
        return known


@lru_cache(maxsize=64)
def _empty_forest(num_rows: int) -> Forest:
    return Forest([DraftTree.empty()] * num_rows)


def known_continuation(tree: DraftTree, num_accepted: int) -> np.ndarray:
    """
    Return what a verified chain and its number of accepted nodes show of the continuation: the accepted tokens, and -1
    for the rejected one, int64 `[n]`; none for trees with branches.
    """
    if not tree.is_chain:
        return np.zeros(0, np.int64)
    return np.append(tree.tokens[:num_accepted], -1)[: len(tree)]
