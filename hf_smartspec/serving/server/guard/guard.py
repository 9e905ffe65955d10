"""What stands before the application: keys, the size of bodies, and clients that leave."""

import asyncio
from collections import Counter
from collections.abc import Collection
from contextlib import suppress
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..errors import ApiError
from .caller import CALLER
from .hosts import check_host
from .keys import ApiKeys

_OPEN = frozenset(["/health", "/ping"])  # for whoever watches the server
_BODY_SECONDS = 30.0  # in which a body must have come
_LARGEST_HELD = 16  # bodies of the largest size, as whose bytes all that are not whole yet may hold; a quarter per key


class Guard:
    """
    Looks at key and host before it reads, reads the whole body before anything else begins, and ends the handling of a
    request whose client has left. The bytes of all bodies that are not whole yet are bounded.

    Args:
        app: The application.
        keys (`ApiKeys`): Who may ask.
        max_body_bytes (`int`): Of a request.
        hosts (collection of `str`, *optional*): Names under which clients must know the server; any, where not given.
        keeps_bodies (`bool`): Whether the application keeps bodies until it has answered: they count as long.
    """

    def __init__(
        self,
        app: ASGIApp,
        keys: ApiKeys,
        max_body_bytes: int,
        hosts: Collection[str] | None = None,
        keeps_bodies: bool = False,
    ):
        self.app, self.keys, self.max_body_bytes, self.hosts = app, keys, max_body_bytes, hosts
        self.keeps_bodies = keeps_bodies
        self._held: Counter[str] = Counter()  # bytes of bodies that are read or kept, by namespace

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        is_open = scope["path"] in _OPEN  # to all, so that no body of it is read
        try:
            namespace = "" if is_open else self._admit(scope)
            body = [b""] if is_open else await self._body_in_time(scope, receive, namespace)
        except (ApiError, TimeoutError) as error:
            refusal = error if isinstance(error, ApiError) else ApiError(408, "The body did not come")
            await refusal.response()(scope, receive, closing(send))  # nobody reads the rest of the body
            return
        if not body:
            return
        size = len(body[0]) if self.keeps_bodies else 0
        self._held[namespace] += size
        try:
            await _run(self.app, scope, body, receive, closing(send) if is_open else send)
        finally:
            self._held[namespace] -= size

    async def _body_in_time(self, scope: Scope, receive: Receive, namespace: str) -> list[bytes]:
        """Return the body, as the only item of a list, from which it is taken; none if the client leaves before."""
        body = await asyncio.wait_for(self._body(scope, receive, namespace), _BODY_SECONDS)
        return [] if body is None else [body]

    def _admit(self, scope: Scope) -> str:
        """Return the namespace of whose request it is; what begins from here on knows the caller."""
        check_host(scope, self.hosts)
        caller = self.keys.caller(_header(scope, b"authorization"))
        if caller is None:
            raise ApiError(401, "This server needs an API key: Authorization: Bearer KEY", code="invalid_api_key")
        CALLER.set(caller)
        return caller.namespace

    async def _body(self, scope: Scope, receive: Receive, namespace: str) -> bytes | None:
        """None if the client leaves before."""
        told = _header(scope, b"content-length") or "0"
        if told.isdigit() and int(told[:20]) > self.max_body_bytes:
            raise self._too_large()
        body = bytearray()
        try:
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    return None
                piece = message.get("body", b"")
                body += piece
                self._held[namespace] += len(piece)
                if len(body) > self.max_body_bytes:
                    raise self._too_large()
                if not message.get("more_body", False):
                    return bytes(body)
                self._check_held(namespace)
        finally:
            self._held[namespace] -= len(body)

    def _check_held(self, namespace: str) -> None:
        """
        Refuse a key that holds more than a quarter of the bound, or, beyond the bound, more than its equal part: a key
        that comes late finds room although others hold all of it. Twice the bound is held by nobody.
        """
        most, held, total = _LARGEST_HELD * self.max_body_bytes, self._held[namespace], self._held.total()
        own = most // 4 if len(self.keys) > 1 else most
        if total > most:
            own = min(own, most // sum(number > 0 for number in self._held.values()))
        if held > own or total > 2 * most:
            raise ApiError(503, "Too many large requests are on their way: ask again", retry_after=1)

    def _too_large(self) -> ApiError:
        return ApiError(413, f"The body is larger than {self.max_body_bytes} bytes")


def closing(send: Send) -> Send:
    """Return `send` for an answer after which the connection is closed."""

    async def send_last(message: Message) -> None:
        if message["type"] == "http.response.start":
            message = {**message, "headers": [*message["headers"], (b"connection", b"close")]}
        await send(message)

    return send_last


async def _run(app: ASGIApp, scope: Scope, body: list[bytes], receive: Receive, send: Send) -> None:
    """Run the application as long as the client waits. The body is there already, and is not held on to."""
    left = asyncio.Event()

    async def read() -> Message:
        if body:
            return {"type": "http.request", "body": body.pop(), "more_body": False}
        await left.wait()
        return {"type": "http.disconnect"}

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        left.set()

    handling: asyncio.Task[None] = asyncio.ensure_future(app(scope, read, send))
    watching = asyncio.create_task(watch())
    try:
        await asyncio.wait({handling, watching}, return_when=asyncio.FIRST_COMPLETED)
        if not handling.done():
            handling.cancel()
        with suppress(asyncio.CancelledError):
            await handling
    finally:
        for task in (handling, watching):
            task.cancel()


def _header(scope: Scope, name: bytes) -> str | None:
    values: list[Any] = [value for key, value in scope["headers"] if key == name]
    return values[-1].decode("latin-1") if values else None
