"""One answer on its way: from the engine's outputs to pieces of text."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing, suppress
from typing import NamedTuple, Protocol

from ..outputs import EngineOutput
from .engine import ServedEngine
from .errors import ApiError
from .tokens.processors import LogprobsRecorder, TokenLogprobs
from .tokens.texts import TextStream


class Piece(NamedTuple):
    """
    What has come of an answer since the last piece.

    Args:
        text (`str`): Up to the first stop string.
        tokens (list of `int`): All of them, also where text is held back.
        logprobs (list of `TokenLogprobs`, *optional*): Of these tokens, where the request asked for them.
        output (`EngineOutput`): All so far.
        finish_reason (`str`, *optional*): "stop" or "length" in the last piece.
        stop_reason (`str`, *optional*): The stop string that the text has come to.
    """

    text: str
    tokens: list[int]
    logprobs: list[TokenLogprobs] | None
    output: EngineOutput
    finish_reason: str | None = None
    stop_reason: str | None = None


class AnsweringModel(Protocol):
    """What an answer needs of the model that gives it: `ServedModel` has it all."""

    engine: ServedEngine

    def note_step(self, output: EngineOutput) -> None: ...  # of an answer that goes on
    def note_end(self, output: EngineOutput, namespace: str) -> None: ...
    def forget(self, request_id: str, namespace: str) -> None: ...  # of an answer that nobody waits for


class Answer:
    """
    An answer that an engine has begun, or will.

    Args:
        served (`ServedModel`): Who answers, and counts its answers.
        request_id (`str`): Its name in the engine.
        prompt (sequence of `int`): What it answers.
        text (`TextStream`): Makes text of its tokens.
        recorder (`LogprobsRecorder`, *optional*): Knows its log-probabilities.
        timeout (`float`, *optional*): Seconds after which it is given up.
        namespace (`str`): Whose it is.
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
    ):
        self.request_id, self.prompt, self.namespace = request_id, prompt, namespace
        self._served, self._text, self._recorder = served, text, recorder
        self._is_late = self._is_over = False
        loop = asyncio.get_running_loop()
        self._alarm = None if timeout is None else loop.call_later(timeout, self._give_up)

    def _give_up(self) -> None:
        self._is_late = True
        self._served.engine.cancel_request(self.request_id)

    def drop(self) -> None:
        """Nobody waits for it any more."""
        if not self._is_over:
            self._is_over = True
            self._served.forget(self.request_id, self.namespace)
        if self._alarm is not None:
            self._alarm.cancel()

    async def pieces(self) -> AsyncGenerator[Piece, None]:
        """
        What comes, as it comes; the last piece has a `finish_reason`. Nothing any more once the answer is dropped.

        Raises:
            ApiError: 504 when time is over, 503 where the server stops, 500 if the request failed.
        """
        num_seen = 0
        async with aclosing(self._served.engine.request_id_aiter(self.request_id)) as outputs:
            async for output in outputs:
                if self._is_over:
                    return
                if output.is_finished():
                    self._is_over = True
                    self._served.note_end(output, self.namespace)
                    self._check(output)
                tokens = output.generated_tokens
                new, first = tokens[num_seen:], num_seen
                num_seen = len(tokens)
                if not output.is_finished():
                    self._served.note_step(output)
                text = self._text.feed(new)
                logprobs = None if self._recorder is None else self._recorder.of(tokens, first)
                if output.is_finished():
                    text += self._text.end()
                    stop = self._text.stop_reason
                    yield Piece(text, new, logprobs, output, "stop" if stop else output.finish_reason, stop)
                else:
                    yield Piece(text, new, logprobs, output)

    async def whole(self) -> Piece:
        """All in one piece."""
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
            raise ApiError(500, f"The request failed: {output.error}")
        if output.finish_reason == "cancelled":
            if self._is_late:
                raise ApiError(504, "The request took too long and was given up", code="timeout")
            raise ApiError(503, "The server stops", retry_after=1)


async def interleaved(answers: Sequence[Answer]) -> AsyncGenerator[tuple[int, Piece], None]:
    """Pieces of several answers as they come, with the answer's number. What nobody has read to its end is dropped."""
    # A reader who is slower than the engine misses steps, not tokens: nothing piles up here.
    queue: asyncio.Queue[tuple[int, Piece | BaseException | None]] = asyncio.Queue(1)

    async def pump(index: int, answer: Answer) -> None:
        try:
            async with aclosing(answer.pieces()) as pieces:  # else a reader that is cancelled here leaves a listener
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


async def all_whole(answers: Sequence[Answer]) -> list[Piece]:
    """All answers, each in one piece; if one fails, or nobody waits any more, the others are dropped."""
    tasks = [asyncio.create_task(answer.whole()) for answer in answers]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        for answer in answers:
            answer.drop()
