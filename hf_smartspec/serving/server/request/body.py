"""Read bodies of requests as JSON and check them; large ones in a thread beside the event loop."""

import asyncio
import gc
import re
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from weakref import WeakKeyDictionary

from fastapi import Request
from pydantic import ValidationError
from pydantic_core import from_json

from ..errors import ApiError, validation_error
from ..guard.keys import CALLER
from .fields import Kind, log_ignored

_SMALL = 2**16  # bytes that are read in less time than another thread takes to answer
_JSON = re.compile(r"application/(json|[\w.-]+\+json)\s*(;|$)", re.IGNORECASE)
# One thread: with several, the event loop would wait for each of them to release the interpreter's lock.
_READER = ThreadPoolExecutor(1, "bodies")
_TURNS: WeakKeyDictionary[asyncio.AbstractEventLoop, defaultdict[str, asyncio.Lock]] = WeakKeyDictionary()
_MOST_CONTAINERS = 2**17  # lists and objects of a body: each takes 20 times the memory of its two characters


async def read(kind: type[Kind], request: Request) -> Kind:
    """
    Return the checked fields of a request's body.

    Raises:
        ApiError: 400, with the wrong field.
    """
    body = await request.body()
    # Foreign pages can make a browser send any text, but not with the content type of JSON.
    if not body or not _JSON.match(request.headers.get("content-type", "")):
        raise _no_object()
    if len(body) <= _SMALL:
        return _fields(kind, body)
    loop = asyncio.get_running_loop()
    # One body per namespace at a time, so that another's waits for one of each.
    async with _TURNS.setdefault(loop, defaultdict(asyncio.Lock))[CALLER.get().namespace]:
        return await loop.run_in_executor(_READER, _large_fields, kind, body)


def _large_fields(kind: type[Kind], body: bytes) -> Kind:
    """Return `_fields` of a large body, for which the interpreter's lock is held shortly."""
    if _num_containers(body) > _MOST_CONTAINERS:
        raise ApiError(400, f"The body has more than {_MOST_CONTAINERS} lists and objects")
    was_enabled = gc.isenabled()
    gc.disable()  # else every few thousand new objects are searched for garbage: ten times the work of reading them
    try:
        return _fields(kind, body)
    finally:
        if was_enabled:
            gc.enable()


def _num_containers(body: bytes) -> int:
    """Return the number of lists and objects of a body, or an upper bound if it is within `_MOST_CONTAINERS`."""
    most = body.count(b"[") + body.count(b"{")
    if most <= _MOST_CONTAINERS:
        return most
    outside = b"".join(body.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')[::2])  # of all strings
    return outside.count(b"[") + outside.count(b"{")


def _fields(kind: type[Kind], body: bytes) -> Kind:
    try:
        # `from_json` also refuses more than 200 levels, numbers of over 4,300 digits, NaN, and lone surrogates.
        value = from_json(body, allow_inf_nan=False, cache_strings="keys")
    except ValueError as error:
        raise ApiError(400, f"The body is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise _no_object()
    try:
        fields = kind.model_validate(value)
    except ValidationError as error:
        raise validation_error(error) from None
    log_ignored(fields)
    if fields.model_extra:
        fields.model_extra.clear()  # fields live as long as their answer
    return fields


def _no_object() -> ApiError:
    return ApiError(400, "The body must be a JSON object, sent with Content-Type: application/json")
