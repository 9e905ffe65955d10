"""The server process: listen, serve, and shut down gracefully."""

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
    Return the socket of a server, bound to an address. Port 0 takes a free port.

    Raises:
        OSError: if the address is in use or invalid.
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
    Server that shuts down gracefully. After SIGTERM or Ctrl-C, it answers new requests with 503 and finishes running
    ones for up to `drain_seconds`; then, or on a second signal, it cancels them and returns.

    Args:
        app: The application.
        drain_seconds (`int`, *optional*): Seconds to finish running requests; unlimited if omitted.
        on_start (`Callable`, *optional*): Called once the server listens.
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
        """Answer a request; if it is cancelled before the answer has begun, answer 503."""
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

    def serve_until_signal(self, listener: socket.socket) -> None:
        """Serve until SIGTERM or Ctrl-C, in the main thread."""
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
    return ApiError(503, "The server is shutting down: try again", retry_after=1)
