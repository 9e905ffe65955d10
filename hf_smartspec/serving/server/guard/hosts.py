"""Host names of the server: checking them keeps foreign pages in a browser from reaching a local server."""

import re
from collections.abc import Collection

from starlette.types import ASGIApp, Receive, Scope, Send

from ..errors import ApiError

_LOOPBACK = ("127.0.0.1", "localhost", "[::1]")
_PORT = re.compile(r":\d+$")


def local_hosts(address: str) -> tuple[str, ...] | None:
    """Return the host names of a loopback address; None for other addresses, which may have any name."""
    return _LOOPBACK if address in ("127.0.0.1", "localhost", "::1") else None


def check_host(scope: Scope, hosts: Collection[str] | None) -> None:
    """Raise `ApiError`, 403, unless the request's `Host` header is one of these hosts."""
    named = next((value.decode("latin-1") for name, value in reversed(scope["headers"]) if name == b"host"), "")
    if hosts is not None and _PORT.sub("", named) not in hosts:
        raise ApiError(403, "This host name is not accepted, since a foreign page may use it: use 127.0.0.1")


class HostGuard:
    """
    Middleware that refuses requests and web sockets for other hosts.

    Args:
        app: The application.
        hosts (collection of `str`): Accepted host names, see `local_hosts`.
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
