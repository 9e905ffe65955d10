"""A server process: listen, serve, and end in order."""

import signal
import socket
from collections.abc import Callable

import uvicorn
from fastapi import FastAPI


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
    Ends in order: on SIGTERM or Ctrl-C it takes no new connection, finishes what runs, and returns; a second Ctrl-C, or
    `drain_seconds`, ends what still runs.

    Args:
        app (`FastAPI`): What is served.
        drain_seconds (`int`, *optional*): For what runs at the end.
        on_start (`Callable`, *optional*): Called once it listens.
    """

    def __init__(
        self,
        app: FastAPI,
        drain_seconds: int | None = None,
        on_start: Callable[[], None] | None = None,
        log_level: str = "warning",
    ):
        config = uvicorn.Config(
            app, ws="none", log_level=log_level, server_header=False, timeout_graceful_shutdown=drain_seconds,
            backlog=2048,
        )  # fmt: skip
        super().__init__(config)
        self._on_start = on_start

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
