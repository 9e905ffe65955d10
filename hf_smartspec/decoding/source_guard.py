"""Calls of candidate sources by the loop. A source that fails is dropped for the request, which goes on."""

from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np

from ..candidates.base import TreeCandidateGenerator, label_of, most_nodes_of, pass_on, proposals_of
from ..candidates.committed import HIDDEN_STATES, Committed
from ..drafts.price import LevelPrice
from ..drafts.tree import DraftTree, check_trees
from ..goodput.prefill_gate import PrefillGate
from ..log import get_logger
from .call import DecodingCall, Request
from .committed import show_steps
from .learning import guarded
from .source_chain import SourceChain

logger = get_logger(__name__)

_SAMPLED = 0.8  # path probability of every node of a sampled draft, before calibration


def release(callbacks: Sequence[Callable[[], object]]) -> None:
    """Call the `on_release` callbacks of a request whose keys and values are gone."""
    for callback in callbacks:
        try:
            callback()
        except Exception as error:
            logger.warning_once(f"A source failed to drop what it kept of a request: {error!r}")


class GuardedSources:
    """
    Calls sources so that an error costs the request this source and nothing more. A source is identified by its
    position in the request's chain.

    Args:
        vocab_size (`int`): Bound on draft tokens, which are below it.
    """

    def __init__(self, vocab_size: int):
        self.vocab_size = vocab_size
        self.gates: defaultdict[str, PrefillGate] = defaultdict(PrefillGate)  # by draft model
        self._renewals: dict[str, int] = {}
        self._has_warned = False

    def choose(self, call: DecodingCall) -> None:
        """Let a new call's sources choose others to draft for some of its requests, which replace them in the chain."""
        chains: dict[tuple[TreeCandidateGenerator, ...], SourceChain] = {}
        own = call.chain.sources
        for request, chosen in zip(call.requests, zip(*[self._chosen(call, source) for source in own])):
            if chosen != own:
                found = [source.stages if source != old else [source] for source, old in zip(chosen, own)]
                stages = tuple(stage for sources in found for stage in sources)
                if stages not in chains:
                    chains[stages] = call.chain_of(stages)
                request.chain = chains[stages]
                request.is_known_to_source = True

    def _chosen(self, call: DecodingCall, source: TreeCandidateGenerator) -> Sequence[TreeCandidateGenerator]:
        requests = call.requests
        try:
            chosen = source.choose([item.source_request for item in requests])
            if len(chosen) == len(requests):
                return chosen
            raise ValueError(f"it chose {len(chosen)} sources for {len(requests)} requests")
        except Exception as error:
            logger.warning_once(f"{type(source).__name__} failed to choose and drafts itself: {error!r}")
            return [source] * len(requests)

    def renew(self, source: str, number: int) -> None:
        """Reset a source's gate after its weights changed, so that earlier costs no longer keep it from requests."""
        if self._renewals.get(source) != number:
            self._renewals[source] = number
            self.gates.pop(source, None)

    def start(self, request: Request) -> None:
        """Begin a request; without its draft model if the prefill gate does not admit the request."""
        drafter = request.chain.drafter
        if drafter is not None and not self.gates[drafter].admits(request):
            request.is_drafting = False
        if request.is_drafting:
            request.is_known_to_source = True
        self.attach(request)
        row, given = request.cache_row, request.source_request
        given.num_cached, given.shares_with = row.length, request.shares_with
        answers = [
            self._guarded(request, position, _begin, request, source) for position, source in self._serving(request)
        ]
        # Tokens that one source needs again are run again for all.
        length = min([answer for answer in answers if answer is not None], default=row.length)
        if length < row.length:
            request.call.forward.cut(row, length)

    def attach(self, request: Request) -> None:
        """Store the request's row in its `SourceRequest`, for sources that draft with the target itself."""
        request.source_request.row = request.cache_row

    def count(self, drafted: dict[Request, DraftTree]) -> None:
        """Count the drafts of one step, for the gates of draft models."""
        by_drafter: dict[str, list[Request]] = {}
        for request in drafted:
            if request.chain.drafter is not None and request.is_drafting:
                by_drafter.setdefault(request.chain.drafter, []).append(request)
        for drafter, rows in by_drafter.items():
            self.gates[drafter].observe(rows, [len(drafted[request]) for request in rows])

    def stop(self, request: Request) -> None:
        """End a request, finished or not, in its sources and gate."""
        if request.chain.drafter is not None:
            self.gates[request.chain.drafter].forget(request)
        if request.is_known_to_source:
            request.is_known_to_source = False
            self.observe([request])
            # Sources that have failed are stopped too, since they hold state of the request.
            for position, source in enumerate(request.chain.sources):
                self._guarded(request, position, source.stop, request.request_id)

    def observe(self, requests: Sequence[Request], shown: Sequence[Request] | None = None) -> None:
        """
        Pass what was committed since the latest call to the sources of requests: tokens to those that observe nothing
        else; to the others and to recorders, of all requests or of those in `shown` only, what they need. Steps mostly
        go without a call for requests of which they ask no source: it would cost them time.
        """
        for request in requests:
            first, request.num_passed = request.num_passed, request.num_observed
            if first < request.num_observed and request.chain.watching:
                self._pass_tokens(request, request.generated(first, request.num_observed).copy())  # may be changed
        wanting = [request for request in (requests if shown is None else shown) if request.wants_states]
        tokens: dict[Request, np.ndarray] = {}
        for request in wanting:
            first, request.num_shown = request.num_shown, request.num_observed
            if first < request.num_observed:
                tokens[request] = request.generated(first, request.num_observed).copy()
        try:
            show_steps(wanting, tokens, self._show)
        except Exception as error:  # mostly for lack of memory
            for request in wanting:
                self._drop_shown(request, error)

    def _drop_shown(self, request: Request, error: Exception) -> None:
        """Drop a request's sources that need states or scores, and end its recordings: they have missed a step."""
        for position, source in self._serving(request):
            if source.needs:
                self._drop(request, position, error)
        for recorder in request.chain.recorders:
            guarded(recorder.stop, request.request_id)
        request.fed = None

    def _pass_tokens(self, request: Request, tokens: np.ndarray) -> None:
        """Pass tokens to the sources without needs; the others get theirs by `_show`."""
        if not request.is_drafting:
            return
        for position, source in request.chain.watching:
            if position not in request.dropped:
                step = Committed(tokens, likeliest=request.likeliest) if source.num_likeliest else tokens
                try:
                    source.observe(request.request_id, step)
                except Exception as error:
                    self._drop(request, position, error)

    def _show(self, request: Request, step: Committed) -> None:
        """Pass a step to the sources with needs."""
        for position, source in self._serving(request):
            if source.needs:
                self._guarded(request, position, _show_source, request, source, step)

    def catch_up(self, position: int, requests: Collection[Request]) -> None:
        """Pass on what was committed in steps that did not ask the sources at this position."""
        behind = [request for request in requests if request.is_behind]
        self.observe(behind, [request for request in behind if request.chain.sources[position].needs])

    def propose(self, position: int, asked: dict[Request, int], price: LevelPrice | None) -> dict[Request, DraftTree]:
        """Call `propose` once per source that any row has at this position, with the `price` where it is heeded."""
        proposals: dict[Request, DraftTree] = {}
        by_source: dict[TreeCandidateGenerator, dict[Request, int]] = {}
        for request, limit in asked.items():
            by_source.setdefault(request.chain.sources[position], {})[request] = limit
        for source, own in by_source.items():
            if position:  # sources after the first one add nodes to other drafts, at a price per node
                most = source.default_num_nodes if price is None else most_nodes_of(source)
                own = {request: min(limit, most) for request, limit in own.items()}
            proposals |= self._propose(source, position, own, price)
        return proposals

    def _propose(
        self,
        source: TreeCandidateGenerator,
        position: int,
        asked: dict[Request, int],
        price: LevelPrice | None,
        first_error: Exception | None = None,
    ) -> dict[Request, DraftTree]:
        """Return checked proposals. A source that fails is called row by row, and dropped for rows that fail again."""
        try:
            trees = proposals_of(source, [request.request_id for request in asked], list(asked.values()), price)
            if len(trees) != len(asked):
                raise ValueError(f"{type(source).__name__} returned {len(trees)} trees for {len(asked)} requests.")
            check_trees(trees, self.vocab_size)
            return {request: fitting(tree, limit) for (request, limit), tree in zip(asked.items(), trees)}
        except Exception as error:
            first_error = first_error or error
            if len(asked) == 1:
                self._drop(next(iter(asked)), position, first_error)
                return {}
        proposals: dict[Request, DraftTree] = {}
        for request, limit in asked.items():
            proposals |= self._propose(source, position, {request: limit}, price, first_error)
        return proposals

    def drafted_by(self, request: Request, position: int, tree: DraftTree) -> list[str]:
        """Return, for each node, the label of the part of a source that drafted it."""
        source = request.chain.sources[position]
        if position not in request.dropped:
            labels = self._guarded(request, position, source.drafted_by, request.request_id, tree)
            if labels is not None and len(labels) == len(tree):
                return list(labels)
        return [label_of(source)] * len(tree)

    @staticmethod
    def _serving(request: Request) -> list[tuple[int, TreeCandidateGenerator]]:
        """Return the request's sources that have not failed, with their positions."""
        if not request.is_drafting:
            return []
        return [item for item in enumerate(request.chain.sources) if item[0] not in request.dropped]

    def _guarded(self, request: Request, position: int, call: Callable, *args: Any) -> Any:
        try:
            return call(*args)
        except Exception as error:
            self._drop(request, position, error)

    def _drop(self, request: Request, position: int, error: Exception) -> None:
        request.dropped.add(position)
        request.is_drafting = len(request.dropped) < len(request.chain.sources)
        if not request.wants_states:
            request.fed = request.verified = None
        if not self._has_warned:
            goes_on = "with its other sources" if request.is_drafting else "without speculation"
            source = request.chain.sources[position].name
            logger.warning(
                f"{source} failed and was dropped for row {request.index}, which goes on {goes_on} (further failures "
                f"of this call are not reported): {error!r}"
            )
        self._has_warned = True


