"""What a draft's further levels and nodes must be worth."""

from typing import NamedTuple

_LEAST_PROBABILITY = 0.005  # of a path: whatever nodes cost, less likely ones are not worth a look


class LevelPrice(NamedTuple):
    """
    What growing a draft by a further level costs, in tokens that its time would yield otherwise, and what the drafter's
    word is worth. To sources that draft all levels at once, only nodes have a price.
    """

    call: float  # for all rows together
    row: float  # for each row that grows
    node: float  # to have one node verified
    trust: float = 1.0  # by which its probabilities have turned out higher or lower than it says

    @property
    def least_probability(self) -> float:
        """What the source must give a path, so that its last node is worth verifying."""
        return max(self.node / self.trust, _LEAST_PROBABILITY)


FREE = LevelPrice(0.0, 0.0, 0.0)
"""Of nodes whose number is given: drafts that end before it, for lack of promise, would save nothing."""
