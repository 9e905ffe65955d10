"""Messages between the front of a service and its replicas."""

import hashlib
import json
import random
from collections.abc import Iterator
from typing import Any, NamedTuple

Headers = list[tuple[bytes, bytes]]

_GENERATES = ("/v1/chat/completions", "/v1/completions", "/v1/responses")


class ForwardedRequest(NamedTuple):
    """
    A client's request.

    Args:
        method, path (`str`), query (`bytes`), headers, body (`bytes`): As in HTTP.
        num_answers (`int`): Texts that it asks for: choices of all prompts.
    """

    method: str
    path: str
    query: bytes
    headers: Headers
    body: bytes
    num_answers: int = 1

    def header(self, name: bytes) -> bytes:
        return next((value for key, value in self.headers if key.lower() == name), b"")


class Head(NamedTuple):
    """The beginning of an answer: status and headers of HTTP."""

    status: int
    headers: Headers

    @property
    def is_stream(self) -> bool:
        return any(key.lower() == b"content-type" and b"event-stream" in value for key, value in self.headers)


class Route(NamedTuple):
    """The data by which a request is routed."""

    text: bytes = b""  # text of the prompt
    namespace: str = ""  # one for each tenant, model and choice of drafts


def fields_of(request: ForwardedRequest) -> dict[str, Any] | None:
    """Return the body of a request that generates text; None for other requests and for invalid bodies."""
    if request.method != "POST" or request.path not in _GENERATES:
        return None
    try:
        fields = json.loads(request.body)
    except (ValueError, RecursionError):
        return None
    return fields if isinstance(fields, dict) else None


def with_seed(request: ForwardedRequest) -> ForwardedRequest:
    """
    Return the request with its number of answers and, if it generates text without a seed, with one, so that it can be
    repeated.
    """
    fields = fields_of(request)
    if fields is None:
        return request
    request = request._replace(num_answers=_num_answers(fields))
    if fields.get("seed") is not None:
        return request
    try:
        body = json.dumps(fields | {"seed": random.getrandbits(62)}).encode()
    except RecursionError:
        return request
    headers = [(key, value) for key, value in request.headers if key.lower() != b"content-length"]
    headers.append((b"content-length", str(len(body)).encode()))
    return request._replace(body=body, headers=headers)


def _num_answers(fields: dict[str, Any]) -> int:
    """Return the number of answers that a body asks for; 1 where the replica will refuse it."""
    prompts = fields.get("prompt")
    num_prompts = len(prompts) if isinstance(prompts, list) and prompts and isinstance(prompts[0], (list, str)) else 1
    try:
        num = int(fields.get("n") or 1)  # replicas take "2" and 2.0, too
    except (TypeError, ValueError, OverflowError):
        num = 1
    return num_prompts * max(num, 1)


def route_of(request: ForwardedRequest) -> Route:
    """Return the route of a request. Prompts of all forms are compared as text, which needs no tokenizer."""
    fields = fields_of(request)
    if fields is None:
        return Route()
    prompt = [fields.get(name) for name in ("tools", "instructions", "messages", "prompt", "input")]
    text = "\n".join(_texts(prompt)).encode(errors="surrogatepass")
    speculation = fields.get("speculation")
    drafter = speculation.get("assistant") if isinstance(speculation, dict) else None
    tenant = hashlib.sha256(request.header(b"authorization")).hexdigest()[:16]
    return Route(text, f"{tenant} {fields.get('model')} {drafter}")


def _texts(value: Any) -> Iterator[str]:
    """Yield all strings and numbers of a JSON value in order."""
    stack = [value]
    while stack:
        item = stack.pop()
        if isinstance(item, str):
            yield item
        elif isinstance(item, dict):
            stack.extend(reversed(item.values()))
        elif isinstance(item, list):
            stack.extend(reversed(item))
        elif item is not None:
            yield str(item)
