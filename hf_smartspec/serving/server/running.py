"""A server process: listen, serve, and end in order."""

import asyncio
import signal
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from types import FrameType

import uvicorn
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .errors import ApiError


def listen(host: str, port: int) -> socket.socket:
    """
    The socket of a server, bound before anything is loaded. Port 0 takes a free one.

    Raises:
        OSError: if the address is in use, or none.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
    except BaseException:
        listener.close()
        raise
    return listener


class DrainingServer(uvicorn.Server):
    """
    Ends in order: from SIGTERM or Ctrl-C on, it answers new requests with 503 and finishes what runs, for as long as
    `drain_seconds`; then, or on a second signal, it ends what still runs, and returns.

    Args:
        app: What is served.
        drain_seconds (`int`, *optional*): For what runs at the end; without end, where not given.
        on_start (`Callable`, *optional*): Called once it listens.
    """

    def __init__(
        self,
        app: ASGIApp,
        drain_seconds: int | None = None,
        on_start: Callable[[], None] | None = None,
        log_level: str = "warning",
    ):
        self._app, self._drain_seconds, self._on_start = app, drain_seconds, on_start
        self._drains_since: float | None = None
        config = uvicorn.Config(
            self._answer, interface="asgi3", ws="none", log_level=log_level, server_header=False,
            timeout_graceful_shutdown=1, backlog=2048,
        )  # fmt: skip
        super().__init__(config)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
        elif self._drains_since is not None:
            await _ending().response()(scope, receive, send)
        else:
            await self._answer_whole(scope, receive, send)

    async def _answer_whole(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request; if that is cut off before anything was sent, say so rather than fail."""
        has_begun = False

        async def noted(message: Message) -> None:
            nonlocal has_begun
            has_begun = True
            await send(message)

        try:
            await self._app(scope, receive, noted)
        except asyncio.CancelledError:
            if not has_begun:
                with suppress(Exception):  # the client may have left
                    await _ending().response()(scope, receive, send)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self._drains_since is None:
            self._drains_since = time.monotonic()
        else:
            self.should_exit = True

    async def on_tick(self, counter: int) -> bool:
        if self._drains_since is not None:
            seconds = time.monotonic() - self._drains_since
            is_over = self._drain_seconds is not None and seconds >= self._drain_seconds
            self.should_exit |= is_over or not self.server_state.tasks
        return await super().on_tick(counter)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started and self._on_start is not None:
            self._on_start()

    def serve_until_told(self, listener: socket.socket) -> None:
        """Until SIGTERM or Ctrl-C, which end it without an error. For the main thread."""
        kinds = (signal.SIGTERM, signal.SIGINT)
        before = {kind: signal.signal(kind, _ignore) for kind in kinds}  # uvicorn raises them again at the end
        try:
            self.run(sockets=[listener])
        finally:
            for kind, handler in before.items():
                signal.signal(kind, handler)


def _ignore(*_: object) -> None:
    pass


def _ending() -> ApiError:
    return ApiError(503, "The server is about to end: ask again", retry_after=1)
