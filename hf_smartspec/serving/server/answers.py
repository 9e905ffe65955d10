"""Answers: turn an engine's outputs into pieces of text."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing, suppress
from typing import NamedTuple, Protocol

from ..logprobs import LogprobsRecorder, TokenLogprobs
from ..outputs import EngineOutput
from .engine import ServedEngine
from .errors import ApiError
from .request.grammar import GrammarProcessor
from .tokens import TextStream


class Piece(NamedTuple):
    """
    The part of an answer that is new since the last piece.

    Args:
        text (`str`): Text up to the first stop string.
        tokens (list of `int`): All new tokens, even if some text is held back.
        logprobs (list of `TokenLogprobs`, *optional*): Log-probabilities of these tokens, if the request asked for
            them.
        output (`EngineOutput`): The whole output so far.
        finish_reason (`str`, *optional*): "stop" or "length" in the last piece.
        stop_reason (`str`, *optional*): The stop string that ended the text.
    """

    text: str
    tokens: list[int]
    logprobs: list[TokenLogprobs] | None
    output: EngineOutput
    finish_reason: str | None = None
    stop_reason: str | None = None


class AnsweringModel(Protocol):
    """Interface of the model that gives an answer; `ServedModel` implements it."""

    engine: ServedEngine

    def count_step(self, output: EngineOutput) -> None: ...
    def count_end(self, output: EngineOutput, namespace: str) -> None: ...
    def abort(self, request_id: str, namespace: str) -> None: ...


class Answer:
    """
    The answer to one request that has been added to an engine.

    Args:
        served (`ServedModel`): The model that answers.
        request_id (`str`): The request's name in the engine.
        prompt (sequence of `int`): Token ids of the prompt.
        text (`TextStream`): Decodes the answer's tokens.
        recorder (`LogprobsRecorder`, *optional*): Records log-probabilities.
        timeout (`float`, *optional*): Seconds after which the request is cancelled.
        namespace (`str`): The caller's namespace.
        grammar (`GrammarProcessor`, *optional*): Keeps the answer to its form.
    """

    def __init__(
        self,
        served: AnsweringModel,
        request_id: str,
        prompt: Sequence[int],
        text: TextStream,
        recorder: LogprobsRecorder | None,
        timeout: float | None,
        namespace: str = "",
        grammar: GrammarProcessor | None = None,
    ):
        self.request_id, self.prompt, self.namespace = request_id, prompt, namespace
        self._served, self._text, self._recorder, self._grammar = served, text, recorder, grammar
        self._is_late = self._is_over = False
        loop = asyncio.get_running_loop()
        self._alarm = None if timeout is None else loop.call_later(timeout, self._time_out)

    def _time_out(self) -> None:
        self._is_late = True
        self._served.engine.cancel_request(self.request_id)

    def drop(self) -> None:
        """Abort the answer if it is unfinished: its client has left."""
        if not self._is_over:
            self._is_over = True
            self._served.abort(self.request_id, self.namespace)
        if self._alarm is not None:
            self._alarm.cancel()

    async def pieces(self) -> AsyncGenerator[Piece, None]:
        """
        Yield pieces as they come; the last one has a `finish_reason`. The iteration ends early if the answer is
        dropped.

        Raises:
            ApiError: 504 after the timeout, 503 if the server stops, 500 if the request failed, 400 if its form was at
                fault.
        """
        num_seen = 0
        async with aclosing(self._served.engine.request_id_aiter(self.request_id)) as outputs:
            async for output in outputs:
                if self._is_over:
                    return
                if output.is_finished():
                    self._is_over = True
                    self._served.count_end(output, self.namespace)
                    self._check(output)
                tokens = output.generated_tokens
                new, first = tokens[num_seen:], num_seen
                num_seen = len(tokens)
                if not output.is_finished():
                    self._served.count_step(output)
                text = self._text.feed(new)
                logprobs = None if self._recorder is None else self._recorder.of(tokens, first)
                if output.is_finished():
                    text += self._text.end()
                    stop = self._text.stop_reason
                    yield Piece(text, new, logprobs, output, "stop" if stop else output.finish_reason, stop)
                else:
                    yield Piece(text, new, logprobs, output)

    async def collect(self) -> Piece:
        """Return the whole answer as one piece."""
        text, last = "", None
        tokens: list[int] = []
        logprobs: list[TokenLogprobs] = []
        async for piece in self.pieces():
            text += piece.text
            tokens += piece.tokens
            logprobs += piece.logprobs or ()
            last = piece
        assert last is not None, "an engine answers every request"
        return last._replace(text=text, tokens=tokens, logprobs=None if last.logprobs is None else logprobs)

    def _check(self, output: EngineOutput) -> None:
        if output.finish_reason == "error":
            if self._grammar is not None and self._grammar.error is not None:
                raise ApiError(400, f"The answer's form takes too much work: {self._grammar.error}", "response_format")
            raise ApiError(500, f"The request failed: {output.error}")
        if output.finish_reason == "cancelled":
            if self._is_late:
                raise ApiError(504, "The request took too long and was cancelled", code="timeout")
            raise ApiError(503, "The server is stopping", retry_after=1)


async def interleaved(answers: Sequence[Answer]) -> AsyncGenerator[tuple[int, Piece], None]:
    """Yield pieces of several answers as they come, with the answer's index. Unfinished answers are dropped at exit."""
    # A reader that is slower than the engine gets larger pieces: the queue does not grow.
    queue: asyncio.Queue[tuple[int, Piece | BaseException | None]] = asyncio.Queue(1)

    async def pump(index: int, answer: Answer) -> None:
        try:
            async with aclosing(answer.pieces()) as pieces:  # closes the stream of a cancelled reader
                async for piece in pieces:
                    await queue.put((index, piece))
            await queue.put((index, None))
        except Exception as error:
            await queue.put((index, error))

    tasks = [asyncio.create_task(pump(index, answer)) for index, answer in enumerate(answers)]
    try:
        num_left = len(answers)
        while num_left:
            index, item = await queue.get()
            if isinstance(item, BaseException):
                raise item
            if item is None:
                num_left -= 1
            else:
                yield index, item
    finally:
        for task in tasks:
            task.cancel()
        for answer in answers:
            answer.drop()
        with suppress(asyncio.CancelledError):
            await asyncio.gather(*tasks, return_exceptions=True)


async def collect_all(answers: Sequence[Answer]) -> list[Piece]:
    """Return each answer as one piece. If one fails or the caller is cancelled, unfinished answers are dropped."""
    tasks = [asyncio.create_task(answer.collect()) for answer in answers]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        for answer in answers:
            answer.drop()
