"""The decoding loop: draft, forward, verify, commit, observe."""

import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch

from .call import DecodingCall, ModelForward
from .candidates.base import TreeCandidateGenerator
from .goodput.selector import DraftCost, LengthPolicy, StepRows, StepSeconds
from .guests import GuestSources
from .layout import CacheRow, RowInput
from .request import GenerationStatistics, Request
from .tree import DraftTree


class DecodingLoop:
    """
    Decodes the rows of any number of calls, each at its own speed. Calls may join and leave between two steps.

    Args:
        policy (`LengthPolicy`): Says how many nodes are drafted and verified.
        limits (`ModelLimits`): What drafts must not exceed.
        max_prefill_tokens (`int`, *optional*): Prompt tokens per step; longer prompts are spread over steps in which
            other rows decode. All at once where not given.
        on_failure (`Callable`, *optional*): Gets a call and the error that it caused by itself; the call has then left
            the loop. Without it, errors are raised.
        release (`Callable`, *optional*): Gets the cache row of a finished request and the tokens that it holds, in
            place of its removal.
        clock (`Callable`): Seconds, by which the loop measures itself.
    """

    def __init__(
        self,
        policy: LengthPolicy,
        limits: "ModelLimits",
        max_prefill_tokens: int | None = None,
        on_failure: Callable[[DecodingCall, Exception], None] | None = None,
        release: Callable[[Request], None] | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ):
        self.policy, self.limits, self.sources = policy, limits, GuestSources(limits.vocab_size)
        self.max_prefill_tokens, self.on_failure = max_prefill_tokens, on_failure
        self._release, self._clock = release or _remove, clock
        self.calls: list[DecodingCall] = []
        self.num_waiting = 0
        self.statistics = GenerationStatistics()

    def add(self, call: DecodingCall) -> None:
        """A call joins; its rows that have no place in the cache yet get one."""
        self.calls.append(call)
        for request in call.requests:
            request.row = request.row or call.forward.add()
            self.sources.start(request)
        self._compact()

    def remove(self, call: DecodingCall) -> None:
        """A call leaves, finished or not."""
        self.calls.remove(call)
        for request in call.requests:
            request.tree = request.logits = None
            if request.row is not None and not call.keeps_cache:
                self._release(request)
                request.row = None
            self._forget(request)
        call.statistics.generated_tokens = sum(request.num_valid for request in call.requests)
        self.statistics.generated_tokens += call.statistics.generated_tokens

    def run(self, *calls: DecodingCall) -> None:
        """Steps until these calls, and all that joined before, have ended."""
        try:
            for call in calls:
                self.add(call)
            while self.calls:
                self.step()
        finally:
            for call in list(self.calls):
                self.remove(call)

    @property
    def running(self) -> list[Request]:
        """Rows that need further tokens."""
        return [request for call in self.calls for request in call.batch.active]

    def step(self) -> list[DecodingCall]:
        """
        One step: rows without a draft under verification get one, and every row advances as far as it can. Returns the
        calls that ended.
        """
        with self._timed("seconds_total"):
            feeds = self.feed()
            step = self.draft(feeds)
            self.run_model(feeds, step)
            ended = self.verify()
            self.commit(ended)
            self.observe(ended, step)
            return self.report()

    # 1. feed: which committed tokens are run next

    def feed(self) -> dict[Request, np.ndarray]:
        """The next tokens of every row that waits for logits; prompts share what the step has room for."""
        feeds, room = {}, self.max_prefill_tokens
        for request in self.running:
            if request.is_verifying:
                continue
            tokens = request.uncached()
            if room is not None and len(tokens) > 1:
                tokens = tokens[: max(room, 0)]
                room -= len(tokens)
            if len(tokens):
                feeds[request] = tokens
        return feeds

    # 2. draft

    def draft(self, feeds: dict[Request, np.ndarray]) -> "StepDrafts":
        """A draft tree for every row that will have logits behind its whole text, as the policy allows."""
        start = self._seconds()
        rows = [request for request, tokens in feeds.items() if request.num_uncached == len(tokens)]
        with self._timed("seconds_select"):
            step = self._step_rows(rows, feeds)
            limits = self.policy.max_nodes(step)
            if len(limits) != len(rows):
                raise ValueError(f"{type(self.policy).__name__} gave {len(limits)} limits for {len(rows)} rows.")
        with self._timed("seconds_draft"):
            wanted = {request: int(min(limit, cap)) for request, limit, cap in zip(rows, limits, step.caps)}
            proposals = self.sources.propose({request: limit for request, limit in wanted.items() if limit > 0})
        with self._timed("seconds_select"):
            self.sources.count({request: proposals.get(request, _EMPTY) for request in rows})
            proposed = [self._within_limits(request, proposals.get(request, _EMPTY)) for request in rows]
            trees = self.policy.select(step, proposed)
            if len(trees) != len(rows):
                raise ValueError(f"{type(self.policy).__name__} selected {len(trees)} trees for {len(rows)} rows.")
        return StepDrafts(step, rows, proposed, trees, start)

    def _step_rows(self, rows: Sequence[Request], feeds: dict[Request, np.ndarray]) -> StepRows:
        prompts = [(len(tokens), request.cache_row.length) for request, tokens in feeds.items() if len(tokens) > 1]
        return StepRows(
            request_ids=[request.request_id for request in rows],
            context_lens=np.array([request.cache_row.length for request in rows], np.int64),
            caps=np.array([self._cap(request) for request in rows], np.int64),
            num_prefill_tokens=sum(map(len, feeds.values())) - len(rows),
            prefill_context=sum(num + cached for num, cached in prompts),
            prefill_pairs=sum(num * (num + cached) for num, cached in prompts),
            num_waiting=self.num_waiting,
            draft=_draft_cost(rows[0].call.source) if rows else DraftCost(),
        )

    def _cap(self, request: Request) -> int:
        # The last token needs no draft: the target's own pick comes free.
        return request.call.max_nodes if request.is_drafting and request.num_remaining != 1 else 0

    def _within_limits(self, request: Request, tree: DraftTree) -> DraftTree:
        if not request.call.forward.trees:
            tree = tree.best_chain()
        if request.num_remaining is not None and len(tree):
            tree = tree.keep(tree.depths < request.num_remaining)
        # Learned position embeddings end somewhere, and plain decoding may stop just before.
        room = len(tree) if self.limits.num_positions is None else self.limits.num_positions - request.length
        if 0 <= room < len(tree):
            tree = tree.keep(tree.depths <= room)
        return tree

    # 3. forward

    def run_model(self, feeds: dict[Request, np.ndarray], step: "StepDrafts") -> None:
        """One packed forward; leaves every row that has a draft with the target's logits at each node."""
        drafts = dict(zip(step.rows, step.trees))
        for forward in dict.fromkeys(request.call.forward for request in feeds):
            fed = [request for request in feeds if request.call.forward is forward]
            with self._timed("seconds_forward"):
                inputs = [RowInput(request.cache_row, feeds[request], drafts.get(request, _EMPTY)) for request in fed]
                logits, offsets = forward.forward(inputs)
            with self._timed("seconds_verify"):
                picks = forward.argmax(logits) if any(request.call.picks_greedily for request in fed) else []
            self.statistics.forwards += 1
            for request, offset in zip(fed, offsets):
                if request in drafts:
                    _begin_verifying(request, drafts[request], offset, logits, picks)
        for request, tree in drafts.items():
            for statistics in (self.statistics, request.call.statistics):
                statistics.steps += 1
                statistics.drafted_tokens += len(tree)

    # 4. verify

    def verify(self) -> list[Request]:
        """Advances rows along their trees; returns those whose path has ended."""
        with self._timed("seconds_verify"):
            ready = [request for request in self.running if request.is_verifying]
            ended = [request for request in ready if request.call.picks_greedily]
            for request in ended:
                while self._advance(request, request.picks[request.cursor + 1]):
                    pass
            return ended + self._verify_in_rounds([request for request in ready if not request.call.picks_greedily])

    def _verify_in_rounds(self, ready: list[Request]) -> list[Request]:
        """One token of every row at a time, so that the processors see many rows in one call."""
        ended: list[Request] = []
        while ready := [request for request in ready if not request.call.waits_for_more(ready)]:
            still: list[Request] = []
            for rows in _alike(ready):
                tokens = self._attempt(rows, self._pick_next, rows) or []
                still += [request for request, token in zip(rows, tokens) if self._advance(request, token)]
            for call in dict.fromkeys(request.call for request in ready):
                if not call.picker.is_known:  # processors and criteria may share state: they take turns
                    self._attempt(call.requests, call.batch.report)
            still = [request for request in still if request.is_active and request.call in self.calls]
            ended += [request for request in ready if request not in still and request.call in self.calls]
            ready = still
        return ended

    def _pick_next(self, rows: list[Request]) -> list[int]:
        """The target's next token for each row, from its logits at the row's cursor."""
        call = rows[0].call
        batch = call.batch
        logits = torch.stack([request.node_logits[request.cursor + 1] for request in rows]).to(torch.float32)
        scores = call.picker.process(rows, logits, batch)
        for request, raw, line in zip(rows, logits, scores):
            if batch.records_logits:
                request.raw_logits.append(raw)
            if batch.records_scores:
                request.scores.append(line)
        tokens = call.pick(rows, scores)
        return [batch.pad_token_id if batch.is_padding(request) else token for request, token in zip(rows, tokens)]

    def _advance(self, request: Request, token: int) -> bool:
        """Appends the token; True if the draft holds it: the next token can then be picked from the same forward."""
        request.append(token)
        request.call.batch.check_stop(request)
        if not request.is_active:
            return False
        assert request.tree is not None, "the request has no draft under verification"
        child = request.tree.child(request.cursor, token)
        if child is None:
            return False
        request.cursor = child
        request.path.append(child)
        return True

    # 5. commit

    def commit(self, rows: Sequence[Request]) -> None:
        """Keeps keys and values of the accepted paths."""
        with self._timed("seconds_verify"):
            for forward in dict.fromkeys(request.call.forward for request in rows):
                group = [request for request in rows if request.call.forward is forward]
                forward.commit([request.cache_row for request in group], [request.path for request in group])
            for request in rows:
                for statistics in (self.statistics, request.call.statistics):
                    statistics.accepted_tokens += len(request.path)
                request.tree = request.logits = None

    # 6. observe

    def observe(self, rows: Sequence[Request], step: "StepDrafts") -> None:
        """Tells the sources what was committed, and the policy what came of its decisions."""
        with self._timed("seconds_observe"):
            committed: dict[Request, np.ndarray] = {}
            for request in rows:
                end = request.stopped_at if request.call.batch.pads_finished else None  # behind it stands padding
                new = np.array(request.tokens[request.num_observed : end], np.int64)
                committed[request] = new
                request.num_observed += len(new)
                if len(new):
                    self.sources.observe(request, new)
            if all(request in committed for request in step.rows):  # else some wait for others' logits
                accepted = [len(request.path) for request in step.rows]
                tokens = [committed[request] for request in step.rows]
                seconds = step.seconds_until(self._seconds())
                self.policy.observe(step.policy_rows, step.proposed, step.trees, accepted, seconds, tokens)

    def _seconds(self) -> StepSeconds:
        """Seconds spent so far, in all steps."""
        counts = self.statistics
        return StepSeconds(counts.seconds_draft, counts.seconds_forward, counts.seconds_select + counts.seconds_verify)

    # 7. report

    def report(self) -> list[DecodingCall]:
        """Criteria and streamers are called; calls that have ended, and rows that need no further tokens, leave."""
        ended = []
        for call in list(self.calls):
            self._attempt(call.requests, call.batch.report)
            if call in self.calls and call.batch.is_reported:
                self.remove(call)
                ended.append(call)
        active = dict.fromkeys(self.running)
        for request in (request for call in self.calls for request in call.requests):
            if request.row is not None and request not in active:
                self._retire(request)
        self._compact()
        return ended

    def _compact(self) -> None:
        """Active rows move to the first slots, so that the others cost nothing."""
        rows: dict[ModelForward, list[CacheRow]] = {}
        for request in self.running:
            rows.setdefault(request.call.forward, []).append(request.cache_row)
        for forward, active in rows.items():
            forward.compact(active)

    def _retire(self, request: Request) -> None:
        """The row needs no further tokens."""
        request.tree = request.logits = None
        self._forget(request)
        if not request.call.keeps_cache:
            self._release(request)
            request.row = None

    def _forget(self, request: Request) -> None:
        if request.is_known_to_source:
            self.sources.stop(request)
            self.policy.forget(request.request_id)

    # Whatever one call's own processors, criteria or streamer do wrong is its own failure.

    def _attempt(self, rows: Sequence[Request], function: Callable, *args: Any) -> Any:
        try:
            return function(*args)
        except Exception as error:
            if self.on_failure is None:
                raise
            for call in dict.fromkeys(request.call for request in rows):
                self.remove(call)
                self.on_failure(call, error)

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        start = self._clock()
        try:
            yield
        finally:
            setattr(self.statistics, name, getattr(self.statistics, name) + self._clock() - start)


