"""Several sources as one: a common tree of their best continuations (SSSD, section 3.1.3), a model where these fail."""

import heapq
from collections.abc import Callable, Hashable, Sequence
from threading import Lock
from typing import Any, NamedTuple

import numpy as np
from transformers import LogitsProcessorList

from ...drafts.price import LevelPrice
from ...drafts.tree import DraftTree
from ...log import get_logger
from ...validate import is_integer
from ..base import TreeCandidateGenerator
from ..committed import HIDDEN_STATES, Committed
from .calibration import Calibrations, Discount, Draft, ProbabilityCalibrator

logger = get_logger(__name__)

_USUAL_PROBABILITY = 0.05
_MEMORY = 0.05  # least weight of the newest draft in the drafter's running mean accepted length
_MOST_MEANS = 256  # namespaces whose running means are kept


class _Mean(NamedTuple):
    value: float = 1.0
    num_drafts: int = 1

    def with_one(self, value: float) -> "_Mean":
        weight = max(_MEMORY, 1 / (self.num_drafts + 1))
        return _Mean(self.value + weight * (value - self.value), self.num_drafts + 1)


class AcceptedLengths:
    """
    Running means of how many tokens of a drafter's drafts are accepted, apart for every namespace; each begins with one
    token. The 256 namespaces that learnt last are known. Calls may come from several threads.
    """

    def __init__(self) -> None:
        self._means: dict[Hashable, _Mean] = {}  # the latest last
        self._lock = Lock()

    def mean(self, namespace: Hashable = "") -> float:
        with self._lock:
            return self._means.get(namespace, _Mean()).value

    def add(self, num_accepted: int, namespace: Hashable = "") -> None:
        with self._lock:
            self._means[namespace] = self._means.pop(namespace, _Mean()).with_one(num_accepted)
            if len(self._means) > _MOST_MEANS:
                del self._means[next(iter(self._means))]


