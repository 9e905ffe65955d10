"""Names under which this machine is known: browsers open foreign pages, under names of their own."""

import re
from collections.abc import Collection

from starlette.types import ASGIApp, Receive, Scope, Send

from ..errors import ApiError

_LOOPBACK = ("127.0.0.1", "localhost", "[::1]")
_PORT = re.compile(r":\d+$")


def local_hosts(address: str) -> tuple[str, ...] | None:
    """The names of this machine, if only it can reach an address; None for others, which may have any."""
    return _LOOPBACK if address in ("127.0.0.1", "localhost", "::1") else None


def check_host(scope: Scope, hosts: Collection[str] | None) -> None:
    """Raises `ApiError`, 403, unless a request names one of these hosts."""
    named = next((value.decode("latin-1") for name, value in reversed(scope["headers"]) if name == b"host"), "")
    if hosts is not None and _PORT.sub("", named) not in hosts:
        raise ApiError(403, "Not known under this name, which a foreign page may have: ask for 127.0.0.1")


class HostGuard:
    """
    Refuses requests, and web sockets, that name other hosts.

    Args:
        app: The application.
        hosts (collection of `str`): As of `local_hosts`.
    """

    def __init__(self, app: ASGIApp, hosts: Collection[str]):
        self.app, self.hosts = app, hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            if scope["type"] in ("http", "websocket"):
                check_host(scope, self.hosts)
        except ApiError as error:
            if scope["type"] == "websocket":
                await send({"type": "websocket.close", "code": 1008})
            else:
                await error.response()(scope, receive, send)
            return
        await self.app(scope, receive, send)