class ModelLimits(NamedTuple):
    """Draft tokens lie below `vocab_size`; texts may outgrow `num_positions` (if there is a limit), drafts must not."""

    vocab_size: int
    num_positions: int | None


class StepDrafts(NamedTuple):
    """What one step drafts, and what it verifies of that."""

    policy_rows: StepRows
    rows: list[Request]
    proposed: list[DraftTree]
    trees: list[DraftTree]
    start: StepSeconds  # spent before the step

    def seconds_until(self, end: StepSeconds) -> StepSeconds:
        return StepSeconds(*(after - before for before, after in zip(self.start, end)))


def _draft_cost(source: TreeCandidateGenerator) -> DraftCost:
    """Seconds are measured as they come; in mixed company, the first row's source stands for all."""
    return DraftCost(is_autoregressive=source.is_autoregressive, width=source.width, source=type(source).__name__)


def _begin_verifying(request: Request, tree: DraftTree, first: int, logits: torch.Tensor, picks: list[int]) -> None:
    lines = slice(first, first + len(tree) + 1)
    request.tree, request.cursor, request.path = tree, -1, []
    request.logits, request.picks = logits[lines], picks[lines]


def _alike(rows: Sequence[Request]) -> list[list[Request]]:
    """The rows whose tokens are picked in the same way, together."""
    groups: dict[Hashable, list[Request]] = {}
    for request in rows:
        groups.setdefault(request.call.picks_like, []).append(request)
    return list(groups.values())


def _remove(request: Request) -> None:
    request.call.forward.remove(request.cache_row)


_EMPTY = DraftTree.empty()
