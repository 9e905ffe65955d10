"""One of several servers: an engine for each model, and the application, which is called without a socket."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractContextManager, ExitStack, suppress
from typing import Any
from uuid import uuid4

from starlette.types import ASGIApp, Message, Scope

from ...serving.server.app import Server
from .messages import ForwardedRequest, Head
from .private import listen_where_ray_does


class Replica:
    """
    Deployment of one server.

    Args:
        load (`Callable`): Opens a `Server`, in the replica's own process.
    """

    def __init__(self, load: Callable[[], AbstractContextManager[Server]]):
        listen_where_ray_does()
        self.name = uuid4().hex[:8]
        self._open = ExitStack()
        self._server = self._open.enter_context(load())
        self._seen = time.perf_counter(), self._num_generated()

    async def answer(self, request: ForwardedRequest) -> AsyncIterator[Head | bytes]:
        """Yield the head of the answer, then its body, piece by piece."""
        async for part in asked(self._server.app, request):
            yield part

    async def whole_answer(self, request: ForwardedRequest) -> tuple[str, Head, bytes]:
        """Return this replica's name and its complete answer."""
        head, *body = [part async for part in asked(self._server.app, request)]
        assert isinstance(head, Head)
        return self.name, head, b"".join(part for part in body if isinstance(part, bytes))

    def check_health(self) -> None:
        """
        Check that all engines run; raises `RuntimeError` if an engine has stopped; Ray Serve then replaces the replica.
        """
        for name, served in self._server.models.items():
            if not served.engine.is_running:
                raise RuntimeError(f"The engine of {name} has stopped.")

    def record_autoscaling_stats(self) -> dict[str, float]:
        """
        Return `goodput`: mean tokens per second of a running request since the last call (SmartSpec, section 4); empty
        while no request runs.
        """
        now, generated = time.perf_counter(), self._num_generated()
        seconds, tokens = now - self._seen[0], generated - self._seen[1]
        self._seen = now, generated
        running = sum(served.engine.load.num_running for served in self._server.models.values())
        return {"goodput": tokens / seconds / running} if running and tokens and seconds else {}

    def _num_generated(self) -> int:
        return sum(served.engine.statistics.generated_tokens for served in self._server.models.values())

    def close(self) -> None:
        """Stop the engines, after the last request."""
        self._open.close()

    def __del__(self) -> None:  # called by Ray Serve, after the last request
        if hasattr(self, "_open"):
            self.close()


async def asked(app: ASGIApp, request: ForwardedRequest) -> AsyncIterator[Head | bytes]:
    """
    Yield the head of the application's answer, then its body, piece by piece. If the answer is not read to its end, the
    application gets a disconnect. Errors of the application before the end of its answer are raised.
    """
    pieces: asyncio.Queue[Message | None] = asyncio.Queue()
    is_read, has_left = False, asyncio.Event()

    async def receive() -> Message:
        nonlocal is_read
        if not is_read:
            is_read = True
            return {"type": "http.request", "body": request.body, "more_body": False}
        await has_left.wait()
        return {"type": "http.disconnect"}

    async def run() -> None:
        try:
            await app(_scope(request), receive, pieces.put)
        finally:
            pieces.put_nowait(None)

    running = asyncio.create_task(run())
    is_whole = False
    try:
        while (piece := await pieces.get()) is not None:
            if piece["type"] == "http.response.start":
                yield Head(piece["status"], [(bytes(key), bytes(value)) for key, value in piece["headers"]])
            elif piece["type"] == "http.response.body":
                is_whole = not piece.get("more_body", False)
                if piece.get("body"):
                    yield bytes(piece["body"])
        if not is_whole:
            await running
            raise RuntimeError("The application did not answer to the end.")
    finally:
        has_left.set()
        with suppress(Exception):  # the caller has seen it by an incomplete answer or a status
            await running


def _scope(request: ForwardedRequest) -> Scope:
    scope: dict[str, Any] = {"type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "scheme": "http"}
    return scope | {
        "method": request.method, "path": request.path, "raw_path": request.path.encode(), "root_path": "",
        "query_string": request.query, "headers": [(key.lower(), value) for key, value in request.headers],
        "client": None, "server": None,
    }  # fmt: skip
