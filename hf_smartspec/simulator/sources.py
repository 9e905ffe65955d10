"""Sources of simulations: drafts from a table, and sources whose drafts take virtual time."""

from collections.abc import Hashable, Sequence
from functools import partial
from typing import Any

import numpy as np

from ..candidates.base import TreeCandidateGenerator
from ..candidates.combined.staged import StagedCandidates
from ..candidates.committed import Committed
from ..candidates.forwarding import ForwardingSource
from ..candidates.request import SourceRequest
from ..drafts.price import LevelPrice
from ..drafts.tree import DraftTree
from ..goodput.draft_cost import DraftCost
from ..goodput.papers.length import tree_size
from .clock import EventClock
from .requests import LoadRequest


class TableCandidates(TreeCandidateGenerator):
    """
    Source whose drafts come from `ranks` and `probs` of each `LoadRequest`: recorded from a draft model or heads, or
    random. Candidates for a token are assumed to depend on its place only. This holds for heads, and for a draft model
    along the accepted path.

    Args:
        widths (sequence of `int`): Children per node at each depth; (1, 1, 1) is a chain of three.
        is_autoregressive (`bool`): Whether every level costs a forward of the drafter.
        heeds_prices (`bool`): Whether chains end where a further level is not worth its price, as those of a draft
            model do. (A draft model also branches where that pays; a table does not.)
    """

    def __init__(self, widths: Sequence[int], is_autoregressive: bool, heeds_prices: bool = False):
        if not widths or min(widths) < 1:
            raise ValueError(f"`widths` must be numbers of at least 1, got {widths!r}.")
        self.widths, self.is_autoregressive = tuple(widths), is_autoregressive
        self.heeds_prices, self.heeds_shapes = heeds_prices and max(widths) == 1, max(widths) > 1
        self.default_num_nodes, self.width = tree_size(widths), max(widths)
        parents: list[int] = []
        levels: list[int] = []
        previous = [-1]
        for level, width in enumerate(widths):
            first = len(parents)
            parents += [parent for parent in previous for _ in range(width)]
            levels += [level] * (len(parents) - first)
            previous = list(range(first, len(parents)))
        self._parents, self._levels = np.array(parents, np.int64), np.array(levels, np.int64)
        siblings = [np.tile(np.arange(width), np.count_nonzero(self._levels == level) // width)
                    for level, width in enumerate(widths)]  # fmt: skip
        self._siblings = np.concatenate(siblings)
        self._num_seen: dict[Hashable, int] = {}
        self._chains: dict[Hashable, tuple[np.ndarray, np.ndarray]] = {}  # first candidates and their `probs`, by place

    def start(self, request_id: Hashable, prompt: np.ndarray) -> None:
        assert isinstance(request_id, LoadRequest), "ids of simulated requests are LoadRequests"
        ranks, probs = request_id.ranks, request_id.probs
        assert ranks is not None and probs is not None, "requests bring their drafts"
        self._num_seen[request_id] = 0
        # The i-th candidate, if wrong, is the right token plus i + 1, so that siblings differ.
        self._chains[request_id] = request_id.response + (ranks != 0), np.ascontiguousarray(probs[:, 0], np.float32)

    def propose(
        self, request_ids: Sequence[Hashable], max_nodes: Sequence[int], price: LevelPrice | None = None
    ) -> list[DraftTree]:
        widths = self.widths if price is None or not price.widths else price.widths
        make = self._chain if self.width == 1 else partial(self._tree, widths)
        trees = [make(name, limit) for name, limit in zip(request_ids, max_nodes)]
        return trees if price is None or not self.heeds_prices else _worth(trees, price)

    def _chain(self, request_id: Hashable, limit: int) -> DraftTree:
        first, (tokens, probs) = self._num_seen[request_id], self._chains[request_id]
        tokens = tokens[first : first + min(limit, len(self.widths))]
        return DraftTree.of(tokens, self._parents[: len(tokens)], probs[first : first + len(tokens)])

    def _tree(self, widths: Sequence[int], request_id: Any, limit: int) -> DraftTree:
        ranks, probs, first = request_id.ranks, request_id.probs, self._num_seen[request_id]
        levels = self._levels[self._levels < len(ranks) - first]
        siblings, at = self._siblings[: len(levels)], levels + first
        tokens = request_id.response[at] + np.where(ranks[at] == siblings, 0, siblings + 1)
        tree = DraftTree.of(tokens, self._parents[: len(levels)], probs[at, siblings])
        return (tree if widths == self.widths else tree.within(widths)).most_likely(limit)

    def num_right(self, request_id: Hashable) -> int:
        """Return how many tokens of the next draft in a row will be right by the drafter's first candidates."""
        assert isinstance(request_id, LoadRequest) and request_id.ranks is not None
        first = self._num_seen[request_id]
        wrong = np.append(request_id.ranks[first : first + len(self.widths)] != 0, True)
        return int(wrong.argmax())

    def observe(self, request_id: Hashable, tokens: np.ndarray) -> None:
        self._num_seen[request_id] += len(tokens)

    def stop(self, request_id: Hashable) -> None:
        self._num_seen.pop(request_id, None)
        self._chains.pop(request_id, None)


def _worth(chains: Sequence[DraftTree], price: LevelPrice) -> list[DraftTree]:
    """Cut chains, which grow together level by level, where no further level is worth its price."""
    paths = [np.cumprod(np.minimum(chain.probs * price.trust, 1.0)) for chain in chains]
    depths = [min(len(chain), 1) for chain in chains]
    depth, growing = 1, [row for row, chain in enumerate(chains) if len(chain)]
    while growing:
        level = price.beyond(depth)
        growing = [
            row
            for row in growing
            if paths[row][depth - 1] > max(level.node, level.row)
            and depth < len(paths[row])
            and chains[row].probs[depth - 1] > price.confidence
        ]
        if sum(paths[row][depth - 1] - level.row for row in growing) <= level.call:
            break
        depth += 1
        for row in growing:
            depths[row] = depth
    return [
        DraftTree.of(chain.tokens[:num], chain.parents[:num], chain.probs[:num]) for chain, num in zip(chains, depths)
    ]


def _depth(tree: DraftTree) -> int:
    return len(tree) if tree.is_chain else int(tree.depths.max())


class TimedCandidates(ForwardingSource):
    """
    A source whose drafts take virtual time.

    Args:
        source (`TreeCandidateGenerator`): The source that drafts.
        clock (`EventClock`): The clock that every `propose` advances.
        cost (`DraftCost`): Cost of `propose`, in seconds.
    """

    def __init__(self, source: TreeCandidateGenerator, clock: EventClock, cost: DraftCost):
        super().__init__(source)
        self.observes_every_step = True  # oracles read where its requests are
        self.clock, self.cost = clock, cost
        self._num_seen: dict[Hashable, int] = {}

    def begin(self, request: SourceRequest) -> int | None:
        self._num_seen[request.request_id] = 0
        return super().begin(request)

    def propose(
        self, request_ids: Sequence[Hashable], max_nodes: Sequence[int], price: LevelPrice | None = None
    ) -> list[DraftTree]:
        trees = super().propose(request_ids, max_nodes, price)
        levels = [_depth(tree) for tree in trees] if self.is_autoregressive else [1] * len(trees)
        calls, in_calls = self.cost.calls(np.array(levels))
        self.clock.advance(self.cost.per_call * calls + self.cost.per_row * in_calls)
        return trees

    def observe(self, request_id: Hashable, tokens: np.ndarray | Committed) -> None:
        self._num_seen[request_id] += len(Committed.of(tokens).tokens)
        super().observe(request_id, tokens)

    def stop(self, request_id: Hashable) -> None:
        self._num_seen.pop(request_id, None)
        super().stop(request_id)

    def continuation(self, request_id: Hashable) -> np.ndarray:
        """Return the target's next tokens, int64 `[n]`, for the `Oracle`; none for requests that have not started."""
        assert isinstance(request_id, LoadRequest), "ids of simulated requests are LoadRequests"
        num_seen = self._num_seen.get(request_id)
        return request_id.response[num_seen:] if num_seen is not None else request_id.response[:0]


def timed_stages(
    source: TreeCandidateGenerator, clock: EventClock, costs: Sequence[DraftCost]
) -> TimedCandidates | StagedCandidates:
    """Return the source with each of its stages timed, by `costs` in order; further stages take the last cost."""
    stages = [TimedCandidates(stage, clock, costs[min(index, len(costs) - 1)])
              for index, stage in enumerate(source.stages)]  # fmt: skip
    if len(stages) == 1:
        return stages[0]
    threshold, replaces = getattr(source, "threshold", None), getattr(source, "replaces", False)
    return StagedCandidates(stages, threshold, replaces=replaces)
