"""The engine's thread: accept requests, run steps of the loop, publish outputs."""

import math
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
from ..decoding.policy_rows import most_running
from ..goodput.policy import LengthPolicy
from ..log import get_logger
from ..prepare.call import model_limits
from ..target_model.compat import RequestStatus
from ..target_model.forward.ranks import Ranks
from .memory.base import RequestMemory
from .outputs import EngineOutput, PendingRequest, Results, failed

logger = get_logger(__name__)


class _Work(NamedTuple):
    """Names of new requests, and of requests to cancel."""

    new: Sequence[str]
    cancelled: Collection[str]


class EngineRunner:
    """
    Thread that serves an engine's requests.

    Args:
        model (`PreTrainedModel`): The target.
        memory (`RequestMemory`): Decides which requests run, and holds their caches.
        policy (`LengthPolicy`): Decides how much to speculate.
        max_prefill_tokens (`int`): Prompt tokens per step.
        results (`Results`): Receives outputs.
        ranks (`Ranks`, *optional*): The processes that hold the model together: all accept the same requests in the
            same order, each as soon as the first of them does.
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
            release=memory.release,
            ranks=ranks,
            alarm=alarm_of(model),
        )
        self._ranks = ranks
        self._pending: dict[DecodingCall, PendingRequest] = {}  # requests that wait or run
        self._changed = threading.Condition()
        self._inbox: deque[PendingRequest] = deque()
        self._cancelled: set[str] = set()
        self.session: threading.Thread | None = None  # the thread that was started last
        self._is_stopping = self._is_idle = False
        self._num_pauses = 0
        self.fatal_error: BaseException | None = None
        self.num_answered, self.num_suspended, self.seconds_waited = 0, 0, 0.0

    # From other threads

    @property
    def is_running(self) -> bool:
        return self.session is not None and self.session.is_alive()

    @property
    def waiting(self) -> list[str]:
        """Return the names of waiting requests, including those in the inbox."""
        waiting = [*list(self._inbox), *self.memory.scheduler.waiting]
        return [pending.output.request_id for pending in waiting]

    def check_thread(self) -> None:
        """Raise `RuntimeError` in streamers, criteria and processors: waiting for the engine there would deadlock."""
        if threading.current_thread() is self.session:
            raise RuntimeError("An engine cannot be stopped, paused or waited for from one of its own callbacks.")

    def submit(self, pending: PendingRequest) -> None:
        """
        Queue a request.

        Raises:
            ValueError: if the name of the request is in use.
            RuntimeError: if its namespace has `max_per_namespace` requests already.
        """
        namespace, most = pending.call.namespace, self._max_per_namespace
        with self._changed:
            if most is not None and self._num_open[namespace] >= most:
                raise RuntimeError(
                    f"The namespace {namespace!r} has {most} requests that wait or run, as many as "
                    "`max_requests_per_namespace` allows: wait for one of them to end."
                )
            self.results.open(pending.output)
            self._num_open[namespace] += 1
            self._cancelled.discard(pending.output.request_id)  # a cancellation of an earlier request of this name
            self._inbox.append(pending)
            self._changed.notify_all()

    def cancel(self, request_id: str) -> None:
        with self._changed:
            self._cancelled.add(request_id)
            self._changed.notify_all()

    def start(self) -> None:
        with self._changed:
            if not self.is_running:
                self._is_stopping = self._is_idle = False
                self.fatal_error = None
                self.memory.expire()
                self.session = threading.Thread(target=self._serve, name="hf-smartspec engine", daemon=True)
                self.session.start()

    def ask_to_end(self) -> None:
        """Ask the thread to end, without waiting for it."""
        with self._changed:
            self._is_stopping = True
            self._changed.notify_all()

    def stop(self, session: threading.Thread | None) -> None:
        """End a session and wait for its end; nothing happens if another one has begun since."""
        with self._changed:
            if self.session is not session:
                return
            self.ask_to_end()
        if session is not None:
            session.join()
        with self._changed:
            if not self.is_running:  # else another thread has started it again
                self._schedule_new()
                self._fail_all("cancelled", "the engine was stopped")

    @contextmanager
    def paused(self) -> Iterator[None]:
        if self._ranks is not None:
            raise NotImplementedError("An engine cannot be paused when several processes hold its model: stop it.")
        with self._changed:
            self._num_pauses += 1
            self._changed.notify_all()
        try:
            with self._changed:
                self._changed.wait_for(lambda: self._is_idle or not self.is_running)
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
                self._schedule_new(len(work.new))
                self._cancel(work.cancelled)
                self._admit()
                if self.loop.calls:
                    self._step()
            self._schedule_new()
            self._fail_all("cancelled", "the engine was stopped")
        except BaseException as error:
            logger.error(f"The engine failed: {error!r}", exc_info=True)
            self.fatal_error = error
            self._schedule_new()
            self._fail_all("error", repr(error))
        finally:
            with self._changed:
                self._is_idle = True
                self._changed.notify_all()

    def _next_work(self) -> "_Work | None":
        """Wait for work and return it; None if the engine is to stop."""
        if self._ranks is not None and not self._ranks.is_first:
            return self._work_of_first_rank(self._ranks)
        work = None
        if self._wait_for_work():
            with self._changed:
                work = _Work([pending.output.request_id for pending in self._inbox], self._cancelled)
                self._cancelled = set()
        return work if self._ranks is None else self._ranks.broadcast(work)

    def _work_of_first_rank(self, ranks: Ranks) -> "_Work | None":
        """Return the first process's work, as soon as this process has been given the same requests."""
        with self._changed:
            self._is_idle = True
            self._changed.notify_all()
        work = ranks.broadcast(None)
        with self._changed:
            self._is_idle = False
            self._changed.wait_for(lambda: work is None or len(self._inbox) >= len(work.new))
            own = [item.output.request_id for item in self._inbox]
        if work is not None and own[: len(work.new)] != work.new:
            raise RuntimeError(f"The first process serves the requests {work.new}, but this process was given {own}.")
        return work

    def _wait_for_work(self) -> bool:
        """Wait for work and return True; return False if the engine is to stop."""
        with self._changed:
            while True:
                if self._is_stopping:
                    return False
                if self._num_pauses == 0 and (self._inbox or self._cancelled or self._pending):
                    self._is_idle = False
                    return True
                self._is_idle = True
                self._changed.notify_all()
                self._changed.wait()

    def _schedule_new(self, number: int | None = None) -> None:
        """Hand requests from the inbox to the scheduler: the first `number`, or all."""
        with self._changed:
            number = len(self._inbox) if number is None else number
            new = [self._inbox.popleft() for _ in range(number)]
        for pending in new:
            self._pending[pending.call] = pending
            self.memory.scheduler.add(pending, self.memory.size_of(pending.call), pending.call.namespace)

    def _cancel(self, names: Collection[str]) -> None:
        for pending in [pending for pending in self._pending.values() if pending.output.request_id in names]:
            self._fail(pending, "cancelled", "the request was cancelled")

    def _admit(self) -> None:
        """Begin or resume waiting requests in turn, as long as there is room or other requests give way."""
        try:
            may_wait = self._ranks is None and not self.memory.scheduler.num_waiting  # processes must look together
            self.memory.check_weights(self.loop.running, may_wait)
            self.memory.keep_states(self.loop.running)
        except Exception as error:
            self._fail_running(error)
        scheduler, most = self.memory.scheduler, self._most_running()
        while (
            len(scheduler.running) < most
            and (pending := self.memory.next(self.loop.running, self._suspend)) is not None
        ):
            try:
                self._begin(pending)
            except Exception as error:
                self._on_failure(pending.call, error)
        self.loop.num_waiting = scheduler.num_waiting

    def _most_running(self) -> float:
        """Return how many requests may run, by the policy; infinity where it leaves that to the scheduler."""
        if not self.loop.policy.chooses_batches or self._ranks is not None:  # processes would choose differently
            return math.inf
        scheduler = self.memory.scheduler
        waiting, num_fitting = scheduler.queue()
        requests = [pending.request for pending in waiting]
        most = most_running(self.loop.policy, self.loop.running, requests, num_fitting)
        return max(most, len(scheduler.running) + scheduler.num_without_rows)  # so that no tenant waits for others'

    def _begin(self, pending: PendingRequest) -> None:
        output, request = pending.output, pending.request
        output.status = RequestStatus.PREFILLING if output.first_token_time is None else RequestStatus.DECODING
        if not request.is_resumed:
            now = time.perf_counter()
            output.lifespan = (now, -1)
            pending.begun = replace(self.loop.statistics)
            self.seconds_waited += now - output.created_time
        self.memory.place(request, self.loop.running)
        if request.is_resumed:
            encoded = pending.call.encoded_text(request)  # the encoder has read it anew
            pending.spare_after(request.num_uncached + (0 if encoded is None else len(encoded)))
            self.loop.resume(pending.call)
        else:
            self.loop.add(pending.call)
            output.num_cached_tokens = pending.num_computed = request.cache_row.length
        self.memory.finish_placement(request)

    def _suspend(self, pending: PendingRequest) -> None:
        """Suspend a running request in favour of another namespace; it waits, and resumes from its text."""
        self.num_suspended += 1
        pending.output.status = RequestStatus.PENDING
        try:
            self.loop.suspend(pending.call)
            self.memory.suspend(pending.request)
        except Exception as error:
            self._on_failure(pending.call, error)

    def _step(self) -> None:
        try:
            ended = self.loop.step()
        except Exception as error:
            self._fail_running(error)
            return
        for call in ended:
            self._charge(self._pending[call])
            self._finish(self._pending[call])
        now = time.perf_counter()
        for call in self.loop.calls:
            pending = self._pending[call]
            self._charge(pending)
            pending.record_time(now)
            if pending.request.num_generated and pending.output.first_token_time is None:
                pending.output.first_token_time, pending.output.status = now, RequestStatus.DECODING
            if pending.is_streaming and pending.request.num_generated:
                self.results.put(self._snapshot(pending, now))

    def _charge(self, pending: PendingRequest) -> None:
        """Charge the request's namespace for the tokens that were computed for the first time."""
        request = pending.request
        length = request.length if request.row is None else request.row.length
        if length > pending.num_computed:
            self.memory.scheduler.charge(pending, length - pending.num_computed)
            pending.num_computed = length

    def _fail_running(self, error: Exception) -> None:
        """End all running requests with an error, since any of them may have caused the failure of the forward."""
        logger.warning(f"A step of the engine failed, and its requests end with an error: {error!r}")
        for pending in list(self.memory.scheduler.running):
            if pending.call.batch.is_reported:  # it was complete before the failure
                self._finish(pending)
            else:
                self._on_failure(pending.call, error)
        self.memory.reset()

    def _snapshot(self, pending: PendingRequest, now: float) -> EngineOutput:
        """Return a copy of the output so far, which does not change later."""
        request, trace = pending.request, pending.request.trace
        tokens = request.tokens[: request.num_valid]
        statistics = pending.statistics(self.loop.statistics, now)
        output = replace(pending.output, generated_tokens=tokens, statistics=statistics)
        if output.timestamps is not None:
            output.timestamps = output.timestamps[: len(tokens)]
        if pending.logprobs is not None:
            output.logprobs = [item.logprob for item in pending.logprobs.of(tokens)]
        if trace is not None:
            output.token_sources, output.traced_steps = trace.traced()
        return output

    def _finish(self, pending: PendingRequest) -> None:
        self._remove(pending)
        now, request = time.perf_counter(), pending.request
        pending.record_time(now)
        output = self._snapshot(pending, now)
        output.status, output.lifespan = RequestStatus.FINISHED, (output.lifespan[0], now)
        output.first_token_time = output.first_token_time or now
        is_full = request.num_valid == request.max_new_tokens and not pending.call.batch.ends_text(request)
        output.finish_reason = "length" if is_full else "stop"
        self._answer(pending, output)

    def _on_failure(self, call: DecodingCall, error: BaseException) -> None:
        self._fail(self._pending[call], "error", repr(error))

    def _fail_all(self, reason: str, error: str) -> None:
        for pending in list(self._pending.values()):
            self._fail(pending, reason, error)

    def _fail(self, pending: PendingRequest, reason: str, error: str) -> None:
        self._remove(pending)
        self._answer(pending, failed(self._snapshot(pending, time.perf_counter()), reason, error))

    def _remove(self, pending: PendingRequest) -> None:
        """Remove a request that has ended from scheduler and loop."""
        del self._pending[pending.call]
        with self._changed:
            self._num_open -= Counter([pending.call.namespace])  # subtraction drops namespaces without requests
        self.memory.scheduler.remove(pending)
        self.loop.num_waiting = self.memory.scheduler.num_waiting
        if pending.call in self.loop.calls or pending.call in self.loop.suspended:
            try:
                self.loop.remove(pending.call)
            except Exception as error:  # a policy's, for example; the request is still answered
                logger.warning(f"An ended request could not be removed cleanly from the engine: {error!r}")

    def _answer(self, pending: PendingRequest, output: EngineOutput) -> None:
        streamer = pending.call.batch.streamer
        if streamer is not None:
            with suppress(Exception, SystemExit):  # errors of a user's streamer do not concern the engine
                streamer.end()
        self.num_answered += 1
        self.results.put(output)
