"""What an auction keeps in mind from the beginning of a step to its end."""

import operator
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from ..drafts.forest import Forest
from ..drafts.tree import DraftTree
from .policy import StepRows


@dataclass
class Plan:
    """
    What an auction has decided and found out in the current step.

    Args:
        rows (`StepRows`, *optional*): The step's.
        plain_seconds, prefill_seconds (`float`): T without drafts and prompts, and what the prompts add to it.
        asked (`np.ndarray` of shape `[rows]`, bool, *optional*): Which rows the source was asked for.
        plain_tokens (`float`): What the step's time would have yielded plainly.
        has_saved (`bool`): Whether the step's share of time for probes has been put aside.
        first (`Forest`, *optional*): The drafts that were there before a second source was asked.
        promises (`np.ndarray` of shape `[rows]`, float64): What they promise, in tokens.
        asked_again (`np.ndarray` of shape `[rows]`, bool, *optional*): Which rows the second source was asked for.
    """

    rows: StepRows | None = None
    plain_seconds: float = 0.0
    prefill_seconds: float = 0.0
    asked: np.ndarray | None = None
    is_baseline: bool = False
    plain_tokens: float = 0.0
    has_saved: bool = False
    first: Forest | None = None
    promises: np.ndarray = field(default_factory=lambda: np.zeros(0))
    asked_again: np.ndarray | None = None
    forest: Forest | None = None

    def forest_of(self, trees: Sequence[DraftTree]) -> Forest:
        """The forest that was made of these trees for the selection, or a new one."""
        known = self.forest
        if known is not None and len(known.trees) == len(trees) and all(map(operator.is_, known.trees, trees)):
            return known
        return Forest(trees)


def is_again(rows: StepRows) -> np.ndarray:
    """Which rows' drafts hold nodes of the second source, `[rows]` bool."""
    return np.array([len(tree) > 0 for tree in rows.again] or [False] * len(rows), bool)


def known_continuation(tree: DraftTree, num_accepted: int) -> np.ndarray:
    """What a verified chain and the number of accepted nodes tell of the continuation; of other trees, nothing."""
    if not tree.is_chain:
        return np.zeros(0, np.int64)
    return np.append(tree.tokens[:num_accepted], -1)[: len(tree)]
