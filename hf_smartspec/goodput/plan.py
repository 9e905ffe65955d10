"""What an auction keeps in mind from the beginning of a step to its end."""

import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from ..drafts.forest import Forest
from ..drafts.tree import DraftTree
from .policy import StepRows
from .stage import Stage


class Before(NamedTuple):
    """What was there when a stage was asked."""

    forest: Forest
    bids: np.ndarray  # [n] float64: what each node is expected to bring, less what verifying it costs; at least 0
    promises: np.ndarray  # [rows] float64: their sums, in tokens

    @property
    def num_nodes(self) -> int:
        """Nodes that are worth verifying."""
        return int(np.count_nonzero(self.bids))

    @property
    def width(self) -> int:
        """Of these, those of the row that has most."""
        return int(np.bincount(self.forest.row, self.bids > 0).max(initial=0)) if len(self.bids) else 0


@dataclass
class Plan:
    """
    What an auction has decided and found out in the current step.

    Args:
        rows (`StepRows`, *optional*): The step's.
        plain_seconds, prefill_seconds (`float`): T without drafts and prompts, and what the prompts add to it.
        node_price (`float`): What verifying a node costs, in tokens.
        is_baseline (`bool`): Whether the step does without speculation, so that what that costs stays known.
        plain_tokens (`float`): What the step's time would have yielded plainly.
        has_saved (`bool`): Whether the step's share of time for probes has been put aside.
        before (`dict`): What was there when each stage was asked.
        drafted (`dict`): What each stage has drafted, with its own probabilities.
    """

    rows: StepRows | None = None
    plain_seconds: float = 0.0
    prefill_seconds: float = 0.0
    node_price: float = 0.0
    is_baseline: bool = False
    plain_tokens: float = 0.0
    has_saved: bool = False
    before: dict[Stage, Before] = field(default_factory=dict)
    drafted: dict[Stage, Forest] = field(default_factory=dict)
    forest: Forest | None = None

    def forest_of(self, trees: Sequence[DraftTree]) -> Forest:
        """The latest forest if it was made of these trees, or a new one."""
        known = self.forest
        if known is None or len(known.trees) != len(trees) or not all(map(operator.is_, known.trees, trees)):
            self.forest = known = Forest(trees)
        return known


def known_continuation(tree: DraftTree, num_accepted: int) -> np.ndarray:
    """What a verified chain and the number of accepted nodes tell of the continuation; of other trees, nothing."""
    if not tree.is_chain:
        return np.zeros(0, np.int64)
    return np.append(tree.tokens[:num_accepted], -1)[: len(tree)]
