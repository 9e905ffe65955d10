"""`/v1/completions`."""

import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from functools import cache
from typing import Any

import numpy as np
from fastapi import Request
from fastapi.responses import Response
from openai.types import Completion, CompletionChoice
from openai.types.completion_choice import Logprobs
from transformers.cli.serving.completion import CompletionHandler

from ...logprobs import TokenLogprobs
from ..answers import Answer, Piece, collect_all, interleaved
from ..errors import ApiError
from ..models import EngineState
from ..request.body import read
from ..request.fields import CompletionFields
from ..request.sampling import Settings, read_settings
from ..served import ServedModel
from .chat import plain_logprob
from .streaming import AnswerStream, event, events, whole_response
from .usage import speculation_of, usage_of

_USUAL_TOKENS = 16  # of an answer whose request sets no limit, as in OpenAI's interface
# Options of the model's generation config that must not apply when a prompt is scored.
_NO_PROCESSORS: dict[str, Any] = {
    "eos_token_id": None, "repetition_penalty": 1.0, "no_repeat_ngram_size": 0, "bad_words_ids": None,
    "sequence_bias": None, "suppress_tokens": None, "begin_suppress_tokens": None, "forced_bos_token_id": None,
    "forced_eos_token_id": None, "exponential_decay_length_penalty": None, "guidance_scale": None,
}  # fmt: skip


class EngineCompletionHandler(CompletionHandler):
    """transformers' handler, answered by an engine."""

    generation_state: EngineState

    async def answer(self, request: Request) -> Response:
        fields = await read(CompletionFields, request)
        if fields.suffix is not None:
            raise ApiError(400, "suffix is not supported: write the text around the gap into the prompt", "suffix")
        served = self.generation_state.find(fields.model)
        served.check_count(len(fields.prompts) * (fields.n or 1))
        prompts = [await served.in_worker(served.encode, prompt) for prompt in fields.prompts]
        settings = read_settings(fields, served.model.generation_config, fields.max_tokens, fields.logprobs)
        prediction = await served.prediction_of(settings)
        exchange = _Exchange(served, fields, settings, prompts, f"cmpl-{request.state.request_id}", prediction)
        if fields.echo:
            await exchange.read_prompts()
        if fields.max_tokens == 0:
            if not fields.echo or fields.stream:
                raise ApiError(400, "max_tokens must be at least 1, but with echo and without stream", "max_tokens")
            return await exchange.whole([])
        answers = await served.begin(prompts, settings, _USUAL_TOKENS, prediction=prediction)
        if fields.stream:
            return AnswerStream(events(exchange.chunks(answers)), answers)
        return await exchange.whole(await collect_all(answers))