class FusedCandidates(TreeCandidateGenerator):
    """
    Merges the trees of several sources: one queue over all of them yields the most probable continuation next, and a
    token that two sources propose at one place is one node (SSSD, algorithm 1). What is learnt while decoding is learnt
    per namespace (see `assign`).

    With a `drafter`, SuffixDecoding's hybrid: where the merged tree promises too few tokens (SCORE, the sum of its path
    probabilities, is at most τ), the drafter is asked as well. The paper then verifies the drafter's draft in place of
    the tree's; here its nodes join the tree.

    Args:
        sources (sequence of `TreeCandidateGenerator`): What is merged.
        discounts (sequence, *optional*): Per source, a factor on its nodes' probabilities, below 1 for a source that is
            too sure of itself: one `float`, or a pair, of which the first counts at depth 1 and the second at every
            further depth, or these and a third, which counts the more the shorter the match is that a node was found
            by (see `fused_calibration.Discount`).
        drafter (`TreeCandidateGenerator`, *optional*): A source that costs more, such as a draft model.
        threshold (`float`, *optional*): τ, in tokens. By default the drafter's running mean accepted length.
        calibrator (`ProbabilityCalibrator`, *optional*): Replaces the sources' raw probabilities by observed acceptance
            frequencies, before discounts apply.
        min_probability (`float`, *optional*): Nodes whose path has a lower probability, after all that, are not
            proposed. Where not given, 0.05, and where goodput decides and a node costs less, what it costs.
        num_nodes (`int`, *optional*): Nodes per draft where the caller names no number; by default the largest number
            of its sources.
        vocab_size (`int`, *optional*): A source that proposes other tokens is left out, as one that raises.
        accepted (`AcceptedLengths`, *optional*): The drafter's means, if they are to outlive this object.
    """

    def __init__(
        self,
        sources: Sequence[TreeCandidateGenerator],
        discounts: Sequence[float | Sequence[float]] | None = None,
        drafter: TreeCandidateGenerator | None = None,
        threshold: float | None = None,
        calibrator: ProbabilityCalibrator | None = None,
        min_probability: float | None = None,
        num_nodes: int | None = None,
        vocab_size: int | None = None,
        accepted: AcceptedLengths | None = None,
    ):
        everyone = [*sources, *([] if drafter is None else [drafter])]
        for source in everyone:
            if not isinstance(source, TreeCandidateGenerator):
                raise TypeError(f"Only TreeCandidateGenerators can be fused, got {type(source).__name__}.")
        if not sources:
            raise ValueError("`sources` must name at least one source.")
        if len(set(map(id, everyone))) < len(everyone):
            raise ValueError("A source can be fused once only: it keeps one state per request.")
        if threshold is not None and (drafter is None or threshold < 0):
            raise ValueError(f"`threshold` goes with a `drafter` and must not be negative, got {threshold!r}.")
        if min_probability is not None and not 0 <= min_probability <= 1:
            raise ValueError(f"`min_probability` must lie in [0, 1], got {min_probability!r}.")
        if num_nodes is not None and (not is_integer(num_nodes) or num_nodes < 1):
            raise ValueError(f"`num_nodes` must be a positive integer, got {num_nodes!r}.")
        self.heeds_prices = min_probability is None
        self.min_probability = _USUAL_PROBABILITY if min_probability is None else min_probability
        self.vocab_size = vocab_size
        self.sources, self.drafter = list(sources), drafter
        self.discounts = _discounts([1.0] * len(sources) if discounts is None else discounts, len(sources))
        self.default_num_nodes = num_nodes or max(source.default_num_nodes for source in everyone)
        self._most_nodes = num_nodes or max(source.most_nodes for source in everyone)
        self._everyone, self._fixed_threshold = everyone, threshold
        self.needs = frozenset[str]().union(*[source.needs for source in everyone])
        looking = [source for source in everyone if HIDDEN_STATES in source.needs]
        self.hidden_layers = sorted({layer for source in looking for layer in source.hidden_layers})
        known = [source.name for source in sources]
        names = [f"{name} {known[:index].count(name) + 1}" for index, name in enumerate(known)]
        if drafter is not None:
            names.append(f"{drafter.name}, drafter")
        self._calibrations = None if calibrator is None else Calibrations(calibrator, names)
        self._accepted = accepted or AcceptedLengths()
        self._namespaces: dict[Hashable, Hashable] = {}  # by request, where it is not ""
        self._price: LevelPrice | None = None
        self._drafts: dict[Hashable, list[Draft]] = {}  # each source's latest
        self._modelled: dict[Hashable, DraftTree] = {}  # the drafter's latest
        self._failed: set[tuple[Hashable, int]] = set()  # (request, identity of a source)

    @property
    def name(self) -> str:
        return f"{type(self).__name__}({', '.join(source.name for source in self._everyone)})"

    @property
    def most_nodes(self) -> int:
        return self._most_nodes

    def price(self, price: LevelPrice | None) -> None:
        self._price = price

    def warm_up(self) -> None:
        """Has every source compile what it compiles at its first use."""
        for source in self._everyone:
            if hasattr(source, "warm_up"):
                source.warm_up()

    def threshold(self, namespace: Hashable = "") -> float:
        """τ: the SCORE up to which the drafter speaks, in tokens."""
        if self._fixed_threshold is not None:
            return self._fixed_threshold
        return self._accepted.mean(namespace)

    def assign(
        self,
        request_id: Hashable,
        namespace: Hashable = "",
        reads: Sequence[Hashable] = (),
        references: Sequence[np.ndarray] = (),
    ) -> None:
        self._namespaces[request_id] = namespace
        for source in self._everyone:
            self._tell(source, request_id, source.assign, namespace, reads, references)

    def couple(self, request_id: Hashable, processors: LogitsProcessorList, seed: int | None) -> None:
        for source in self._everyone:
            self._tell(source, request_id, source.couple, processors, seed)

    def start(self, request_id: Hashable, prompt: np.ndarray) -> None:
        for source in self._everyone:
            self._tell(source, request_id, source.start, prompt)

    def _tell(self, source: TreeCandidateGenerator, request_id: Hashable, call: Callable, *args: Any) -> None:
        """One source's failure costs the request that source, not the others."""
        if (request_id, id(source)) in self._failed:
            return
        try:
            call(request_id, *args)
        except Exception as error:
            self._drop(source, [request_id], error)

    def _drop(self, source: TreeCandidateGenerator, request_ids: Sequence[Hashable], error: Exception) -> None:
        self._failed |= {(name, id(source)) for name in request_ids}
        logger.warning_once(f"{type(source).__name__} failed and is left out for its requests: {error!r}")

    def _ask(
        self, source: TreeCandidateGenerator, request_ids: Sequence[Hashable], max_nodes: Sequence[int]
    ) -> list[DraftTree]:
        """A source's trees; empty ones where it has failed."""
        rows = [row for row, name in enumerate(request_ids) if (name, id(source)) not in self._failed]
        trees = [DraftTree.empty()] * len(request_ids)
        names = [request_ids[row] for row in rows]
        try:
            if source is not self.drafter and not source.is_autoregressive:
                # What their word is worth here is told of the list as a whole, after calibration.
                source.price(None if self._price is None else self._price._replace(trust=1.0))
            found = source.propose(names, [max_nodes[row] for row in rows]) if rows else []
            for tree in found:
                tree.check_integrity(self.vocab_size or 2**31)
        except Exception as error:
            self._drop(source, names, error)
            return trees
        for row, tree in zip(rows, found):
            trees[row] = tree
        return trees

    def propose(self, request_ids: Sequence[Hashable], max_nodes: Sequence[int]) -> list[DraftTree]:
        merged = self.propose_merged(request_ids, max_nodes)
        weak = self.promises_little(request_ids, merged)
        limits = [limit if is_weak else 0 for limit, is_weak in zip(max_nodes, weak)]
        again = self.redraft(request_ids, limits)
        return [
            self.with_drafter(name, first, tree, limit) if len(tree) else first
            for name, first, tree, limit in zip(request_ids, merged, again, max_nodes)
        ]

    def propose_merged(self, request_ids: Sequence[Hashable], max_nodes: Sequence[int]) -> list[DraftTree]:
        """What `propose` proposes before the drafter is asked."""
        proposals = [self._ask(source, request_ids, self._limits(source, max_nodes)) for source in self.sources]
        least = self._least_probability()
        merged = []
        for row, (name, limit) in enumerate(zip(request_ids, max_nodes)):
            drafts = self._drafts[name] = [Draft.of(found[row]) for found in proposals]
            if self._calibrations is not None:
                drafts = self._calibrations.calibrated(self._namespaces.get(name, ""), drafts)
            drafts = [draft.discounted(discount) for draft, discount in zip(drafts, self.discounts)]
            merged.append(merge(drafts, limit, least))
        return merged

    def _limits(self, source: TreeCandidateGenerator, max_nodes: Sequence[int]) -> Sequence[int]:
        """Where every level costs a forward, as many nodes as usual: of these, only the drafter is told prices."""
        most = None if self._price is None else source.most_nodes
        if source.is_autoregressive:
            most = source.default_num_nodes
        return max_nodes if most is None else [min(limit, most) for limit in max_nodes]

    def _least_probability(self) -> float:
        """Of the path to a node: where nodes cost little, they are proposed for little."""
        if self._price is None or not self.heeds_prices:
            return self.min_probability
        return min(self._price.least_probability, self.min_probability)

    def promises_little(self, request_ids: Sequence[Hashable], trees: Sequence[DraftTree]) -> list[bool]:
        """For which requests `propose` asks the drafter; for none if there is no drafter."""
        if self.drafter is None:
            return [False] * len(trees)
        limits = [self.threshold(self._namespaces.get(name, "")) for name in request_ids]
        return [float(tree.path_probs.sum()) <= limit for tree, limit in zip(trees, limits)]

    def redraft(self, request_ids: Sequence[Hashable], max_nodes: Sequence[int]) -> list[DraftTree]:
        """The drafter's trees of so many nodes; empty ones for 0, and where it has none or has failed."""
        trees = [DraftTree.empty()] * len(request_ids)
        rows = [row for row, limit in enumerate(max_nodes) if limit > 0]
        if self.drafter is None or not rows:
            return trees
        price = self._price if self._price is not None and self._price.is_of_levels else None
        self._pass_on(price, [request_ids[row] for row in rows])
        usual = self.drafter.default_num_nodes if price is None else self.drafter.most_nodes
        most = [min(max_nodes[row], usual) for row in rows]  # it may cost by the node
        for row, tree in zip(rows, self._ask(self.drafter, [request_ids[row] for row in rows], most)):
            if len(tree):
                trees[row] = self._modelled[request_ids[row]] = tree
        return trees

    def _pass_on(self, price: LevelPrice | None, request_ids: Sequence[Hashable]) -> None:
        """Tells the drafter the price, and what its word has been worth to these requests."""
        assert self.drafter is not None, "asked for where there is one only"
        if price is not None and self._calibrations is not None:
            names = dict.fromkeys(self._namespaces.get(name, "") for name in request_ids)
            trusts = [self._calibrations.trust(name, len(self.sources)) for name in names]
            price = price._replace(trust=sum(trusts) / len(trusts))
        self.drafter.price(price)

    def with_drafter(self, request_id: Hashable, first: DraftTree, again: DraftTree, max_nodes: int) -> DraftTree:
        """The most probable nodes of the request's tree of `propose_merged` and the drafter's."""
        draft = Draft.of(again)
        if self._calibrations is not None:
            namespace = self._namespaces.get(request_id, "")
            (draft,) = self._calibrations.calibrated(namespace, [draft], len(self.sources))
        return merge([Draft.of(first), draft], max_nodes)

    def reuse(self, request_id: Hashable, length: int, earlier: Hashable | None) -> int:
        """What every source that needs hidden states can do without."""
        for source in self._everyone:
            if HIDDEN_STATES in source.needs and (request_id, id(source)) not in self._failed:
                try:
                    length = min(length, source.reuse(request_id, length, earlier))
                except Exception as error:
                    self._drop(source, [request_id], error)
        return length

    def forget(self, request_id: Hashable) -> None:
        for source in self._everyone:
            if HIDDEN_STATES in source.needs:
                source.forget(request_id)

    def observe(self, request_id: Hashable, tokens: np.ndarray | Committed) -> None:
        step = tokens if isinstance(tokens, Committed) else Committed(tokens)
        if len(step.tokens):
            self._learn(request_id, step.tokens)
        for source in self._everyone:
            self._tell(source, request_id, source.show, step)

    def _learn(self, request_id: Hashable, tokens: np.ndarray) -> None:
        """What the latest drafts were worth."""
        drafts, modelled = self._drafts.pop(request_id, None), self._modelled.pop(request_id, None)
        namespace = self._namespaces.get(request_id, "")
        if self._calibrations is not None and drafts is not None:
            if modelled is not None:
                drafts = [*drafts, Draft.of(modelled)]
            self._calibrations.learn(namespace, drafts, tokens)
        if modelled is not None:
            self._accepted.add(_num_accepted(modelled, tokens), namespace)

    def stop(self, request_id: Hashable) -> None:
        self._drafts.pop(request_id, None)
        self._modelled.pop(request_id, None)
        namespace = self._namespaces.pop(request_id, "")
        if self._calibrations is not None:
            self._calibrations.flush(namespace)
        for source in self._everyone:
            self._failed.discard((request_id, id(source)))  # those that have failed hold state too
            self._tell(source, request_id, source.stop)
            self._failed.discard((request_id, id(source)))


