"""Several cheap sources as one: a common tree of their best continuations (SSSD, section 3.1.3)."""

from collections.abc import Hashable, Sequence
from contextlib import suppress

import numpy as np

from ....drafts.merge import Discount, Draft, PathDiscount, merge
from ....drafts.price import LevelPrice
from ....drafts.tree import DraftTree
from ....goodput.estimates.calibrator import Calibrator
from ....validate import check_positive
from ...base import TreeCandidateGenerator, most_nodes_of
from ...committed import Committed
from ...request import SourceRequest
from ..base import CombinedCandidates
from .calibration import Calibrations

_LEAST_PROBABILITY = 0.05  # of a path, where there is no lower price


class FusedCandidates(CombinedCandidates):
    """
    Merges the trees of several sources: one queue over all of them yields the most probable continuation next, and a
    token that two sources propose at one place is one node (SSSD, algorithm 1). What is learnt while decoding is learnt
    per namespace. Costlier sources, such as draft models, are further stages: see `StagedCandidates`.

    Args:
        sources (sequence of `TreeCandidateGenerator`): Sources whose trees are merged.
        discounts (sequence, *optional*): Per source, a factor on its nodes' probabilities, below 1 for a source that is
            too sure of itself: one `float`, or a pair, of which the first counts at depth 1 and the second at every
            further depth, or these and a third, which counts the more the shorter the match is that a node was found
            by (see `drafts.merge.Discount`). A `PathDiscount` in place of these does not compound along the path.
        calibrator (`Calibrator`, *optional*): Replaces the sources' raw probabilities by observed acceptance
            frequencies, before discounts apply.
        min_probability (`float`, *optional*): Nodes whose path has a lower probability, after all that, are not
            proposed. Where not given, 0.05, and where goodput decides and a node costs less, what it costs.
        num_nodes, vocab_size (`int`, *optional*): See `CombinedCandidates`.
    """

    def __init__(
        self,
        sources: Sequence[TreeCandidateGenerator],
        discounts: Sequence[float | Sequence[float] | PathDiscount] | None = None,
        calibrator: Calibrator | None = None,
        min_probability: float | None = None,
        num_nodes: int | None = None,
        vocab_size: int | None = None,
    ):
        super().__init__(sources, num_nodes, vocab_size)
        if min_probability is not None and not 0 <= min_probability <= 1:
            raise ValueError(f"`min_probability` must lie in [0, 1], got {min_probability!r}.")
        if num_nodes is not None:
            check_positive("num_nodes", num_nodes)
        self.heeds_prices = min_probability is None
        self.min_probability = _LEAST_PROBABILITY if min_probability is None else min_probability
        self.discounts = _discounts([1.0] * len(sources) if discounts is None else discounts, len(sources))
        known = [source.name for source in sources]
        names = [f"{name} {known[:index].count(name) + 1}" for index, name in enumerate(known)]
        self._calibrations = None if calibrator is None else Calibrations(calibrator, names)
        self._namespaces: dict[Hashable, Hashable] = {}  # by request
        self._drafts: dict[Hashable, list[Draft]] = {}  # each source's latest

    def begin(self, request: SourceRequest) -> int:
        self._namespaces[request.request_id] = request.namespace
        return super().begin(request)

    def propose(
        self, request_ids: Sequence[Hashable], max_nodes: Sequence[int], price: LevelPrice | None = None
    ) -> list[DraftTree]:
        # `trust` is that of the merged trees, whose probabilities are calibrated.
        own = None if price is None else price._replace(trust=1.0)
        proposals = [
            self._ask(source, request_ids, _limits(source, max_nodes, price), None if source.is_autoregressive else own)
            for source in self.sources
        ]
        least, merged = self._least_probability(price), []
        for row, (name, limit) in enumerate(zip(request_ids, max_nodes)):
            drafts = self._drafts[name] = [Draft.of(found[row]) for found in proposals]
            if self._calibrations is not None:
                drafts = self._calibrations.calibrated(self._namespaces.get(name, ""), drafts)
            drafts = [draft.discounted(discount) for draft, discount in zip(drafts, self.discounts)]
            merged.append(merge(drafts, limit, least))
        return merged

    def _least_probability(self, price: LevelPrice | None) -> float:
        """Return the least probability of the path to a node: where nodes cost little, they are proposed for little."""
        if price is None or not self.heeds_prices:
            return self.min_probability
        return min(price.least_probability, self.min_probability)

    def drafted_by(self, request_id: Hashable, tree: DraftTree) -> list[str]:
        return self._drafters(request_id, tree, self._drafts.get(request_id, ()))

    def observe(self, request_id: Hashable, tokens: np.ndarray | Committed) -> None:
        step = Committed.of(tokens)
        if len(step.tokens):
            drafts = self._drafts.pop(request_id, None)
            if self._calibrations is not None and drafts is not None:
                self._calibrations.learn(self._namespaces.get(request_id, ""), drafts, step.tokens)
        super().observe(request_id, step)

    def stop(self, request_id: Hashable) -> None:
        self._drafts.pop(request_id, None)
        namespace = self._namespaces.pop(request_id, "")
        if self._calibrations is not None:
            self._calibrations.flush(namespace)
        super().stop(request_id)


def _limits(source: TreeCandidateGenerator, max_nodes: Sequence[int], price: LevelPrice | None) -> Sequence[int]:
    """Return the source's node limits: for autoregressive sources, which get no price, at most their default."""
    if source.is_autoregressive:
        most = source.default_num_nodes
    elif price is None:
        return max_nodes
    else:
        most = most_nodes_of(source)
    return [min(limit, most) for limit in max_nodes]


def _discounts(
    discounts: Sequence[float | Sequence[float] | PathDiscount], num_sources: int
) -> list[Discount | PathDiscount]:
    found: list[Discount | PathDiscount] = []
    with suppress(TypeError):
        for item in discounts:
            if isinstance(item, PathDiscount):
                rows = item.factors
                if len(rows) and all(len(row) and all(0 <= factor < np.inf for factor in row) for row in rows):
                    found.append(item)
                continue
            factors = (item, item) if isinstance(item, int | float) else item
            if len(factors) in (2, 3) and all(0 <= factor <= 1 for factor in factors):
                found.append(Discount(*factors))
    if len(found) == len(discounts) == num_sources:
        return found
    raise ValueError(
        "`discounts` must give each source a number in [0, 1], a pair or three of them, or a `PathDiscount` of finite "
        f"factors of at least 0, got {discounts!r} for {num_sources} sources."
    )
