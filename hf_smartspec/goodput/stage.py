"""A step's stages: the sources that may draft in it, the cheapest first, and their drafts."""

from collections.abc import Sequence

import numpy as np

from ..drafts.tree import DraftTree
from .draft_cost import DraftCost


class Stage:
    """
    One source of a step, and the rows that it drafts for. Stages draft in order: drafts of a later one are merged into
    the trees of earlier ones.

    Args:
        cost (`DraftCost`): Cost of drafting, and name of the source whose probabilities the drafts hold.
        caps (`np.ndarray` of shape `[rows]`, int): The largest number of nodes of each row's draft; 0 for rows that the
            source does not draft for.
        position (`int`): Place in the order; the stage at 0 drafts first.
        threshold (`float`): τ of SuffixDecoding's hybrid, for policies that do not weigh gains against costs: a later
            source is asked where the trees promise at most so many tokens.
        replaces (`bool`): Whether the hybrid is as published: the threshold counts under every policy, and a draft of
            this stage takes the place of the trees.

    Attributes, which the loop fills in:
        asked (`np.ndarray` of shape `[rows]`, int): Number of nodes that each row's draft was asked for.
        proposed (list of `DraftTree`): The source's draft for each row, with its own probabilities.
        seconds (`float`): Time of drafting; of sources that draft in one call, also that of the host's other work for
            drafts.
        overhead (`float`): Of autoregressive sources, the host's other work for drafts: seconds to decide about the
            step, to select them, and to pass on the outcome of the latest step with drafts.
    """

    def __init__(
        self,
        cost: DraftCost,
        caps: np.ndarray,
        position: int = 0,
        threshold: float = np.inf,
        replaces: bool = False,
    ):
        self.cost, self.caps, self.position, self.threshold = cost, caps, position, threshold
        self.replaces = replaces
        self.asked = np.zeros(len(caps), np.int64)
        self.proposed: list[DraftTree] = [DraftTree.empty()] * len(caps)
        self.seconds = self.overhead = 0.0

    @property
    def name(self) -> str:
        return self.cost.source

    @property
    def is_by_level(self) -> bool:
        """Return whether an auction asks for levels: each costs a call, or adds to earlier drafts."""
        return self.cost.is_autoregressive or self.position > 0

    @property
    def levels(self) -> np.ndarray:
        """Levels drafted for each row, `[rows]` int64; 0 for rows that were not asked for, 1 for empty drafts."""
        asked = (self.asked > 0).astype(np.int64)
        if not self.cost.is_autoregressive:
            return asked
        depths = np.array([tree.depths.max() if len(tree) else 0 for tree in self.proposed], np.int64)
        return np.maximum(depths, asked)

    def limits(self, num_nodes: int | np.ndarray, trees: Sequence[DraftTree]) -> np.ndarray:
        """
        Return `num_nodes` within the caps, `[rows]` int; for later stages, 0 where the trees promise more than the
        threshold (SuffixDecoding's hybrid, appendix B.1).
        """
        limits = np.minimum(self.caps, num_nodes)
        if not self.position:
            return limits
        promises = np.array([float(tree.path_probs.sum()) for tree in trees])
        return np.where(promises <= self.threshold, limits, 0)
