"""The engine's thread: takes requests in, steps the loop, hands outputs out."""

import threading
import time
from collections import Counter, deque
from collections.abc import Collection, Hashable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import NamedTuple

import torch
from transformers import PreTrainedModel

from ..decoding.alarm import alarm_of
from ..decoding.call import DecodingCall
from ..decoding.loop import DecodingLoop
from ..goodput.policy import LengthPolicy
from ..log import get_logger
from ..prepare.call import model_limits
from ..target_model.compat import RequestStatus
from ..target_model.forward.ranks import Ranks
from .memory.base import RequestMemory
from .outputs import EngineOutput, Results, Ticket, failed

logger = get_logger(__name__)


class _Work(NamedTuple):
    """Names of requests that come in, and of others that are not wanted any more."""

    new: Sequence[str]
    cancelled: Collection[str]


class EngineRunner:
    """
    Args:
        memory (`RequestMemory`): Who may run, and where.
        policy (`LengthPolicy`): How much to speculate.
        max_prefill_tokens (`int`): Prompt tokens per step.
        results (`Results`): Where outputs go.
        ranks (`Ranks`, *optional*): Who holds the model with this process: all take the same requests in the same
            order, each as soon as the first of them does.
        max_per_namespace (`int`, *optional*): Requests of one namespace that may wait and run at once.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        memory: RequestMemory,
        policy: LengthPolicy,
        max_prefill_tokens: int,
        results: Results,
        ranks: Ranks | None = None,
        max_per_namespace: int | None = None,
    ):
        self.memory, self.results = memory, results
        self._max_per_namespace = max_per_namespace
        self._num_open: Counter[Hashable] = Counter()  # requests that wait or run, by namespace
        self.loop = DecodingLoop(
            policy,
            model_limits(model),
            max_prefill_tokens=max_prefill_tokens,
            on_failure=self._on_failure,
            release=memory.keeper,
            ranks=ranks,
            alarm=alarm_of(model),
        )
        self._ranks = ranks
        self._tickets: dict[DecodingCall, Ticket] = {}  # that wait or run
        self._changed = threading.Condition()
        self._inbox: deque[Ticket] = deque()
        self._cancelled: set[str] = set()
        self._thread: threading.Thread | None = None
        self._is_stopping = self._rests = False
        self._num_pauses = 0
        self.fatal_error: BaseException | None = None
        self.num_answered, self.num_suspended, self.seconds_waited = 0, 0, 0.0

    # From other threads

    @property
    def is_running(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def check_thread(self) -> None:
        """Raises `RuntimeError` in streamers, criteria and processors: who waits for the engine there waits forever."""
        if threading.current_thread() is self._thread:
            raise RuntimeError("An engine cannot be stopped, paused or waited for from one of its own callbacks.")

    def submit(self, ticket: Ticket) -> None:
        """
        Raises:
            ValueError: if the name of the request is in use.
            RuntimeError: if its namespace has as many requests as it may.
        """
        namespace, most = ticket.call.namespace, self._max_per_namespace
        with self._changed:
            if most is not None and self._num_open[namespace] >= most:
                raise RuntimeError(
                    f"The namespace {namespace!r} has {most} requests that wait or run, which are as many as "
                    "`max_requests_per_namespace` allows: wait for one of them to end."
                )
            self.results.open(ticket.output)
            self._num_open[namespace] += 1
            self._cancelled.discard(ticket.output.request_id)  # meant an earlier request of this name
            self._inbox.append(ticket)
            self._changed.notify_all()

    def cancel(self, request_id: str) -> None:
        with self._changed:
            self._cancelled.add(request_id)
            self._changed.notify_all()

    def start(self) -> None:
        with self._changed:
            if not self.is_running:
                self._is_stopping = self._rests = False
                self.fatal_error = None
                self.memory.expire()
                self._thread = threading.Thread(target=self._serve, name="hf-smartspec engine", daemon=True)
                self._thread.start()

    def end(self) -> None:
        """The thread is to end, at once and without anybody waiting for it."""
        with self._changed:
            self._is_stopping = True
            self._changed.notify_all()

    def stop(self) -> None:
        self.end()
        if self._thread is not None:
            self._thread.join()
        with self._changed:
            if not self.is_running:  # else somebody has started it again
                self._take_in()
                self._fail_all("cancelled", "the engine was stopped")

    @contextmanager
    def paused(self) -> Iterator[None]:
        if self._ranks is not None:
            raise NotImplementedError("An engine of a model that several processes hold cannot be paused: stop it.")
        with self._changed:
            self._num_pauses += 1
            self._changed.notify_all()
        try:
            with self._changed:
                self._changed.wait_for(lambda: self._rests or not self.is_running)
            yield
        finally:
            with self._changed:
                self.memory.expire()
                self._num_pauses -= 1
                self._changed.notify_all()

    # The thread

    @torch.no_grad()
    def _serve(self) -> None:
        try:
            while (work := self._next_work()) is not None:
                self._take_in(len(work.new))
                self._cancel(work.cancelled)
                self._admit()
                if self.loop.calls:
                    self._step()
            self._take_in()
            self._fail_all("cancelled", "the engine was stopped")
        except BaseException as error:
            logger.error(f"The engine failed: {error!r}", exc_info=True)
            self.fatal_error = error
            self._take_in()
            self._fail_all("error", repr(error))
        finally:
            with self._changed:
                self._rests = True
                self._changed.notify_all()

    def _next_work(self) -> "_Work | None":
        """What has come meanwhile; waits while there is nothing to do. None if the engine is to stop."""
        if self._ranks is not None and not self._ranks.is_first:
            return self._told_work(self._ranks)
        work = None
        if self._wait_for_work():
            with self._changed:
                work = _Work([ticket.output.request_id for ticket in self._inbox], self._cancelled)
                self._cancelled = set()
        return work if self._ranks is None else self._ranks.broadcast(work)

    def _told_work(self, ranks: Ranks) -> "_Work | None":
        """The first process's work, as soon as the same requests have come here."""
        with self._changed:
            self._rests = True
            self._changed.notify_all()
        work = ranks.broadcast(None)
        with self._changed:
            self._rests = False
            self._changed.wait_for(lambda: work is None or len(self._inbox) >= len(work.new))
            own = [item.output.request_id for item in self._inbox]
        if work is not None and own[: len(work.new)] != work.new:
            raise RuntimeError(f"The first process serves {work.new}, and this one was given {own}.")
        return work

    def _wait_for_work(self) -> bool:
        """Whether there is something to do; False if the engine is to stop."""
        with self._changed:
            while True:
                if self._is_stopping:
                    return False
                if self._num_pauses == 0 and (self._inbox or self._cancelled or self._tickets):
                    self._rests = False
                    return True
                self._rests = True
                self._changed.notify_all()
                self._changed.wait()

    def _take_in(self, number: int | None = None) -> None:
        """The first requests that wait outside, or all."""
        with self._changed:
            number = len(self._inbox) if number is None else number
            tickets = [self._inbox.popleft() for _ in range(number)]
        for ticket in tickets:
            self._tickets[ticket.call] = ticket
            self.memory.scheduler.add(ticket, self.memory.size_of(ticket.call), ticket.call.namespace)

    def _cancel(self, names: Collection[str]) -> None:
        for ticket in [ticket for ticket in self._tickets.values() if ticket.output.request_id in names]:
            self._fail(ticket, "cancelled", "the request was cancelled")

    def _admit(self) -> None:
        """Requests begin, or go on, in their turn, as long as there is room or others give way."""
        try:
            self.memory.check_weights(self.loop.running)
        except Exception as error:
            self._fail_running(error)
        while (ticket := self.memory.next(self.loop.running, self._suspend)) is not None:
            try:
                self._begin(ticket)
            except Exception as error:
                self._on_failure(ticket.call, error)
        self.loop.num_waiting = self.memory.scheduler.num_waiting

    def _begin(self, ticket: Ticket) -> None:
        output, request = ticket.output, ticket.request
        output.status = RequestStatus.PREFILLING if output.first_token_time is None else RequestStatus.DECODING
        if not request.is_resumed:
            now = time.perf_counter()
            output.lifespan = (now, -1)
            ticket.begun = replace(self.loop.statistics)
            self.seconds_waited += now - output.created_time
        self.memory.place(request, self.loop.running)
        if request.is_resumed:
            encoded = ticket.call.encoded_text(request)  # which the encoder has read anew
            ticket.spare_after(request.num_uncached + (0 if encoded is None else len(encoded)))
            self.loop.resume(ticket.call)
        else:
            self.loop.add(ticket.call)
            output.num_cached_tokens = ticket.num_computed = request.cache_row.length
        self.memory.settle(request)

    def _suspend(self, ticket: Ticket) -> None:
        """A request gives way to one of another namespace. It waits, and goes on from its text."""
        self.num_suspended += 1
        ticket.output.status = RequestStatus.PENDING
        try:
            self.loop.suspend(ticket.call)
            self.memory.suspend(ticket.request)
        except Exception as error:
            self._on_failure(ticket.call, error)

    def _step(self) -> None:
        try:
            ended = self.loop.step()
        except Exception as error:
            self._fail_running(error)
            return
        for call in ended:
            self._charge(self._tickets[call])
            self._finish(self._tickets[call])
        now = time.perf_counter()
        for call in self.loop.calls:
            ticket = self._tickets[call]
            self._charge(ticket)
            ticket.note(now)
            if ticket.request.num_generated and ticket.output.first_token_time is None:
                ticket.output.first_token_time, ticket.output.status = now, RequestStatus.DECODING
            if ticket.is_streaming and ticket.request.num_generated:
                self.results.put(self._snapshot(ticket, now))

    def _charge(self, ticket: Ticket) -> None:
        """Counts the tokens of its text that were computed for the first time, as its namespace's."""
        request = ticket.request
        length = request.length if request.row is None else request.row.length
        if length > ticket.num_computed:
            self.memory.scheduler.charge(ticket, length - ticket.num_computed)
            ticket.num_computed = length

    def _fail_running(self, error: Exception) -> None:
        """A forward has failed, and nobody knows by whose fault."""
        logger.warning(f"A step of the engine failed; the requests that ran in it end with an error: {error!r}")
        for ticket in list(self.memory.scheduler.running):
            if ticket.call.batch.is_reported:  # it had come to its end before
                self._finish(ticket)
            else:
                self._on_failure(ticket.call, error)
        self.memory.reset()

    def _snapshot(self, ticket: Ticket, now: float) -> EngineOutput:
        """The output so far; what has been handed out does not change any more."""
        request, trace = ticket.request, ticket.request.trace
        tokens = request.tokens[: request.num_valid]
        statistics = ticket.statistics(self.loop.statistics, now)
        output = replace(ticket.output, generated_tokens=tokens, statistics=statistics)
        if output.timestamps is not None:
            output.timestamps = output.timestamps[: len(tokens)]
        if trace is not None:
            output.token_sources, output.traced_steps = trace.traced()
        return output

    def _finish(self, ticket: Ticket) -> None:
        self._leave(ticket)
        now, request = time.perf_counter(), ticket.request
        ticket.note(now)
        output = self._snapshot(ticket, now)
        output.status, output.lifespan = RequestStatus.FINISHED, (output.lifespan[0], now)
        output.first_token_time = output.first_token_time or now
        is_full = request.num_valid == request.max_new_tokens and not ticket.call.batch.ends_text(request)
        output.finish_reason = "length" if is_full else "stop"
        self._answer(ticket, output)

    def _on_failure(self, call: DecodingCall, error: Exception) -> None:
        self._fail(self._tickets[call], "error", repr(error))

    def _fail_all(self, reason: str, error: str) -> None:
        for ticket in list(self._tickets.values()):
            self._fail(ticket, reason, error)

    def _fail(self, ticket: Ticket, reason: str, error: str) -> None:
        self._leave(ticket)
        self._answer(ticket, failed(self._snapshot(ticket, time.perf_counter()), reason, error))

    def _leave(self, ticket: Ticket) -> None:
        """The request neither waits nor runs any more."""
        del self._tickets[ticket.call]
        with self._changed:
            self._num_open -= Counter([ticket.call.namespace])  # those that have none any more are forgotten
        self.memory.scheduler.remove(ticket)
        self.loop.num_waiting = self.memory.scheduler.num_waiting
        if ticket.call in self.loop.calls or ticket.call in self.loop.suspended:
            try:
                self.loop.remove(ticket.call)
            except Exception as error:  # of a policy, say; the request is answered all the same
                logger.warning(f"A request could not leave the engine in order: {error!r}")

    def _answer(self, ticket: Ticket, output: EngineOutput) -> None:
        streamer = ticket.call.batch.streamer
        if streamer is not None:
            with suppress(Exception):  # the reader's own trouble
                streamer.end()
        self.num_answered += 1
        self.results.put(output)
