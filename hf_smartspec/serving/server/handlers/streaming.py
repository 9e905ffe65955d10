"""Responses: whole ones, and server-sent events in vLLM's format."""

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from typing import Any

from fastapi.responses import Response, StreamingResponse
from openai.types import CompletionUsage
from pydantic import BaseModel
from starlette.types import Receive, Scope, Send

from ....log import get_logger
from ..answers import Answer
from ..errors import STREAM_END, ApiError

logger = get_logger(__name__)


def event(chunk: BaseModel, usage: CompletionUsage | None = None, **extra: Any) -> str:
    """Return a chunk as an event, without unset fields."""
    body = chunk.model_dump(exclude_unset=True)
    if usage is not None:
        body["usage"] = usage.model_dump(exclude_none=True)
    return f"data: {json.dumps(body | extra, ensure_ascii=False)}\n\n"


async def whole_response(head: dict[str, Any], count: int, choice: Callable[[int], dict[str, Any]]) -> Response:
    """
    Return a response with choices, which are made and written as JSON beside the event loop, one by one: those with
    log-probabilities take megabytes.
    """

    def written(index: int) -> str:
        return _json(choice(index))

    parts = [await asyncio.to_thread(written, index) for index in range(count)]
    body = f'{_json(head)[:-1]},"choices":[{",".join(parts)}]}}'
    return Response(body.encode(), media_type="application/json")


def _json(value: dict[str, Any]) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))


async def events(chunks: AsyncGenerator[str, None]) -> AsyncGenerator[str, None]:
    """Yield chunks and the end. An error is sent as an event, since the status has been sent already."""
    try:
        async with aclosing(chunks):
            async for chunk in chunks:
                yield chunk
    except ApiError as error:
        yield error.event
    except Exception as error:
        logger.error(f"A stream failed: {error!r}", exc_info=True)
        yield ApiError(500, "The server failed").event
    yield STREAM_END


class AnswerStream(StreamingResponse):
    """Streaming response that drops its answers when it ends, even if no client has begun to read it."""

    def __init__(self, chunks: AsyncGenerator[str, None], answers: Sequence[Answer]):
        self._chunks = chunks
        super().__init__(chunks, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        self._answers = answers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            for answer in self._answers:
                answer.drop()
            await self._chunks.aclose()  # now, not at garbage collection: this ends the readers of answers