def fitting(tree: DraftTree, limit: int) -> DraftTree:
    """Return at most `limit` nodes of a draft; of sampled drafts, without their probabilities."""
    if len(tree.tokens) > limit:
        tree = tree.most_likely(limit)
    return tree if tree.distributions is None else _sealed(tree)


def _sealed(tree: DraftTree) -> DraftTree:
    """
    Return a sampled draft without the probabilities of its tokens: verification by rejection is exact only if these do
    not decide how many nodes are verified. Calibration learns from accepted nodes what such drafts are worth.
    """
    return tree.with_probs(np.full(len(tree), _SAMPLED, np.float32))


def _begin(request: Request, source: TreeCandidateGenerator) -> int | None:
    """Return how many cached tokens need not be run again for a source; None for all."""
    answer, num_cached = source.begin(request.source_request), request.cache_row.length
    if HIDDEN_STATES not in source.needs:
        return None
    num_reused = min(max(answer or 0, 0), num_cached)
    if num_reused < num_cached and request.shares_with is None:
        raise ValueError(f"it needs hidden states, and of {num_cached} tokens there are keys and values only")
    return num_reused


def _show_source(request: Request, source: TreeCandidateGenerator, step: Committed) -> None:
    if HIDDEN_STATES in source.needs and not set(source.hidden_layers) <= set(step.hidden_states):
        raise ValueError(f"the target's forward leaves no hidden states of layers {sorted(source.hidden_layers)}")
    pass_on(source, request.request_id, step)
