"""Least value of a draft's further levels and nodes."""

from typing import NamedTuple

_LEAST_PROBABILITY = 0.005  # least path probability of a node of drafts from texts, even where nodes cost less


class LevelPrice(NamedTuple):
    """
    Cost of growing a draft by one level, in tokens that the same time would yield otherwise, and how far the drafter's
    probabilities can be trusted. For sources that draft all levels at once, only `node` matters.

    A level's cost depends on the depth of the draft, since forwards become dearer in steps. `deeper` has the costs
    after one level, after two, and so on; its last entry holds for all deeper drafts.

    With `widths`, a policy fixes the shape of drafts, and prices do not count: every node at depth d has the
    `widths[d]` likeliest children, as far as the draft may have nodes, and 1, 1, 1 is a chain (SmartSpec, section 4.3).
    A branch ends after a node of no more than `confidence` (SmartSpec, algorithm 3).
    """

    call: float  # for all rows together
    row: float  # for each row that grows
    node: float  # to have one node verified
    trust: float = 1.0  # observed over drafted probability
    deeper: tuple[tuple[float, float], ...] = ()  # (call, row)
    widths: tuple[int, ...] = ()
    confidence: float = 0.0

    def beyond(self, depth: int) -> "LevelPrice":
        """
        Return the price of the level after `depth` levels. The first level has no price of its own, since the policy
        decides whether to ask for it: `beyond(0)` is `beyond(1)`, the price of the second.
        """
        if not self.deeper:
            return self
        call, row = self.deeper[min(max(depth, 1), len(self.deeper)) - 1]
        return self._replace(call=call, row=row)

    @property
    def least_probability(self) -> float:
        """Path probability, by the source's estimate, from which on a node is worth verifying."""
        return max(self.node / self.trust, _LEAST_PROBABILITY)


FREE = LevelPrice(0.0, 0.0, 0.0)
"""Price of nodes whose number is fixed: ending a draft early, where nodes are unlikely, would save no time."""
