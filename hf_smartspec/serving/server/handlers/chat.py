"""`/v1/chat/completions`."""

import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from functools import cache
from typing import Any

from fastapi import Request
from fastapi.responses import Response
from openai.types.chat import ChatCompletion, ChatCompletionChunk, ChatCompletionTokenLogprob
from openai.types.chat.chat_completion import Choice, ChoiceLogprobs
from openai.types.chat.chat_completion_chunk import Choice as ChunkChoice
from openai.types.chat.chat_completion_token_logprob import TopLogprob
from transformers.cli.serving.chat_completion import ChatCompletionHandler
from transformers.cli.serving.utils import ReasoningText, ToolCall

from ...logprobs import TokenLogprobs
from ..answers import Answer, Piece, collect_all, interleaved
from ..chat_template.arguments import with_types
from ..chat_template.rendering import MessageReader, has_parser, render, template_kwargs
from ..chat_template.tool_calls import forced_form
from ..models import EngineState
from ..request.body import read
from ..request.fields import ChatFields
from ..request.sampling import read_settings
from ..served import ServedModel
from .streaming import AnswerStream, event, events, whole_response
from .usage import speculation_of, usage_of

LEAST_LOGPROB = -9999.0  # JSON knows no infinity


class EngineChatHandler(ChatCompletionHandler):
    """transformers' handler, answered by an engine."""

    generation_state: EngineState

    async def answer(self, request: Request) -> Response:
        fields = await read(ChatFields, request)
        served = self.generation_state.find(fields.model)
        tools = None if fields.tool_choice == "none" else fields.tools
        kwargs = template_kwargs(self.chat_template_kwargs, fields.chat_template_kwargs, fields.reasoning_effort)
        prompt = await served.in_worker(render, served, fields.messages, tools, kwargs)
        calls = await served.in_worker(forced_form, served, fields, tools, prompt)
        typed = await served.in_worker(with_types, tools) if tools else None
        limit = fields.max_completion_tokens or fields.max_tokens
        num_top = (fields.top_logprobs or 0) if fields.logprobs else None
        settings = read_settings(fields, served.model.generation_config, limit, num_top, calls=calls)
        prediction = await served.prediction_of(settings)
        answers = await served.begin([prompt], settings, keeps_special=has_parser(served), prediction=prediction)
        exchange = _Exchange(served, fields, prompt, f"chatcmpl-{request.state.request_id}", typed, prediction)
        if fields.stream:
            return AnswerStream(events(exchange.chunks(answers)), answers)
        pieces = await collect_all(answers)
        return await whole_response(
            exchange.head(pieces), len(pieces), lambda index: exchange.choice(index, pieces[index])
        )


