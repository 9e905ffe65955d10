"""Bodies of requests: read as JSON and checked, beside the event loop where that takes a while."""

import asyncio
import re
from concurrent.futures import ThreadPoolExecutor

from fastapi import Request
from pydantic import ValidationError
from pydantic_core import from_json

from ..errors import ApiError, invalid
from .fields import Kind, note_ignored

_AT_ONCE = 2**16  # bytes that are read in less than it takes to wait for another thread
_JSON = re.compile(r"application/(json|[\w.-]+\+json)\s*(;|$)", re.IGNORECASE)
# One thread: several would keep the event loop waiting for as many turns of the interpreter's lock.
_READER = ThreadPoolExecutor(1, "bodies")


async def read(kind: type[Kind], request: Request) -> Kind:
    """
    The body of a request with every value checked.

    Raises:
        ApiError: 400, with the field that is to blame.
    """
    body = await request.body()
    # Pages of others can have browsers send any text, but not as JSON.
    if not body or not _JSON.match(request.headers.get("content-type", "")):
        raise _no_object()
    if len(body) <= _AT_ONCE:
        return _fields(kind, body)
    return await asyncio.get_running_loop().run_in_executor(_READER, _fields, kind, body)


def _fields(kind: type[Kind], body: bytes) -> Kind:
    try:
        # Refused besides: more than 200 levels, numbers of more than 4,300 digits, NaN, and halves of surrogate pairs.
        value = from_json(body, allow_inf_nan=False, cache_strings="keys")
    except ValueError as error:
        raise ApiError(400, f"The body is no valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise _no_object()
    try:
        fields = kind.model_validate(value)
    except ValidationError as error:
        raise invalid(error) from None
    note_ignored(fields)
    return fields


def _no_object() -> ApiError:
    return ApiError(400, "The body must be a JSON object, sent with Content-Type: application/json")