def _discounts(discounts: Sequence[float | Sequence[float]], num_sources: int) -> list[Discount]:
    try:
        found = [Discount(*item) if isinstance(item, Sequence) else Discount(item, item) for item in discounts]
        lengths = [len(item) for item in discounts if isinstance(item, Sequence)]
        if len(found) == num_sources and set(lengths) <= {2, 3} and all(0 <= x <= 1 for item in found for x in item):
            return found
    except TypeError:
        pass
    raise ValueError(
        f"`discounts` must give each source a number in [0, 1], or a pair or three of them, got {discounts!r} for "
        f"{num_sources} sources."
    )


def merge(drafts: Sequence[Draft], limit: int, least: float = 0.0) -> DraftTree:
    """
    The `limit` most probable nodes of several drafts as one tree (SSSD, algorithm 1), as far as their paths have a
    probability of at least `least`.
    """
    tokens: list[int] = []
    parents: list[int] = []
    paths: list[float] = []
    lengths: list[int] = []  # of matches
    places: dict[tuple[int, int], int] = {}  # (parent, token) of every node
    # Entries: minus path probability, source, its node, the parent in the merged tree.
    queue: list[tuple[float, int, int, int]] = [
        (-draft.probs[child], source, child, -1)
        for source, draft in enumerate(drafts)
        for child in draft.children.get(-1, ())
    ]
    heapq.heapify(queue)
    while queue:
        negative, source, node, parent = heapq.heappop(queue)
        draft = drafts[source]
        place = parent, draft.tokens[node]
        if place not in places:
            if len(tokens) == limit or -negative < least:
                break
            places[place] = len(tokens)
            tokens.append(place[1])
            parents.append(parent)
            paths.append(-negative)
            lengths.append(draft.match_lengths[node])
        for child in draft.children.get(node, ()):
            heapq.heappush(queue, (negative * draft.probs[child], source, child, places[place]))
    if not tokens:
        return DraftTree.empty()
    ratios = [path / max(paths[parent], 1e-30) if parent >= 0 else path for path, parent in zip(paths, parents)]
    return DraftTree.of(
        np.array(tokens, np.int64),
        np.array(parents, np.int64),
        np.array(ratios, np.float32),
        np.array(lengths, np.int64) if any(lengths) else 0,
    )


def _num_accepted(tree: DraftTree, tokens: np.ndarray) -> int:
    node, count = -1, 0
    for token in tokens.tolist():
        child = tree.child(node, token)
        if child is None:
            break
        node, count = child, count + 1
    return count
