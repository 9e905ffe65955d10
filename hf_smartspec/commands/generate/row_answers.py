"""Answers to rows of a dataset, in order."""

import argparse
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

from ...sampling.noise import row_seed
from ...serving.engine import Engine
from ...serving.outputs import EngineOutput
from ..common.answering.arguments import sampling_of
from ..common.answering.prompting import Prompter
from ..common.answering.speaker import Speaker
from ..common.answering.text import GrowingText
from ..common.arguments import UsageError
from .rows import kept_columns

AHEAD = 4  # batches of requests that the engine holds: one runs, others wait, so that a long answer stalls none


class RowAnswers:
    """
    Answers to rows, by the options of a command line.

    Args:
        rows: The dataset.
        speaker, prompter: The model, and the tokenizer of prompts.
        seed (`int`): Seed of the dataset, from which every row's is derived.
    """

    def __init__(self, args: argparse.Namespace, rows: Any, speaker: Speaker, prompter: Prompter, seed: int):
        self._args, self._rows, self._speaker, self._prompter, self._seed = args, rows, speaker, prompter, seed
        self._columns = kept_columns(args)

    def answer(self, engine: Engine, indices: Sequence[int]) -> Iterator[dict[str, Any]]:
        """Yield these rows with their answers."""
        under_way: deque[tuple[int, str | Exception]] = deque()
        for index in [*indices, None]:
            while under_way and (index is None or len(under_way) >= AHEAD * self._args.max_batch_size):
                yield self._finished(engine, *under_way.popleft())
            if index is not None:
                under_way.append((index, self._begin(engine, index)))

    def _begin(self, engine: Engine, index: int) -> str | Exception:
        """Send a row to the engine; return the name of its request, or the error of its prompt."""
        try:
            ids = self._prompter.token_ids(self._rows[index][self._args.column])
            room = self._speaker.room(len(ids), self._args.max_new_tokens)
            if room < 1:
                return ValueError(f"{len(ids)} tokens are too many: the model takes {self._speaker.num_positions}")
            arguments = sampling_of(self._args).arguments()
            if self._args.stop:
                arguments["stop_strings"] = self._args.stop
            return engine.add_request(ids, max_new_tokens=room, seed=row_seed(self._seed, index), **arguments)
        except (TypeError, ValueError) as error:
            return error

    def _finished(self, engine: Engine, index: int, name: str | Exception) -> dict[str, Any]:
        """Return the row for the output, after waiting for its answer."""
        output: EngineOutput | None = None
        if isinstance(name, str):
            output = engine.get_result(name)
            if output is None or output.error:
                reason = output.error if output else "the engine has ended"
                raise UsageError(f"row {index}: {reason}; the same command goes on there")
        columns = {column: self._rows[index][column] for column in self._columns}
        return {
            "row": index,
            **columns,
            self._args.response: self._text(output) if output else None,
            "finish_reason": output.finish_reason if output else None,
            "generated_tokens": len(output.generated_tokens) if output else 0,
            "error": None if output else str(name),
        }

    def _text(self, output: EngineOutput) -> str:
        growing = GrowingText(self._speaker.tokenizer, self._args.stop)
        growing.feed(output.generated_tokens)
        growing.end()
        return growing.text