class _Exchange:
    """A chat, and the responses for its answers."""

    def __init__(
        self,
        served: ServedModel,
        fields: ChatFields,
        prompt: list[int],
        name: str,
        tools: list[dict[str, Any]] | None,
        prediction: list[int] | None,
    ):
        self._served, self._fields, self._prompt, self._tools = served, fields, prompt, tools
        self._head: dict[str, Any] = {"id": name, "created": int(time.time()), "model": served.name}
        self._prediction = prediction
        self._decode = cache(served.tokenizer.decode)

    # Whole

    def head(self, pieces: Sequence[Piece]) -> dict[str, Any]:
        """Return the response without its choices."""
        outputs = [piece.output for piece in pieces]
        usage = usage_of([len(self._prompt)], outputs, self._prediction)
        result = ChatCompletion(**self._head, object="chat.completion", choices=[], usage=usage)
        return result.model_dump(exclude_none=True, exclude={"choices"}) | {"metrics": speculation_of(outputs)}

    def choice(self, index: int, piece: Piece) -> dict[str, Any]:
        items = MessageReader(self._served, self._prompt, self._tools).feed(piece.text, piece.finish_reason)
        calls = [_tool_call(piece, number, item) for number, item in enumerate(_of_kind(items, ToolCall))]
        reasoning = "".join(_of_kind(items, ReasoningText)) or None
        content = "".join(item for item in items if type(item) is str)
        message = {"role": "assistant", "content": content, "reasoning_content": reasoning, "tool_calls": calls or None}
        return Choice.model_validate(
            {"index": index, "message": message, "finish_reason": "tool_calls" if calls else piece.finish_reason,
             "stop_reason": piece.stop_reason, "logprobs": chat_logprobs(piece, self._decode)}
        ).model_dump(exclude_none=True)  # fmt: skip

    # In chunks

    async def chunks(self, answers: Sequence[Answer]) -> AsyncGenerator[str, None]:
        """Yield chunks: a choice's first has its role, its last its `finish_reason`; usage has a chunk of its own."""
        readers = [MessageReader(self._served, self._prompt, self._tools) for _ in answers]
        num_calls = [0] * len(answers)
        last: dict[int, Piece] = {}
        for index in range(len(answers)):
            yield self._chunk(index, {"role": "assistant", "content": ""}, None, last)
        async with aclosing(interleaved(answers)) as pieces:
            async for index, piece in pieces:
                last[index] = piece
                is_last = piece.finish_reason is not None
                deltas: list[dict[str, Any]] = []
                for item in readers[index].feed(piece.text, piece.finish_reason):
                    if isinstance(item, ToolCall):
                        deltas.append(
                            {"tool_calls": [{"index": num_calls[index], **_tool_call(piece, num_calls[index], item)}]}
                        )
                        num_calls[index] += 1
                    else:
                        name = "reasoning_content" if isinstance(item, ReasoningText) else "content"
                        deltas.append({name: str(item)})
                if not deltas and (piece.logprobs or is_last):
                    deltas.append({})
                for number, delta in enumerate(deltas):
                    is_end = is_last and number == len(deltas) - 1
                    yield self._chunk(index, delta, piece, last, number == 0, is_end, num_calls[index] > 0)
        if self._fields.includes_usage:
            outputs = [piece.output for _, piece in sorted(last.items())]
            chunk = ChatCompletionChunk(**self._head, object="chat.completion.chunk", choices=[])
            usage = usage_of([len(self._prompt)], outputs, self._prediction)
            yield event(chunk, usage, metrics=speculation_of(outputs))

    def _chunk(
        self,
        index: int,
        delta: dict[str, Any],
        piece: Piece | None,
        last: dict[int, Piece],
        is_first: bool = False,
        is_end: bool = False,
        has_calls: bool = False,
    ) -> str:
        choice: dict[str, Any] = {"index": index, "delta": delta, "finish_reason": None}
        if piece is not None and is_end:
            choice["finish_reason"] = "tool_calls" if has_calls else piece.finish_reason
            choice["stop_reason"] = piece.stop_reason
        if piece is not None and is_first and piece.logprobs is not None:
            choice["logprobs"] = chat_logprobs(piece, self._decode)
        chunk = ChatCompletionChunk(
            **self._head, object="chat.completion.chunk", choices=[ChunkChoice.model_validate(choice)]
        )
        outputs = [item.output for item in last.values()]
        return event(chunk, usage_of([len(self._prompt)], outputs) if self._fields.counts_usage else None)


def _of_kind(items: Sequence[Any], kind: type) -> list[Any]:
    return [item for item in items if isinstance(item, kind)]


def _tool_call(piece: Piece, number: int, call: ToolCall) -> dict[str, Any]:
    name = f"call_{piece.output.request_id}_{number}"
    return {"id": name, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def chat_logprobs(piece: Piece, decode: Callable[[int], Any]) -> dict[str, Any] | None:
    if piece.logprobs is None:
        return None
    content = []
    for token, known in zip(piece.tokens, piece.logprobs):
        top = [TopLogprob(**_shown(other, value, decode)) for other, value in known.top]
        content.append(ChatCompletionTokenLogprob(**_shown(token, known.logprob, decode), top_logprobs=top))
    return ChoiceLogprobs(content=content).model_dump()  # chunks have a type of their own


def _shown(token: int, logprob: float, decode: Callable[[int], Any]) -> dict[str, Any]:
    text = str(decode(token))
    return {"token": text, "bytes": list(text.encode()), "logprob": max(logprob, LEAST_LOGPROB)}


def plain_logprob(known: TokenLogprobs | None) -> float | None:
    """Return a token's log-probability for JSON; None for the first token of a prompt, which has none."""
    return None if known is None else max(known.logprob, LEAST_LOGPROB)
