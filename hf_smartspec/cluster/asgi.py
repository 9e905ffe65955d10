"""An application, asked without a socket."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

from starlette.types import ASGIApp, Message, Scope

from .messages import ForwardedRequest, Head


async def asked(app: ASGIApp, request: ForwardedRequest) -> AsyncIterator[Head | bytes]:
    """
    The head of the application's answer, then its body, piece by piece as it comes. Whoever stops reading has left:
    the application is told so.

    Raises:
        Exception: the application's own, if it fails before the end of its answer.
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
        with suppress(Exception):  # known to whoever asked: by what is missing, or by a status
            await running


def _scope(request: ForwardedRequest) -> Scope:
    scope: dict[str, Any] = {"type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "scheme": "http"}
    return scope | {
        "method": request.method, "path": request.path, "raw_path": request.path.encode(), "root_path": "",
        "query_string": request.query, "headers": [(key.lower(), value) for key, value in request.headers],
        "client": None, "server": None,
    }  # fmt: skip
