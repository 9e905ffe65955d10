"""`/v1/responses`."""

import asyncio
from typing import Any

from fastapi.responses import Response
from transformers.cli.serving.response import ResponseHandler
from transformers.cli.serving.utils import BaseGenerateManager, _StreamError

from .answers import Answer
from .errors import ApiError
from .fields import ResponseFields, read_fields
from .models import EngineState
from .rendering import MessageReader, check_template_kwargs, has_parser, render
from .sampling import read_settings
from .served import ServedModel
from .streaming import AnswerStream


class EngineResponseHandler(ResponseHandler):
    """transformers' handler, which makes the events, with an engine behind it."""

    generation_state: EngineState

    async def handle_request(self, body: dict, request_id: str) -> Response:  # type: ignore[override]
        fields = read_fields(ResponseFields, body)
        served = self.generation_state.find(fields.model)
        tools = None if fields.tool_choice == "none" else self._tools(fields)
        kwargs = self.chat_template_kwargs | check_template_kwargs(fields.chat_template_kwargs)
        prompt = await served.in_worker(render, served, self._messages(body), tools, kwargs)
        form = (fields.text or {}).get("format")
        if form is not None and not isinstance(form, dict):
            raise ApiError(400, "text: format must be an object", param="text")
        limit = fields.max_output_tokens or fields.max_tokens
        settings = read_settings(fields, served.model.generation_config, limit, response_format=form)
        [answer] = await served.begin([prompt], settings, keeps_special=has_parser(served))
        manager = _OneAnswer(served, answer, tools)
        arguments: dict[str, Any] = {
            "request_id": request_id, "model": served.model, "processor": served.tokenizer, "model_id": served.name,
            "body": {"parallel_tool_calls": bool(fields.parallel_tool_calls)}, "inputs": {"input_ids": prompt},
            "gen_config": served.model.generation_config, "gen_manager": manager, "tools": tools,
        }  # fmt: skip
        try:
            if not fields.stream:
                return await self._non_streaming(**arguments)
            return AnswerStream(self._streaming(**arguments).body_iterator, [answer])  # type: ignore[arg-type]  # of text
        except BaseException:
            answer.drop()
            raise

    def _messages(self, body: dict) -> list[dict[str, Any]]:
        try:
            return self._normalize_input(body)
        except (KeyError, TypeError, AttributeError, IndexError) as error:
            raise ApiError(400, f"input: no list of messages: {error!r}", param="input") from None

    def _tools(self, fields: ResponseFields) -> list[dict[str, Any]] | None:
        try:
            return self._normalize_tools(fields.tools)
        except (KeyError, TypeError, AttributeError) as error:
            raise ApiError(400, f"tools: no list of functions: {error!r}", param="tools") from None


class _OneAnswer(BaseGenerateManager):
    """What transformers' handler asks for an answer: here, one that has begun already."""

    def __init__(self, served: ServedModel, answer: Answer, tools: list[dict[str, Any]] | None):
        self._served, self._answer, self._tools = served, answer, tools

    def generate_streaming(self, *_: Any, **__: Any) -> tuple[asyncio.Queue, Any]:
        queue: asyncio.Queue = asyncio.Queue()
        streamer = _Streamer(self._answer)
        reader = MessageReader(self._served, self._answer.prompt, self._tools)
        streamer.task = asyncio.create_task(_pump(self._answer, reader, queue, streamer))
        return queue, streamer

    async def generate_non_streaming(self, *_: Any, **__: Any) -> tuple[str, int, list[int]]:
        piece = await self._answer.whole()
        return piece.text, len(self._answer.prompt), piece.tokens

    def stop(self) -> None:
        self._answer.drop()


class _Streamer:
    """What transformers' handler asks of a stream."""

    def __init__(self, answer: Answer):
        self.total_tokens = 0
        self.cancel = answer.drop
        self.task: asyncio.Task | None = None  # held: nobody else does


async def _pump(answer: Answer, reader: MessageReader, queue: asyncio.Queue, streamer: _Streamer) -> None:
    try:
        async for piece in answer.pieces():
            streamer.total_tokens += len(piece.tokens)
            for item in reader.feed(piece.text, piece.finish_reason is not None):
                queue.put_nowait(item)
        queue.put_nowait(None)
    except ApiError as error:
        queue.put_nowait(_StreamError(error.message))
    except Exception as error:
        queue.put_nowait(_StreamError(f"The server failed: {type(error).__name__}"))
