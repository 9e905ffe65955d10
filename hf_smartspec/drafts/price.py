"""What a draft's further levels and nodes must be worth."""

from typing import NamedTuple

_LEAST_PROBABILITY = 0.005  # of a path: whatever nodes cost, less likely ones are not worth a look


class LevelPrice(NamedTuple):
    """
    What growing a draft by a further level costs, in tokens that its time would yield otherwise, and what the drafter's
    word is worth. To sources that draft all levels at once, only nodes have a price.

    What a level costs depends on how deep the draft is already: forwards become dearer in steps. `deeper` says it for
    drafts of one level, of two, and so on; the last entry holds for all that are deeper.
    """

    call: float  # for all rows together
    row: float  # for each row that grows
    node: float  # to have one node verified
    trust: float = 1.0  # by which its probabilities have turned out higher or lower than it says
    deeper: tuple[tuple[float, float], ...] = ()  # (call, row)

    def beyond(self, depth: int) -> "LevelPrice":
        """The price of the level behind `depth` levels; of the first level of all, that of the second."""
        if not self.deeper:
            return self
        call, row = self.deeper[min(max(depth, 1), len(self.deeper)) - 1]
        return self._replace(call=call, row=row)

    @property
    def least_probability(self) -> float:
        """What the source must give a path, so that its last node is worth verifying."""
        return max(self.node / self.trust, _LEAST_PROBABILITY)


FREE = LevelPrice(0.0, 0.0, 0.0)
"""Of nodes whose number is given: drafts that end before it, for lack of promise, would save nothing."""
