"""Outputs of requests, and their way from the engine's thread to readers in other threads and event loops."""

import asyncio
import threading
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial

from ..decoding.call import DecodingCall, Request
from ..decoding.statistics import PHASES, GenerationStatistics
from ..decoding.trace import TracedStep
from ..target_model.compat import GenerationOutput, RequestStatus
from .logprobs import LogprobsRecorder
from .scheduler import TURN

# A resumed request generates a token per so many recomputed ones before it may be suspended, but not for longer than a
# few turns: a long text would keep the short requests of others waiting for thousands of steps.
_RECOMPUTED_PER_TOKEN = 8
_MOST_SPARED = 4 * TURN


@dataclass
class EngineOutput(GenerationOutput):
    """
    transformers' output of a request of continuous batching (`request_id`, `prompt_ids`, `generated_tokens`, `status`,
    `error`, `created_time`, `lifespan`: begin and end of its run, in seconds of `time.perf_counter`), with further
    fields.

    Args:
        finish_reason (`str`, *optional*): "stop" (end of text, a stop string or a criterion), "length", "cancelled" or
            "error"; None while the request runs.
        first_token_time (`float`, *optional*): Time of the first token, on the same clock.
        num_cached_tokens (`int`): Tokens of the prompt whose keys and values were reused.
        statistics (`GenerationStatistics`): The request's steps, drafted and accepted tokens, and seconds since its
            begin.
        token_sources (list, *optional*): With `trace=True`, the label of each token's source ("suffix",
            "prompt_lookup", "draft_model", ...); None for the target's own tokens.
        traced_steps (list of `TracedStep`, *optional*): With `trace=True`, the draft trees of all steps so far.
    """

    finish_reason: str | None = None
    first_token_time: float | None = None
    num_cached_tokens: int = 0
    statistics: GenerationStatistics = field(default_factory=GenerationStatistics)
    token_sources: list[str | None] | None = None
    traced_steps: list[TracedStep] | None = None


