"""Outputs on their way to readers of a manager: by their handlers, or one queue for all."""

import asyncio
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple

from ...target_model.compat import GenerationOutput
from ..outputs import EngineOutput, Results
from .logprobs import ChosenLogprobs

_POLL = 0.1  # seconds after which who waits looks whether anything is to come


class _Handler(NamedTuple):
    callback: Callable[[GenerationOutput], object]
    loop: asyncio.AbstractEventLoop


class Deliveries:
    """
    Outputs of requests with a handler go there, in its event loop; others wait for `get`, of each request the latest,
    which holds all tokens so far. So nothing piles up before slow readers.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._waiting: dict[str, GenerationOutput] = {}
        self._handlers: dict[str, _Handler] = {}
        self.logprobs: dict[str, ChosenLogprobs] = {}  # of requests whose outputs tell them
        self.unwanted: set[str] = set()  # requests that were cancelled: nothing waits for a reader any more

    def put(self, output: GenerationOutput) -> None:
        """A newer output of a request, or its last one."""
        with self._changed:
            name = output.request_id
            if (recorder := self.logprobs.get(name)) is not None:
                output.logprobs = recorder.of(output.generated_tokens)
            handler = self._handlers.pop(name, None) if output.is_finished() else self._handlers.get(name)
            if handler is not None:
                _call(handler, output)
            elif name not in self.unwanted:
                self._waiting[name] = output
            else:
                self._waiting.pop(name, None)
            if output.is_finished():
                self.unwanted.discard(name)
                self.logprobs.pop(name, None)
            self._changed.notify_all()

    def register(self, request_id: str, callback: Callable[[GenerationOutput], object]) -> None:
        """`callback` gets the request's outputs, in the running event loop; those that wait for a reader at once."""
        handler = _Handler(callback, asyncio.get_running_loop())
        with self._changed:
            output = self._waiting.pop(request_id, None)
            if output is not None:
                _call(handler, output)
            if output is None or not output.is_finished():
                self._handlers[request_id] = handler

    def get(
        self, request_id: str | None, timeout: float | None, is_over: Callable[[], bool]
    ) -> GenerationOutput | None:
        """
        Takes an output away: of a request, or the first there is.

        Args:
            timeout (`float`, *optional*): In seconds; None: as long as it takes.
            is_over (`Callable`): Whether none is to come.
        """
        end = None if timeout is None else time.monotonic() + timeout
        with self._changed:
            while True:
                name = next(iter(self._waiting), None) if request_id is None else request_id
                if name in self._waiting:
                    return self._waiting.pop(name)
                left = _POLL if end is None else min(_POLL, end - time.monotonic())
                if left <= 0 or is_over():
                    return None
                self._changed.wait(left)


def _call(handler: _Handler, output: GenerationOutput) -> None:
    with suppress(RuntimeError):  # the loop is closed: nobody listens any more
        handler.loop.call_soon_threadsafe(handler.callback, output)


class DeliveredResults(Results):
    """Results that nobody fetches: each is delivered the moment it is there."""

    def __init__(self, deliveries: Deliveries):
        super().__init__()
        self._deliveries = deliveries

    def put(self, output: EngineOutput) -> None:
        with self._changed:
            if output.request_id not in self._latest:
                return  # answered before
            self._deliveries.put(output)  # first: who sees that a request is over finds its output
            if output.is_finished():
                del self._latest[output.request_id]
            self._changed.notify_all()

    def is_open(self, request_id: str | None = None) -> bool:
        with self._changed:
            return super().is_open(request_id)

    def unwant(self, request_id: str) -> None:
        """Nobody is to read what a request, if it is open, still gets; the name is then free for others."""
        with self._changed:
            if request_id in self._latest:
                self._deliveries.unwanted.add(request_id)
