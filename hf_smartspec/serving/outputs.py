"""Outputs of requests, and their way from the engine's thread to readers in other threads and event loops."""

import asyncio
import threading
import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace

from ..decoding.call import DecodingCall, Request
from ..decoding.statistics import PHASES, GenerationStatistics
from ..decoding.trace import TracedStep
from ..target_model.compat import GenerationOutput, RequestStatus

_RECOMPUTED_PER_TOKEN = 8  # a resumed request generates a token per so many recomputed ones before it may be suspended


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
    begun: GenerationStatistics | None = None  # the engine's counts when the request began to run
    num_computed: int = 0  # tokens of its text, including those taken from another row
    num_spared: int = 0  # generated tokens before which another namespace's turn does not suspend it

    @property
    def request(self) -> Request:
        return self.call.requests[0]

    def spare_after(self, num_recomputed: int) -> None:
        """Spare a resumed request until it has generated an eighth of the tokens that are computed anew for it."""
        self.num_spared = self.request.num_generated + num_recomputed // _RECOMPUTED_PER_TOKEN

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
    The latest output of every request. A slow reader finds the newest one, in which nothing is missing, so that nothing
    piles up.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._latest: dict[str, EngineOutput] = {}  # of requests that are not finished
        self._finished: dict[str, EngineOutput] = {}  # and not fetched yet, in order
        self._listeners: dict[str, list[tuple[asyncio.AbstractEventLoop, asyncio.Event]]] = {}

    def open(self, output: EngineOutput) -> None:
        """
        Raises:
            ValueError: if the name is in use, by a request that runs or whose result nobody has fetched.
        """
        with self._changed:
            if output.request_id in self:
                raise ValueError(f"`request_id` must be new, got {output.request_id!r}, which is in use.")
            self._latest[output.request_id] = output

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._latest or request_id in self._finished

    def is_open(self, request_id: str | None = None) -> bool:
        """Whether a request, or any, is not finished."""
        return bool(self._latest) if request_id is None else request_id in self._latest

    def put(self, output: EngineOutput) -> None:
        """A newer output of a request, or its last one."""
        with self._changed:
            if output.is_finished():
                if self._latest.pop(output.request_id, None) is None:
                    return  # answered before
                self._finished[output.request_id] = output
            elif output.request_id in self._latest:
                self._latest[output.request_id] = output
            self._changed.notify_all()
            self._wake(output.request_id)

    def _wake(self, request_id: str) -> None:
        for loop, event in self._listeners.get(request_id, []):
            with suppress(RuntimeError):  # the loop is closed: nobody listens any more
                loop.call_soon_threadsafe(event.set)

    def get(self, request_id: str | None = None, timeout: float | None = None) -> EngineOutput | None:
        """
        Takes a finished output away: that of a request, or the first there is. None if it takes longer than `timeout`
        seconds, or if none is to come.
        """

        def is_due() -> bool:
            if request_id is None:
                return bool(self._finished) or not self._latest
            return request_id not in self._latest

        with self._changed:
            self._changed.wait_for(is_due, timeout)
            name = request_id if request_id is not None else next(iter(self._finished), None)
            return None if name is None else self._finished.pop(name, None)

    def discard(self, request_id: str) -> None:
        """Nobody wants the output any more; streams of it end."""
        with self._changed:
            self._latest.pop(request_id, None)
            self._finished.pop(request_id, None)
            self._changed.notify_all()
            self._wake(request_id)

    def wait_until_answered(self, timeout: float | None = None) -> bool:
        """Whether all requests are finished, before `timeout` seconds are over."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._latest, timeout)

    def stream(self, request_id: str) -> Iterator[EngineOutput]:
        """Outputs of one request, each longer than the one before; the last one is finished and thereby fetched."""
        output = self._next(request_id, 0)
        while output is not None:
            yield output
            output = None if output.is_finished() else self._next(request_id, len(output.generated_tokens))

    def _next(self, request_id: str, num_seen: int) -> EngineOutput | None:
        with self._changed:
            self._changed.wait_for(lambda: self._is_newer(request_id, num_seen))
            return self._take(request_id)

    async def stream_async(self, request_id: str) -> AsyncGenerator[EngineOutput, None]:
        """The same for `asyncio`."""
        entry = asyncio.get_running_loop(), asyncio.Event()
        with self._changed:
            self._listeners.setdefault(request_id, []).append(entry)
        try:
            num_seen = 0
            while True:
                with self._changed:
                    is_newer = self._is_newer(request_id, num_seen)
                    output = self._take(request_id) if is_newer else None
                if not is_newer:
                    await entry[1].wait()
                    entry[1].clear()
                    continue
                if output is None:
                    return
                yield output
                num_seen = len(output.generated_tokens)
                if output.is_finished():
                    return
        finally:
            with self._changed:
                self._listeners[request_id].remove(entry)
                if not self._listeners[request_id]:
                    del self._listeners[request_id]

    def _is_newer(self, request_id: str, num_seen: int) -> bool:
        latest = self._latest.get(request_id)
        return latest is None or len(latest.generated_tokens) > num_seen

    def _take(self, request_id: str) -> EngineOutput | None:
        return self._latest.get(request_id) or self._finished.pop(request_id, None)


def failed(output: EngineOutput, reason: str, error: str) -> EngineOutput:
    """Return the last output of a request that was cancelled or has failed."""
    output.status, output.error, output.finish_reason = RequestStatus.FAILED, error, reason
    output.lifespan = (output.lifespan[0], time.perf_counter())
    return output