class _Exchange:
    """Prompts, and the responses for their answers, ordered by prompt."""

    def __init__(
        self,
        served: ServedModel,
        fields: CompletionFields,
        settings: Settings,
        prompts: list[list[int]],
        name: str,
        prediction: list[int] | None,
    ):
        self._served, self._fields, self._prompts = served, fields, prompts
        self._per_prompt = len(settings.seeds)
        self._head: dict[str, Any] = {"id": name, "created": int(time.time()), "model": served.name}
        self._prediction = prediction
        self._decode = cache(served.tokenizer.decode)
        self._echoes = [""] * len(prompts)
        self._scores: list[list[TokenLogprobs | None]] = [[] for _ in prompts]

    async def read_prompts(self) -> None:
        """Store the prompts' texts and, if the request asks for them, their tokens' log-probabilities."""
        tokenizer = self._served.tokenizer
        for index, (prompt, ids) in enumerate(zip(self._fields.prompts, self._prompts)):
            self._echoes[index] = prompt if isinstance(prompt, str) else str(tokenizer.decode(ids))
            if self._fields.logprobs is not None:
                self._scores[index] = await prompt_logprobs(self._served, ids, self._fields.logprobs)

    # Whole

    async def whole(self, pieces: Sequence[Piece]) -> Response:
        """Return the response; without pieces, it consists of the echoed prompts."""
        outputs = [piece.output for piece in pieces]
        usage = usage_of(list(map(len, self._prompts)), outputs, self._prediction)
        result = Completion(**self._head, object="text_completion", choices=[], usage=usage)
        head = result.model_dump(exclude_none=True, exclude={"choices"}) | {"metrics": speculation_of(outputs)}
        count = len(pieces) or len(self._prompts) * self._per_prompt
        return await whole_response(head, count, lambda index: self._choice(index, pieces[index] if pieces else None))

    def _choice(self, index: int, piece: Piece | None) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": index, "text": self._echo(index), "finish_reason": "length"}
        if piece is not None:
            choice["text"] += piece.text
            choice |= {"finish_reason": piece.finish_reason, "stop_reason": piece.stop_reason}
        choice["logprobs"] = self._logprobs(index, piece)
        return {"logprobs": None} | CompletionChoice.model_validate(choice).model_dump(exclude_none=True)

    def _echo(self, index: int) -> str:
        return self._echoes[index // self._per_prompt]

    def _logprobs(
        self, index: int, piece: Piece | None = None, echoes: bool = True, offset: int = 0
    ) -> Logprobs | None:
        """Return log-probabilities of the prompt, if it is echoed, and of an answer."""
        if self._fields.logprobs is None:
            return None
        at = index // self._per_prompt
        scores: list[TokenLogprobs | None] = list(self._scores[at]) if echoes else []
        tokens = self._prompts[at][: len(scores)]
        if piece is not None:
            tokens, scores = [*tokens, *piece.tokens], [*scores, *(piece.logprobs or ())]
        return completion_logprobs(tokens, scores, self._decode, offset)

    # In chunks

    async def chunks(self, answers: Sequence[Answer]) -> AsyncGenerator[str, None]:
        last: dict[int, Piece] = {}
        offsets = [0] * len(answers)  # of the next token in each text
        async with aclosing(interleaved(answers)) as pieces:
            async for index, piece in pieces:
                is_first = index not in last
                last[index] = piece
                text = self._echo(index) + piece.text if is_first else piece.text
                if text or piece.logprobs or piece.finish_reason:
                    logprobs = self._logprobs(index, piece, is_first, offsets[index])
                    offsets[index] += sum(map(len, logprobs.tokens or ())) if logprobs is not None else 0
                    yield self._chunk(index, text, piece, last, logprobs)
        if self._fields.includes_usage:
            outputs = [piece.output for _, piece in sorted(last.items())]
            usage = usage_of(list(map(len, self._prompts)), outputs, self._prediction)
            chunk = Completion(**self._head, object="text_completion", choices=[])
            yield event(chunk, usage, metrics=speculation_of(outputs))

    def _chunk(self, index: int, text: str, piece: Piece, last: dict[int, Piece], logprobs: Logprobs | None) -> str:
        choice = CompletionChoice.model_construct(
            index=index, text=text, logprobs=logprobs, finish_reason=piece.finish_reason
        )
        if piece.finish_reason:
            choice.stop_reason = piece.stop_reason  # type: ignore[attr-defined]
        chunk = Completion.model_construct(**self._head, object="text_completion", choices=[choice])
        outputs = [item.output for item in last.values()]
        counts = self._fields.counts_usage
        return event(chunk, usage_of(list(map(len, self._prompts)), outputs) if counts else None)


async def prompt_logprobs(served: ServedModel, ids: Sequence[int], num_top: int) -> list[TokenLogprobs | None]:
    """
    Return log-probabilities of a prompt's tokens, for `echo`; None for the first. The prompt is decoded as the answer
    to its first token, with drafts that are always accepted, so that a step scores many tokens beside other requests.
    """
    if len(ids) == 1:
        return [None]
    known = np.array(ids[1:], np.int64)
    arguments = _NO_PROCESSORS | {"do_sample": False}
    [answer] = await served.begin([ids[:1]], Settings(arguments, len(known), [None], num_top=num_top, known=known))
    try:
        return [None, *((await answer.collect()).logprobs or ())]
    finally:
        answer.drop()


def completion_logprobs(
    tokens: Sequence[int],
    scores: Sequence[TokenLogprobs | None],
    decode: Callable[[int], Any],
    offset: int = 0,
) -> Logprobs:
    """Return log-probabilities in the format of completions; `offset` characters come before the first token."""
    texts = [str(decode(token)) for token in tokens]
    offsets = [offset]
    for text in texts[:-1]:
        offsets.append(offsets[-1] + len(text))
    tops: list[Any] = []
    for token, known in zip(tokens, scores):
        if known is None:
            tops.append(None)
        else:
            chosen = {str(decode(token)): plain_logprob(known)}
            others = {str(decode(other)): plain_logprob(TokenLogprobs(value, [])) for other, value in known.top}
            tops.append(others | chosen)
    values: Any = [plain_logprob(known) for known in scores]
    return Logprobs.model_construct(
        tokens=texts, token_logprobs=values, top_logprobs=tops, text_offset=offsets[: len(texts)]
    )
