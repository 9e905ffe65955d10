"""What the loop asks of candidate sources, and what happens when they fail."""

import time
from collections.abc import Callable, Hashable
from typing import Any

import numpy as np

from ..candidates.base import TreeCandidateGenerator
from ..candidates.committed import Committed
from ..drafts.price import LevelPrice
from ..drafts.tree import DraftTree
from ..goodput.cost import DraftCost
from ..goodput.prefill_gate import PrefillGate
from ..log import get_logger
from .request import Request

logger = get_logger(__name__)

PriceOf = Callable[[DraftCost], LevelPrice | None]


def forget(source: TreeCandidateGenerator, request_id: Hashable) -> None:
    """Tells a source that the keys and values of a request that has ended are gone, whatever it does then."""
    try:
        source.forget(request_id)
    except Exception as error:
        logger.warning_once(f"{type(source).__name__} failed to forget a request that has ended: {error!r}")


class GuestSources:
    """
    Sources are guests: whatever they do wrong costs their request its drafts, nothing more.

    Args:
        vocab_size (`int`): Draft tokens must lie below.
        clock (`Callable`): Seconds.

    Attributes:
        seconds (`dict`): What the latest `propose` took, by source.
    """

    def __init__(self, vocab_size: int, clock: Callable[[], float] = time.perf_counter):
        self.vocab_size, self.clock = vocab_size, clock
        self.seconds: dict[DraftCost, float] = {}
        self.gate = PrefillGate()
        self._has_warned = False

    def start(self, request: Request) -> None:
        """A request begins; without a draft model, where that is hardly ever asked for a draft any more."""
        if request.call.source.is_autoregressive and not self.gate.admits(request):
            request.is_drafting = False
        self._guarded(request, self._start, request)

    def resume(self, request: Request) -> None:
        """Where a row holds some of its prompt already, what its source cannot do without is run again."""
        if request.call.hidden_layers and request.cache_row.length:
            self._guarded(request, self._resume, request)

    def _resume(self, request: Request) -> None:
        call, row = request.call, request.cache_row
        length = call.source.reuse(request.request_id, row.length, request.shares_with)
        if length < row.length and request.shares_with is None:
            raise ValueError(f"it needs hidden states, and of {row.length} tokens there are keys and values only")
        if length < row.length:
            call.forward.cut(row, max(length, 0))

    def count(self, drafted: dict[Request, DraftTree]) -> None:
        """What was drafted in one step, for all its rows."""
        rows = [request for request in drafted if request.call.source.is_autoregressive and request.is_drafting]
        self.gate.observe(rows, [len(drafted[request]) for request in rows])

    def _start(self, request: Request) -> None:
        call = request.call
        request.is_known_to_source = True
        if call.assignment:
            call.source.assign(request.request_id, **call.assignment)
        call.source.couple(request.request_id, call.picker.processors, request.seed)
        call.source.start(request.request_id, request.prompt)

    def stop(self, request: Request) -> None:
        self.gate.forget(request)
        if request.is_known_to_source:
            request.is_known_to_source = False
            try:
                request.call.source.stop(request.request_id)
            except Exception as error:
                self._drop(request, error)

    def observe(self, request: Request, tokens: np.ndarray) -> None:
        self._guarded(request, request.call.source.observe, request.request_id, tokens)

    def show(self, request: Request, step: Committed) -> None:
        """`observe` for sources with needs."""
        self._guarded(request, self._show, request, step)

    def _show(self, request: Request, step: Committed) -> None:
        call = request.call
        if len(step.hidden_states) < len(call.hidden_layers):
            raise ValueError(f"the target's forward leaves no hidden states of layers {sorted(call.hidden_layers)}")
        call.source.show(request.request_id, step)

    def forget(self, request: Request) -> None:
        if request.call.hidden_layers:
            forget(request.call.source, request.request_id)

    def propose(self, wanted: dict[Request, int], price_of: PriceOf) -> dict[Request, DraftTree]:
        """
        One call of each source that serves some of the rows; rows that run on, on padding, need none. `price_of` says
        what sources that draft level by level are to go by.
        """
        proposals: dict[Request, DraftTree] = {}
        by_source: dict[TreeCandidateGenerator, dict[Request, int]] = {}
        for request, limit in wanted.items():
            batch = request.call.batch
            if batch.is_padding(request):
                proposals[request] = DraftTree.chain([batch.pad_token_id] * limit)
            else:
                by_source.setdefault(request.call.source, {})[request] = limit
        self.seconds = {}
        for source, limits in by_source.items():
            first = next(iter(limits)).call
            call, cost = source.propose if first.hybrid is None else first.hybrid.propose_merged, first.draft_cost
            price, start = price_of(cost), self.clock()
            proposals |= self._propose(source, call, limits, price)
            self.seconds[cost] = self.seconds.get(cost, 0.0) + self.clock() - start
        return proposals

    def drafter_nodes(self, trees: dict[Request, DraftTree]) -> np.ndarray:
        """The nodes that sources would have their drafters propose beside the rows' trees; 0 where none."""
        limits = []
        for request, tree in trees.items():
            hybrid, is_weak = request.call.hybrid, [False]
            if hybrid is not None and request.is_drafting:
                is_weak = hybrid.promises_little([request.request_id], [tree])
            limits.append(request.call.max_nodes if is_weak[0] else 0)
        return np.array(limits, np.int64)

    def redraft(
        self,
        wanted: dict[Request, int],
        most: dict[Request, int],
        trees: dict[Request, DraftTree],
        price_of: PriceOf,
    ) -> tuple[dict[Request, DraftTree], dict[Request, DraftTree]]:
        """
        Proposals of the drafters of the rows' sources, where these have one, and the rows' `trees` with these nodes, of
        which there are `most` in all.
        """
        by_source: dict[TreeCandidateGenerator, dict[Request, int]] = {}
        for request, limit in wanted.items():
            call = request.call
            if call.hybrid is not None and request.is_drafting and not call.batch.is_padding(request):
                by_source.setdefault(call.source, {})[request] = limit
        proposals: dict[Request, DraftTree] = {}
        for source, limits in by_source.items():
            first = next(iter(limits)).call
            assert first.hybrid is not None and first.drafter_cost is not None, "the others were left out"
            proposals |= self._propose(source, first.hybrid.redraft, limits, price_of(first.drafter_cost))
        again = {request: tree for request, tree in proposals.items() if len(tree)}
        joined = {
            request: self._joined(request, trees[request], tree, most[request]) for request, tree in again.items()
        }
        return again, joined

    def _joined(self, request: Request, first: DraftTree, again: DraftTree, limit: int) -> DraftTree:
        hybrid = request.call.hybrid
        assert hybrid is not None, "the others were left out"
        try:
            tree = hybrid.with_drafter(request.request_id, first, again, limit)
            tree.check_integrity(self.vocab_size)
            return tree.most_likely(limit)
        except Exception as error:
            self._drop(request, error)
            return DraftTree.empty()

    def _propose(
        self,
        source: TreeCandidateGenerator,
        call: Callable[[list[Hashable], list[int]], list[DraftTree]],
        wanted: dict[Request, int],
        price: LevelPrice | None,
        first_error: Exception | None = None,
    ) -> dict[Request, DraftTree]:
        """Checked proposals; a source that fails is asked row by row, to spare the rows it can serve."""
        try:
            source.price(price)
            trees = call([request.request_id for request in wanted], list(wanted.values()))
            if len(trees) != len(wanted):
                raise ValueError(f"{type(source).__name__} returned {len(trees)} trees for {len(wanted)} requests.")
            for tree in trees:
                tree.check_integrity(self.vocab_size)
            return {request: tree.most_likely(limit) for (request, limit), tree in zip(wanted.items(), trees)}
        except Exception as error:
            first_error = first_error or error
            if len(wanted) == 1:
                self._drop(next(iter(wanted)), first_error)
                return {}
        proposals: dict[Request, DraftTree] = {}
        for request, limit in wanted.items():
            proposals |= self._propose(source, call, {request: limit}, price, first_error)
        return proposals

    def _guarded(self, request: Request, call: Callable, *args: Any) -> None:
        if not request.is_drafting:
            return
        try:
            call(*args)
        except Exception as error:
            self._drop(request, error)

    def _drop(self, request: Request, error: Exception) -> None:
        request.is_drafting = False
        if not self._has_warned:
            logger.warning(
                f"{type(request.call.source).__name__} failed and was dropped for row {request.index}, which goes "
                f"on without speculation (further failures of this call are not reported): {error!r}"
            )
        self._has_warned = True
