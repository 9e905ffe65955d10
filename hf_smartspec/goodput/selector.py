"""Length policies: how many draft nodes each row may have drafted, and which of them are verified."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np

from ..tree import DraftTree


class LengthPolicy(ABC):
    """
    Decides how much to speculate, anew at every step, in two calls: before the sources draft (drafting may cost) and
    after, when the probabilities of the drafted nodes are known.
    """

    @abstractmethod
    def max_nodes(self, num_rows: int) -> list[int]:
        """The number of nodes that sources may propose for each of the step's rows."""

    def select(self, trees: Sequence[DraftTree]) -> list[DraftTree]:
        """The part of each row's tree that is verified; closed under parents."""
        return list(trees)


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

    def max_nodes(self, num_rows: int) -> list[int]:
        return [self.num_nodes] * num_rows

    def select(self, trees: Sequence[DraftTree]) -> list[DraftTree]:
        return [tree.most_likely(self.num_nodes) for tree in trees]


class NoSpeculation(FixedLength):
    """Plain decoding: nothing is drafted."""

    def __init__(self) -> None:
        super().__init__(0)
