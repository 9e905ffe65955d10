"""Read bodies of requests as JSON and check them; large ones in a thread beside the event loop."""

import asyncio
import re
from concurrent.futures import ThreadPoolExecutor

from fastapi import Request
from pydantic import ValidationError
from pydantic_core import from_json

from ..errors import ApiError, validation_error
from .fields import Kind, log_ignored

_SMALL = 2**16  # bytes that are read in less time than another thread takes to answer
_JSON = re.compile(r"application/(json|[\w.-]+\+json)\s*(;|$)", re.IGNORECASE)
# One thread: with several, the event loop would wait for each of them to release the interpreter's lock.
_READER = ThreadPoolExecutor(1, "bodies")


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
    return await asyncio.get_running_loop().run_in_executor(_READER, _fields, kind, body)


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
    return fields


def _no_object() -> ApiError:
    return ApiError(400, "The body must be a JSON object, sent with Content-Type: application/json")