@dataclass(eq=False)
class PendingRequest:
    """A request that waits or runs, with its latest output."""

    call: DecodingCall
    output: EngineOutput
    is_streaming: bool = False
    logprobs: LogprobsRecorder | None = None
    begun: GenerationStatistics | None = None  # the engine's counts when the request began to run
    num_computed: int = 0  # tokens of its text, including those taken from another row
    num_spared: int = 0  # generated tokens before which another namespace's turn does not suspend it

    @property
    def request(self) -> Request:
        return self.call.requests[0]

    def spare_after(self, num_recomputed: int) -> None:
        """
        Spare a resumed request until it has generated an eighth of the tokens that are computed anew for it, or four
        turns if these are fewer.
        """
        num_spared = min(num_recomputed // _RECOMPUTED_PER_TOKEN, _MOST_SPARED)
        self.num_spared = self.request.num_generated + num_spared

    def record_time(self, now: float) -> None:
        """Record `now` as the time of the tokens generated since the last call."""
        times = self.output.timestamps
        if times is not None:
            times.extend([now] * (self.request.num_valid - len(times)))

    def statistics(self, engine: GenerationStatistics, now: float) -> GenerationStatistics:
        """Return the request's own counts, and the seconds of the engine's steps since it began."""
        own = replace(self.call.statistics, generated_tokens=self.request.num_valid)
        if self.begun is None:
            return own
        for name in PHASES:
            setattr(own, name, getattr(engine, name) - getattr(self.begun, name))
        start = self.output.lifespan[0]
        own.seconds_prefill, own.seconds_total = (self.output.first_token_time or now) - start, now - start
        return own


class Results:
    """
    The outputs of an engine's requests, from its thread to all readers. Of each request, only the newest output is
    stored: it holds all tokens so far, so that slow readers lose nothing and no queue grows.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._open: dict[str, EngineOutput] = {}  # newest output of each unfinished request
        self._unread: dict[str, EngineOutput] = {}  # newest output that no reader has taken, in order
        self._discarded: set[str] = set()  # requests that still run, but whose outputs are dropped
        self._listeners: dict[str, list[Callable[[], object]]] = {}  # called in the engine's thread, with the lock held

    def open(self, output: EngineOutput) -> None:
        """
        Add a request by its first output.

        Raises:
            ValueError: if a request of this name is unfinished, or its result has not been fetched.
        """
        with self._changed:
            if output.request_id in self:
                raise ValueError(f"`request_id` must be new, got {output.request_id!r}, which is in use.")
            self._open[output.request_id] = output

    def __contains__(self, request_id: str) -> bool:
        with self._changed:
            return request_id in self._open or request_id in self._unread or request_id in self._discarded

    def is_open(self, request_id: str | None = None) -> bool:
        """Return whether a request, or any request, is unfinished."""
        return bool(self._open) if request_id is None else request_id in self._open

    def put(self, output: EngineOutput) -> None:
        """Store a newer output of a request, or its last one."""
        with self._changed:
            name = output.request_id
            if output.is_finished():
                self._discarded.discard(name)
            if (known := self._open.get(name)) is None:
                return  # answered or discarded before
            if output.is_finished():
                del self._open[name]
                self._unread.pop(name, None)  # so that finished outputs are in the order of their ends
            elif len(output.generated_tokens) == len(known.generated_tokens):
                return
            else:
                self._open[name] = output
            self._unread[name] = output
            self._notify(name)

    def _notify(self, request_id: str) -> None:
        self._changed.notify_all()
        listeners = self._listeners.get(request_id, [])
        if request_id not in self._open:
            self._listeners.pop(request_id, None)
        for listener in listeners.copy():
            with suppress(RuntimeError):  # the listener's event loop is closed
                listener()

    def discard(self, request_id: str) -> None:
        """Drop the outputs of a request and end its streams. Its name stays in use until the request has ended."""
        with self._changed:
            if self._open.pop(request_id, None) is not None:
                self._discarded.add(request_id)
            self._unread.pop(request_id, None)
            self._notify(request_id)

    def get(
        self, request_id: str | None = None, timeout: float | None = None, unfinished: bool = False
    ) -> EngineOutput | None:
        """
        Remove and return the finished output of a request, or of the first request that has one. Return None after
        `timeout` seconds, or if no output will come.

        Args:
            unfinished (`bool`): Whether to return unfinished outputs as well. Without `request_id`, this also waits for
                requests that are added meanwhile.
        """

        def find() -> str | None:
            names = self._unread if request_id is None else [request_id] if request_id in self._unread else []
            return next((name for name in names if unfinished or self._unread[name].is_finished()), None)

        def is_over() -> bool:
            return request_id not in self._open if request_id is not None else not (unfinished or self._open)

        with self._changed:
            self._changed.wait_for(lambda: is_over() or find() is not None, timeout)
            name = find()
            return None if name is None else self._unread.pop(name)

    def wait_until_answered(self, timeout: float | None = None) -> bool:
        """Wait until all requests are finished, and return True; False after `timeout` seconds."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._open, timeout)

    def stream(self, request_id: str) -> Iterator[EngineOutput]:
        """Yield outputs of one request, each longer than the one before; the last one is finished."""
        while (output := self.get(request_id, unfinished=True)) is not None:
            yield output
            if output.is_finished():
                return

    async def stream_async(self, request_id: str) -> AsyncGenerator[EngineOutput, None]:
        """Yield the outputs of `stream`, for `async for`."""
        loop, event = asyncio.get_running_loop(), asyncio.Event()
        listener = partial(loop.call_soon_threadsafe, event.set)
        with self._changed:
            self._listeners.setdefault(request_id, []).append(listener)
        try:
            while True:
                event.clear()
                with self._changed:
                    output, is_over = self.get(request_id, 0, unfinished=True), request_id not in self._open
                if output is not None:
                    yield output
                if is_over:
                    return
                if output is None:
                    await event.wait()
        finally:
            with self._changed:
                others = [item for item in self._listeners.pop(request_id, []) if item is not listener]
                if others:
                    self._listeners[request_id] = others

    def deliver(self, request_id: str, callback: Callable[[EngineOutput], object]) -> None:
        """
        Pass the outputs of a request to `callback`, in the running event loop, instead of storing them. An unread
        output is passed at once. The request may also be added later.
        """
        loop = asyncio.get_running_loop()

        def listener() -> None:
            if (output := self.get(request_id, 0, unfinished=True)) is not None:
                loop.call_soon_threadsafe(callback, output)

        with self._changed:
            is_finished = request_id in self._unread and self._unread[request_id].is_finished()
            listener()
            if not is_finished:
                self._listeners.setdefault(request_id, []).append(listener)


def failed(output: EngineOutput, reason: str, error: str) -> EngineOutput:
    """Return the last output of a request that was cancelled or has failed."""
    output.status, output.error, output.finish_reason = RequestStatus.FAILED, error, reason
    output.lifespan = (output.lifespan[0], time.perf_counter())
    return output
