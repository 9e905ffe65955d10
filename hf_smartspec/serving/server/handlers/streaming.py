"""Server-sent events, in vLLM's form."""

import json
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

from fastapi.responses import StreamingResponse
from openai.types import CompletionUsage
from pydantic import BaseModel
from starlette.types import Receive, Scope, Send

from ....log import get_logger
from ..answers import Answer
from ..errors import STREAM_END, ApiError

logger = get_logger(__name__)


def event(chunk: BaseModel, usage: CompletionUsage | None = None, **extra: Any) -> str:
    """One chunk; fields that nobody has set are left out."""
    body = chunk.model_dump(exclude_unset=True)
    if usage is not None:
        body["usage"] = usage.model_dump(exclude_none=True)
    return f"data: {json.dumps(body | extra, ensure_ascii=False)}\n\n"


async def events(chunks: AsyncGenerator[str, None]) -> AsyncGenerator[str, None]:
    """The chunks and the end; what fails in the middle is told in the stream, whose status has been sent long ago."""
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
    """Streams what is made of answers; they are dropped when nobody reads any more, even if nobody has begun to."""

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
            await self._chunks.aclose()  # now, not when Python comes to it: readers of answers end with it
