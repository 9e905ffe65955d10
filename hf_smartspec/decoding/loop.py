"""The decoding loop: draft, forward, verify, commit, observe."""

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from ..device import waits_are_free
from ..drafts.tree import DraftTree
from ..goodput.policy import LengthPolicy
from ..target_model.forward.ranks import Ranks
from ..target_model.layout.rows import RowInput
from .alarm import AcceptanceAlarm
from .call import DecodingCall, ModelLimits, Request, by_forward
from .committed import run_forward
from .drafting import Drafting
from .learning import Learning
from .lifecycle import RequestLifecycle
from .prefill import shorten_prompts
from .statistics import GenerationStatistics, Timed
from .step_drafts import StepDrafts
from .verify import greedy_picks, verify_rows


class DecodingLoop:
    """
    Decodes the rows of any number of calls, each at its own speed. Calls may join and leave between two steps.

    Args:
        policy (`LengthPolicy`): Decides how many nodes are drafted and verified.
        limits (`ModelLimits`): Bounds on drafts.
        max_prefill_tokens (`int`, *optional*): Prompt tokens per step; longer prompts are spread over steps in which
            other rows decode. By default, a prompt is run at once.
        on_failure (`Callable`, *optional*): Gets a call and the error that the call's own code has raised, after the
            call was removed. By default, the error is raised.
        release (`Callable`, *optional*): Gets a finished request, whose cache row it keeps or removes. By default, the
            row is removed.
        clock (`Callable`): Clock of all statistics, in seconds.
        ranks (`Ranks`, *optional*): The processes that hold the model together.
        alarm (`AcceptanceAlarm`, *optional*): The model's alarm, shared by all loops that run it.
    """

    def __init__(
        self,
        policy: LengthPolicy,
        limits: ModelLimits,
        max_prefill_tokens: int | None = None,
        on_failure: Callable[[DecodingCall, BaseException], None] | None = None,
        release: Callable[[Request], None] | None = None,
        clock: Callable[[], float] = time.perf_counter,
        ranks: Ranks | None = None,
        alarm: AcceptanceAlarm | None = None,
    ):
        self.policy = policy
        self.max_prefill_tokens, self.on_failure, self.clock = max_prefill_tokens, on_failure, clock
        self.calls: list[DecodingCall] = []
        self.suspended: set[DecodingCall] = set()
        self.running: list[Request] = []  # rows that need further tokens
        self._is_compact = True
        self._runs_on = False  # whether the device may still compute when a forward has returned
        self._shows_more = False  # whether some source needs more than tokens
        self._learning: set[Learning] = set()
        self._num_waiting = 0
        self.statistics = GenerationStatistics()
        self.drafting = Drafting(policy, limits, self.statistics, clock, ranks, alarm)
        self._lifecycle = RequestLifecycle(policy, self.drafting.sources, release)

    def add(self, call: DecodingCall) -> None:
        """Add a call, and cache rows for those of its requests that have none."""
        self.calls.append(call)
        self.drafting.learn()
        self.drafting.sources.choose(call)
        for request in call.requests:
            self._lifecycle.begin(request)
        self._find_running()

    def remove(self, call: DecodingCall) -> None:
        """Take out a call, finished or not, running or suspended; sources, policy and recorders forget its requests."""
        try:
            self.drafting.learn()
        finally:
            self._remove(call)

    def _remove(self, call: DecodingCall) -> None:
        if call in self.suspended:
            self.suspended.remove(call)
        else:
            self.calls.remove(call)
        for request in call.requests:
            self._lifecycle.end(request)
        self._find_running()
        call.statistics.generated_tokens = sum(request.num_valid for request in call.requests)
        self.statistics.generated_tokens += call.statistics.generated_tokens

    def suspend(self, call: DecodingCall) -> None:
        """
        Take out a call for a while, between two steps. Its texts stay, as does what sources and the policy have learnt
        of them. The caller disposes of its cache rows.
        """
        self.drafting.learn()
        self.calls.remove(call)
        self.suspended.add(call)
        self.drafting.sources.observe(call.requests)
        for request in call.requests:
            request.is_resumed = True
            # Logits and states of a whole step: a resumed row gets new ones.
            request.fed = request.verified = request.likeliest = None
        self._find_running()

    def resume(self, call: DecodingCall) -> None:
        """Continue a suspended call. The parts of its texts that its rows do not hold are run again."""
        self.suspended.remove(call)
        self.calls.append(call)
        for request in call.requests:
            call.set_lengths(request)
            self.drafting.sources.attach(request)
        self._find_running()

    def run(self, *calls: DecodingCall) -> None:
        """Add calls, and step until all calls have ended."""
        try:
            for call in calls:
                self.add(call)
            while self.calls:
                self.step()
        finally:
            for call in list(self.calls):
                self.remove(call)

    def _find_running(self) -> None:
        """Update all that depends on which rows run, after calls or rows were added or removed."""
        self.running = [request for call in self.calls for request in call.batch.active]
        self._learning |= {call.learning for call in self.calls if call.learning is not None}
        self._notify_idle()
        self._is_compact = False
        self._shows_more = any(request.chain.needs_more for request in self.running)
        self.drafting.is_traced = self.drafting.decides and any(request.trace is not None for request in self.running)

    @property
    def num_waiting(self) -> int:
        """Number of requests that wait to be added, set by the caller."""
        return self._num_waiting

    @num_waiting.setter
    def num_waiting(self, number: int) -> None:
        if number != self._num_waiting:
            self._num_waiting = number
            self._notify_idle()

    def _notify_idle(self) -> None:
        """Notify learners when no request is running, for the last time when none is waiting either."""
        if not self.calls:
            for learning in self._learning:
                learning.between_steps(self, 0, self.num_waiting)
            if not self.num_waiting:
                self._learning.clear()

    def step(self) -> list[DecodingCall]:
        """
        Run one step and return the calls that ended: rows without a draft under verification get one, and every row
        advances as far as it can.
        """
        with self._timed("seconds_total"):
            start = self.clock()
            for learning in self._learning:
                learning.between_steps(self, len(self.running), self.num_waiting)
            self._compact()
            feeds = self.feed()  # 1. tokens that are not cached yet
            step = self.drafting.draft(feeds, self.num_waiting)  # 2. guesses
            self.run_model(feeds, step)  # 3. one forward
            if not all([request.tokens for request in feeds]):
                self.statistics.seconds_prefill += self.clock() - start
            ended = self.verify()  # 4. accepted guesses, and one more token
            self.commit(ended)  # 5. keys and values of these
            self.observe(ended, step)  # 6. learning
            return self.report()  # 7. criteria, streamers, finished calls

    # 1. feed

    def feed(self) -> dict[Request, np.ndarray]:
        """Return the next tokens to run of every row without logits, with prompts cut to the room of a step."""
        feeds, prompts = {}, []
        for request in self.running:
            if request.tree is not None:  # the row has logits: its draft is under verification
                continue
            row = request.cache_row
            if row.renewal is not None and row.is_due(request.length):
                row.renew()
            tokens = request.uncached()
            if row.marks:
                tokens = tokens[: row.until_mark(len(tokens))]
            feeds[request] = tokens
            if len(tokens) > 1:
                prompts.append(request)
        if prompts and self.max_prefill_tokens is not None:
            shorten_prompts(feeds, prompts, self.max_prefill_tokens)
        return feeds

    # 2. draft: `Drafting.draft`

    # 3. forward

    def run_model(self, feeds: dict[Request, np.ndarray], step: StepDrafts) -> None:
        """Run the forwards, mostly one, and store the target's logits at each node of the rows' drafts."""
        drafts = dict(zip(step.rows, step.trees))
        for fed in by_forward(feeds).values():
            if fed[0].call.has_own_forward:
                self._attempt(fed, self._run_forward, fed, feeds, drafts)
            else:  # calls share it: no single one is at fault if it fails
                self._run_forward(fed, feeds, drafts)
        for call in dict.fromkeys([request.call for request in feeds]):
            call.statistics.forwards += 1
        for request, tree in drafts.items():
            counts, num_nodes = request.call.statistics, len(tree.tokens)
            counts.steps += 1
            counts.drafted_tokens += num_nodes
            self.statistics.drafted_tokens += num_nodes
        self.statistics.steps += len(drafts)

    def _run_forward(
        self, rows: list[Request], feeds: dict[Request, np.ndarray], drafts: dict[Request, DraftTree]
    ) -> None:
        with self._timed("seconds_forward"):
            inputs = [
                RowInput(request.cache_row, feeds[request], drafts.get(request, _EMPTY), best_only=request.best_only)
                for request in rows
            ]
            logits, offsets = run_forward(rows[0].call.forward, rows, inputs)
        self._runs_on = isinstance(logits, torch.Tensor) and not waits_are_free(logits.device)
        if self._runs_on:
            self.drafting.learn_meanwhile()
        with self._timed("seconds_verify"):
            picks = greedy_picks(rows, drafts, offsets, logits, self.drafting.has_asked)
            for request, offset in zip(rows, offsets):
                if request in drafts:
                    request.begin_verifying(drafts[request], offset, logits, picks)
        self.statistics.forwards += 1

    # 4. verify

    def verify(self) -> list[Request]:
        """Advance rows along their trees, and return those whose path has ended."""
        with self._timed("seconds_verify"):
            return verify_rows(self.running, self.calls, self._attempt)

    # 5. commit

    def commit(self, rows: Sequence[Request]) -> None:
        """Keep keys and values of the accepted paths."""
        with self._timed("seconds_verify"):
            for forward, group in by_forward(rows).items():
                forward.commit([request.cache_row for request in group], [request.path for request in group])
            for request in rows:
                if request.path:
                    self.statistics.accepted_tokens += len(request.path)
                    request.call.statistics.accepted_tokens += len(request.path)
                request.tree = request.logits = None

    # 6. observe

    def observe(self, rows: Sequence[Request], step: StepDrafts) -> None:
        """Pass committed tokens to the sources, and the outcome of the step to the policy."""
        with self._timed("seconds_observe"):
            committed: dict[Request, np.ndarray] = {}
            for request in rows:
                end = request.stopped_at if request.call.batch.pads_finished else None  # followed by padding
                committed[request] = new = request.generated(request.num_observed, end)
                request.num_observed += len(new)
            self._pass_on(committed, self.drafting.has_asked or step.has_prompts)
            for request in rows:
                request.verified = request.likeliest = None  # logits of a whole step are large
            if self.drafting.is_traced:
                for trace in [request.trace for request in rows if request.trace is not None]:
                    trace.end()
            if all([request in committed for request in step.rows]):  # else some wait for logits of other rows
                accepted = [len(request.path) for request in step.rows]
                tokens = [committed[request] for request in step.rows]
                self.drafting.observe(step, accepted, tokens, may_wait=self._runs_on)

    def _pass_on(self, committed: dict[Request, np.ndarray], is_due: bool) -> None:
        """
        Pass the step to the sources, prompts' parts included; if that is not due, mostly leave it for later, as that of
        rows that no source with needs has drafted for: hidden states cost time, which one row's draft does not pay.
        """
        rows, sources = list(committed), self.drafting.sources
        if not self._shows_more:
            sources.observe([request for request in rows if is_due or request.must_observe])
            return
        shown = [request for request in rows if self.drafting.has_asked_with_needs(request) or request.must_be_shown]
        if shown:  # joining the states of many steps takes as long for one row as for all
            shown = list(dict.fromkeys([*shown, *[request for request in rows if request.may_be_shown]]))
        parts = [item for item in self.running if item.fed is not None and not item.is_verifying]
        shown += [request for request in parts if request not in committed]
        sources.observe([request for request in rows if is_due or request.must_observe], shown)

    # 7. report

    def report(self) -> list[DecodingCall]:
        """Call criteria and streamers, remove calls that have ended, and return these; retire finished rows."""
        for call in [call for call in self.calls if call.batch.reports]:
            self._attempt(call.requests, call.batch.report)
        if self.running and all([request.stopped_at is None for request in self.running]):
            return []
        self.drafting.learn()  # before a row is forgotten
        ended = [call for call in self.calls if call.batch.is_reported]
        for call in ended:
            self.remove(call)
        self._find_running()
        active = set(self.running)
        for request in (request for call in self.calls for request in call.requests):
            if request.row is not None and request not in active:
                self._lifecycle.retire(request)
        return ended

    def _compact(self) -> None:
        """Move active rows to the first cache slots, so that the others cost nothing."""
        if not self._is_compact:
            for forward, rows in by_forward(self.running).items():
                forward.compact([request.cache_row for request in rows])
            self._is_compact = True

    def _attempt(self, rows: Sequence[Request], function: Callable, *args: Any) -> Any:
        """Call the function. If it fails, by code of these rows' calls (processors, ...), only these calls fail."""
        try:
            return function(*args)
        except BaseException as error:  # `SystemExit` too: one call's code must not end the others
            if self.on_failure is None or isinstance(error, KeyboardInterrupt):
                raise
            for call in dict.fromkeys(request.call for request in rows):
                self.remove(call)
                self.on_failure(call, error)

    def _timed(self, name: str) -> Timed:
        return Timed(self.statistics, name, self.clock)


_EMPTY = DraftTree.empty()
