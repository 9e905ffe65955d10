"""Engines that answer the rows of a dataset: one in this process, or several on Ray Data."""

import argparse
import json
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from typing import Any
from uuid import uuid4

import numpy as np
import torch

from ...decoding.statistics import GenerationStatistics
from ...sampling.noise import row_seed
from ...serving.engine import Engine
from ...serving.outputs import EngineOutput
from ..common.answering.arguments import sampling_of
from ..common.answering.speaker import Prompter, Speaker, load_speaker
from ..common.answering.text import GrowingText
from ..common.arguments import UsageError, usage_errors
from ..common.ray_cluster import last_line, ray_cluster
from .row_file import dumped
from .rows import checked_rows, kept_columns

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
        self.statistics = GenerationStatistics()

    def rows(self, indices: Sequence[int]) -> Generator[dict[str, Any], None, None]:
        """Yield these rows, answered by an engine of this process, which is stopped at the end."""
        engine = self._speaker.new_engine(max_batch_size=self._args.max_batch_size)
        try:
            yield from self.answer(engine, indices)
        finally:
            self.statistics = engine.statistics
            engine.stop(drain=False)

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
        args = self._args
        try:
            ids = self._prompter.token_ids(self._rows[index][args.column])
            seed = row_seed(self._seed, index)
            return self._speaker.add_request(engine, ids, sampling_of(args), args.max_new_tokens, seed, args.stop)
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
        growing = GrowingText(self._speaker.tokenizer, self._args.stop)
        growing.feed(output.generated_tokens if output else ())
        growing.end()
        columns = {column: self._rows[index][column] for column in self._columns}
        return {
            "row": index,
            **columns,
            self._args.response: growing.text if output else None,
            "finish_reason": output.finish_reason if output else None,
            "generated_tokens": len(output.generated_tokens) if output else 0,
            "error": None if output else str(name),
        }


def prompter_of(args: argparse.Namespace, speaker: Speaker) -> Prompter:
    """Return the prompter of a command line; raises `UsageError` for a system prompt without a chat template."""
    is_raw = args.raw or not speaker.tokenizer.chat_template
    if args.system and is_raw:
        raise UsageError("--system: has no effect without a chat template")
    return Prompter(speaker.tokenizer, args.system, is_raw)


class RowWorker:
    """Actor of Ray Data with an engine of its own, which answers batches of rows."""

    def __init__(self, args: argparse.Namespace, seed: int):
        speaker = load_speaker(args)
        self._answers = RowAnswers(args, checked_rows(args), speaker, prompter_of(args, speaker), seed)
        self._engine = speaker.new_engine(max_batch_size=args.max_batch_size)
        self._name = uuid4().hex

    def __call__(self, batch: dict[str, np.ndarray]) -> dict[str, list[str]]:
        lines = [dumped(row) for row in self._answers.answer(self._engine, batch["item"].tolist())]
        so_far = json.dumps(vars(self._engine.statistics))
        return {"line": lines, "worker": [self._name] * len(lines), "so_far": [""] * (len(lines) - 1) + [so_far]}


class Replicas:
    """Answers to rows by several engines, on this machine or a cluster. A worker that dies is replaced."""

    def __init__(self, args: argparse.Namespace, seed: int):
        self._args, self._seed = args, seed
        self._statistics: dict[str, GenerationStatistics] = {}

    def rows(self, indices: Sequence[int]) -> Generator[dict[str, Any], None, None]:
        """
        Yield the answered rows in order, so that an interrupted command can go on after the last one; raises
        `UsageError` if a worker cannot be made, or an engine fails.
        """
        if indices:
            with ray_cluster(self._args.ray_address, self._args.replicas * (self._args.threads or 1)):
                yield from self._answered(indices)

    def _answered(self, indices: Sequence[int]) -> Iterator[dict[str, Any]]:
        import ray.data
        from ray.exceptions import RayError

        context = ray.data.DataContext.get_current()
        context.execution_options.preserve_order, context.enable_progress_bars = True, False
        context.execution_no_progress_timeout_s = -1  # batches may take long
        num = self._args.replicas
        batch_size = min(AHEAD * self._args.max_batch_size, -(-len(indices) // num))
        answered = ray.data.from_items(list(indices), override_num_blocks=-(-len(indices) // batch_size)).map_batches(
            RowWorker,
            fn_constructor_args=(self._args, self._seed),
            batch_size=batch_size,
            compute=ray.data.ActorPoolStrategy(size=num),
            num_cpus=self._args.threads or 1,
            num_gpus=float(torch.device(self._args.device).type == "cuda"),
        )
        failed = "the replicas could not go on, the same command does"
        with usage_errors(failed, RayError, reason=last_line):
            for row in answered.iter_rows():
                if row["so_far"]:
                    self._statistics[row["worker"]] = GenerationStatistics(**json.loads(row["so_far"]))
                yield json.loads(row["line"])

    @property
    def statistics(self) -> GenerationStatistics:
        """Statistics of the batches that were answered."""
        return sum(self._statistics.values(), GenerationStatistics())
