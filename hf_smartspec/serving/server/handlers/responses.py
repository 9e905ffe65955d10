"""`/v1/responses`."""

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

from fastapi import Request
from fastapi.responses import JSONResponse, Response
from transformers.cli.serving.response import ResponseHandler
from transformers.cli.serving.utils import BaseGenerateManager, _StreamError

from ..answers import Answer, Piece
from ..chat_template.arguments import with_types
from ..chat_template.rendering import MessageReader, has_parser, render, template_kwargs
from ..chat_template.tool_calls import forced_form
from ..errors import ApiError
from ..models import EngineState
from ..request.body import read
from ..request.fields import ResponseFields
from ..request.sampling import read_settings
from ..served import ServedModel
from .streaming import AnswerStream
from .usage import speculation_of


class EngineResponseHandler(ResponseHandler):
    """transformers' handler, which makes the events, answered by an engine."""

    generation_state: EngineState

    async def answer(self, request: Request) -> Response:
        fields = await read(ResponseFields, request)
        served = self.generation_state.find(fields.model)
        tools = None if fields.tool_choice == "none" else self._tools(fields)
        effort = None if fields.reasoning is None else fields.reasoning.effort
        kwargs = template_kwargs(self.chat_template_kwargs, fields.chat_template_kwargs, effort)
        prompt = await served.in_worker(render, served, self._messages(fields), tools, kwargs)
        calls = await served.in_worker(forced_form, served, fields, tools, prompt)
        typed = await served.in_worker(with_types, tools) if tools else None
        form = (fields.text or {}).get("format")
        if form is not None and not isinstance(form, dict):
            raise ApiError(400, "text: format must be an object", param="text")
        limit = fields.max_output_tokens or fields.max_tokens
        own = served.model.generation_config
        settings = read_settings(fields, own, limit, response_format=form, calls=calls)
        prediction = await served.prediction_of(settings)
        [answer] = await served.begin([prompt], settings, keeps_special=has_parser(served), prediction=prediction)
        manager = _OneAnswer(served, answer, typed)
        arguments: dict[str, Any] = {
            "request_id": request.state.request_id, "model_id": served.name,
            "model": served.model, "processor": served.tokenizer,
            "body": {"parallel_tool_calls": bool(fields.parallel_tool_calls)}, "inputs": {"input_ids": prompt},
            "gen_config": served.model.generation_config, "gen_manager": manager, "tools": tools,
        }  # fmt: skip
        events = _with_end(self._streaming(**arguments).body_iterator, manager)
        return AnswerStream(events, [answer]) if fields.stream else await _whole(events, manager, answer)

    def _messages(self, fields: ResponseFields) -> list[dict[str, Any]]:
        try:
            return self._normalize_input({"input": fields.input, "instructions": fields.instructions})
        except (KeyError, TypeError, AttributeError, IndexError) as error:
            raise ApiError(400, f"input: must be a list of messages: {error!r}", param="input") from None

    def _tools(self, fields: ResponseFields) -> list[dict[str, Any]] | None:
        try:
            return self._normalize_tools(fields.tools)
        except (KeyError, TypeError, AttributeError) as error:
            raise ApiError(400, f"tools: must be a list of functions: {error!r}", param="tools") from None


_COMPLETED = '"type":"response.completed"'  # within texts, quotes are escaped


def _completed(response: dict[str, Any], piece: Piece | None) -> dict[str, Any]:
    """Return transformers' response with the answer's cached tokens, status and metrics."""
    if piece is None:
        return response
    response["usage"]["input_tokens_details"]["cached_tokens"] = piece.output.num_cached_tokens
    if piece.finish_reason == "length":
        response |= {"status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}}
    return response | {"metrics": speculation_of([piece.output])}


async def _with_end(events: Any, manager: "_OneAnswer") -> AsyncGenerator[str, None]:
    """Yield transformers' events, with the last one completed: see `_completed`."""
    async for text in events:
        if _COMPLETED not in text:
            yield text
            continue
        event = json.loads(text.removeprefix("data: "))
        event["response"] = _completed(event["response"], manager.last_piece)
        event["type"] = f"response.{event['response']['status']}"
        yield f"data: {json.dumps(event, ensure_ascii=False)}\n\n"


async def _whole(events: AsyncIterator[str], manager: "_OneAnswer", answer: Answer) -> Response:
    """Return the response of the last event, which may hold a tool call that is incomplete."""
    last = ""
    try:
        async for text in events:
            last = text
    finally:
        answer.drop()
    if manager.error is not None:
        raise manager.error
    return JSONResponse(json.loads(last.removeprefix("data: "))["response"])


class _OneAnswer(BaseGenerateManager):
    """Generation manager for transformers' handler that returns an answer which has begun already."""

    def __init__(self, served: ServedModel, answer: Answer, tools: list[dict[str, Any]] | None):
        self._served, self._answer, self._tools = served, answer, tools
        self.last_piece: Piece | None = None
        self.error: Exception | None = None

    def generate_streaming(self, *_: Any, **__: Any) -> tuple[asyncio.Queue, Any]:
        queue: asyncio.Queue = asyncio.Queue()
        streamer = _Streamer(self._answer)
        reader = MessageReader(self._served, self._answer.prompt, self._tools)
        streamer.task = asyncio.create_task(self._pump(reader, queue, streamer))
        return queue, streamer

    async def generate_non_streaming(self, *_: Any, **__: Any) -> tuple[str, int, list[int]]:
        piece = await self._answer.collect()
        return piece.text, len(self._answer.prompt), piece.tokens

    def stop(self) -> None:
        self._answer.drop()

    async def _pump(self, reader: MessageReader, queue: asyncio.Queue, streamer: "_Streamer") -> None:
        try:
            async for piece in self._answer.pieces():
                self.last_piece = piece
                streamer.total_tokens += len(piece.tokens)
                for item in reader.feed(piece.text, piece.finish_reason):
                    queue.put_nowait(item)
            queue.put_nowait(None)
        except Exception as error:
            self.error = error
            is_public = isinstance(error, ApiError)
            queue.put_nowait(_StreamError(str(error) if is_public else f"The server failed: {type(error).__name__}"))


class _Streamer:
    """Streamer with the attributes that transformers' handler reads."""

    def __init__(self, answer: Answer):
        self.total_tokens = 0
        self.cancel = answer.drop
        self.task: asyncio.Task | None = None  # the only reference to the task
