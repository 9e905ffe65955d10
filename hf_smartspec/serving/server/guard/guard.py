"""Middleware in front of the application: checks keys and sizes of bodies, and ends requests of absent clients."""

import asyncio
from collections import Counter
from collections.abc import Collection
from contextlib import suppress
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..errors import ApiError
from .hosts import check_host
from .keys import CALLER, ApiKeys

_OPEN = frozenset(["/health", "/ping"])  # health checks, which need no key
_BODY_SECONDS = 30.0  # until a whole body must have arrived
_DROP_SECONDS = 1.0  # in which the rest of a refused body is dropped
_LARGEST_HELD = 16  # bound on all bodies, in bodies of the largest size; a quarter per key
_SMALL = 2**16  # bytes of a whole body that is never refused: the number of open requests bounds these


class Guard:
    """
    Middleware that checks key and host before it reads a body, passes only whole bodies on, and cancels the handling of
    a request whose client has left. The bytes of all bodies are bounded, from their first piece to their answer's end.

    Args:
        app: The application.
        keys (`ApiKeys`): API keys of clients.
        max_body_bytes (`int`): Largest body of a request.
        hosts (collection of `str`, *optional*): Host names that requests may name; any, if omitted.
    """

    def __init__(
        self,
        app: ASGIApp,
        keys: ApiKeys,
        max_body_bytes: int,
        hosts: Collection[str] | None = None,
    ):
        self.app, self.keys, self.max_body_bytes, self.hosts = app, keys, max_body_bytes, hosts
        self._held: Counter[str] = Counter()  # bytes of open requests' bodies, by namespace

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        is_open = scope["path"] in _OPEN  # to clients without a key: their bodies are not read
        try:
            namespace = "" if is_open else self._admit(scope)
            body = [b""] if is_open else await self._body_in_time(scope, receive, namespace)
        except (ApiError, TimeoutError) as error:
            refusal = error if isinstance(error, ApiError) else ApiError(408, "The body did not arrive in time")
            last = closing_connection(send)
            if refusal.status in (413, 503):  # refused for their size; without a key, nothing is read
                last = _dropping_body(receive, last)
            await refusal.response()(scope, receive, last)
            return
        if not body:
            return
        size = len(body[0])  # what the request holds until its answer ends is about as large
        self._held[namespace] += size
        try:
            await _run(self.app, scope, body, receive, closing_connection(send) if is_open else send)
        finally:
            self._held[namespace] -= size

    async def _body_in_time(self, scope: Scope, receive: Receive, namespace: str) -> list[bytes]:
        """Return the body in a list, from which it is taken later; an empty list if the client leaves."""
        body = await asyncio.wait_for(self._body(scope, receive, namespace), _BODY_SECONDS)
        return [] if body is None else [body]

    def _admit(self, scope: Scope) -> str:
        """Set `CALLER` to the sender of a request, and return its namespace."""
        check_host(scope, self.hosts)
        caller = self.keys.caller(_header(scope, b"authorization"))
        if caller is None:
            raise ApiError(401, "This server needs an API key: Authorization: Bearer KEY", code="invalid_api_key")
        CALLER.set(caller)
        return caller.namespace

    async def _body(self, scope: Scope, receive: Receive, namespace: str) -> bytes | None:
        """Return the whole body; None if the client leaves before its end."""
        length = _header(scope, b"content-length") or "0"
        if length.isdigit() and int(length[:20]) > self.max_body_bytes:
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
                has_more = message.get("more_body", False)
                if has_more or len(body) > _SMALL:
                    self._check_held(namespace)
                if not has_more:
                    return bytes(body)
        finally:
            self._held[namespace] -= len(body)

    def _check_held(self, namespace: str) -> None:
        """
        Refuse a key that holds more than a quarter of the bound or, if all keys together exceed the bound, more than
        its equal part: so a late key finds room even if others hold all of it. All keys together hold at most twice
        the bound.
        """
        most, held, total = _LARGEST_HELD * self.max_body_bytes, self._held[namespace], self._held.total()
        own = most // 4 if len(self.keys) > 1 else most
        if total > most:
            own = min(own, most // sum(number > 0 for number in self._held.values()))
        if held > own or total > 2 * most:
            raise ApiError(503, "Too many large requests are arriving: try again", retry_after=1)

    def _too_large(self) -> ApiError:
        return ApiError(413, f"The body is larger than {self.max_body_bytes} bytes")


def closing_connection(send: Send) -> Send:
    """Return `send` for an answer after which the connection is closed."""

    async def send_last(message: Message) -> None:
        if message["type"] == "http.response.start":
            message = {**message, "headers": [*message["headers"], (b"connection", b"close")]}
        await send(message)

    return send_last


def _dropping_body(receive: Receive, send: Send) -> Send:
    """
    Return `send` for an answer to a body that is still arriving: if the connection were closed at once, the client
    would get a reset connection in place of the answer.
    """

    async def drop() -> None:
        while (message := await receive())["type"] != "http.disconnect" and message.get("more_body", False):
            pass

    async def send_last(message: Message) -> None:
        if message["type"] == "http.response.body" and not message.get("more_body", False):
            await send({**message, "more_body": True})
            with suppress(TimeoutError):
                await asyncio.wait_for(drop(), _DROP_SECONDS)
            message = {"type": "http.response.body", "body": b"", "more_body": False}
        await send(message)

    return send_last


async def _run(app: ASGIApp, scope: Scope, body: list[bytes], receive: Receive, send: Send) -> None:
    """Run the application as long as the client waits. It takes the body out of the list, to free it early."""
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
