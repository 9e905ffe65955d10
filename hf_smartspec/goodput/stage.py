"""A step's stages: which sources may draft in it, the cheapest first, and what came of asking them."""

from collections.abc import Sequence

import numpy as np

from ..drafts.tree import DraftTree
from .draft_cost import DraftCost


class Stage:
    """
    One source of a step, and the rows that it drafts for. Stages stand in line: what a later one drafts joins the trees
    that the earlier ones have drafted.

    Args:
        cost (`DraftCost`): What drafting costs, and whose probabilities the drafts hold.
        caps (`np.ndarray` of shape `[rows]`, int): The most nodes that each row's draft may have; 0 for rows that the
            source does not draft for.
        position (`int`): Its place in the line; 0 drafts where there is nothing yet.
        threshold (`float`): τ of SuffixDecoding's hybrid, for policies that do not weigh gains against costs: behind
            the first place, a source is asked where the trees promise at most so many tokens.

    Attributes, which the loop fills in:
        asked (`np.ndarray` of shape `[rows]`, int): The nodes that each row's draft was asked for.
        proposed (list of `DraftTree`): What the source drafted for each row, with its own probabilities.
        seconds (`float`): What that took.
    """

    def __init__(self, cost: DraftCost, caps: np.ndarray, position: int = 0, threshold: float = np.inf):
        self.cost, self.caps, self.position, self.threshold = cost, caps, position, threshold
        self.asked = np.zeros(len(caps), np.int64)
        self.proposed: list[DraftTree] = [DraftTree.empty()] * len(caps)
        self.seconds = 0.0

    @property
    def name(self) -> str:
        return self.cost.source

    @property
    def levels(self) -> np.ndarray:
        """Levels that were drafted for each row, `[rows]` int64; 0 where the source was not asked, silence counts 1."""
        asked = (self.asked > 0).astype(np.int64)
        if not self.cost.is_autoregressive:
            return asked
        depths = np.array([tree.depths.max() if len(tree) else 0 for tree in self.proposed], np.int64)
        return np.maximum(depths, asked)

    def limits(self, num_nodes: int | np.ndarray, trees: Sequence[DraftTree]) -> np.ndarray:
        """
        At most `num_nodes` for each row; behind the first place, only where the trees that are there promise little
        (SuffixDecoding's hybrid, with its appendix B.1 for the threshold).
        """
        limits = np.minimum(self.caps, num_nodes)
        if not self.position:
            return limits
        promises = np.array([float(tree.path_probs.sum()) for tree in trees])
        return np.where(promises <= self.threshold, limits, 0)
