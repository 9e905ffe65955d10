"""Engines that answer the rows of a dataset: one in this process, or several on Ray Data."""

import argparse
import json
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import Any
from uuid import uuid4

import numpy as np
import torch

from ...decoding.statistics import GenerationStatistics
from ..common.answering.prompting import Prompter
from ..common.answering.speaker import Speaker, load_speaker
from ..common.arguments import UsageError
from ..common.ray_cluster import last_line, ray_cluster
from .row_answers import AHEAD, RowAnswers
from .row_file import dumped
from .rows import checked_rows


def prompter_of(args: argparse.Namespace, speaker: Speaker) -> Prompter:
    """
    Return the prompter of a command line.

    Raises:
        UsageError: for a system prompt without a chat template.
    """
    is_raw = args.raw or not speaker.tokenizer.chat_template
    if args.system and is_raw:
        raise UsageError("--system: has no effect without a chat template")
    return Prompter(speaker.tokenizer, args.system, is_raw)


class OneEngine:
    """An engine in this process, which is stopped at the end of the context."""

    def __init__(self, args: argparse.Namespace, speaker: Speaker, answers: RowAnswers):
        self._answers = answers
        self._engine = speaker.new_engine(max_batch_size=args.max_batch_size)

    def __enter__(self) -> "OneEngine":
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._engine.stop(drain=False)

    def rows(self, indices: Sequence[int]) -> Iterator[dict[str, Any]]:
        return self._answers.answer(self._engine, indices)

    @property
    def statistics(self) -> GenerationStatistics:
        return self._engine.statistics


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
    """Several engines, on this machine or a cluster, until the end of the context. A worker that dies is replaced."""

    def __init__(self, args: argparse.Namespace, seed: int):
        self._args, self._seed = args, seed
        self._open = ExitStack()
        self._statistics: dict[str, GenerationStatistics] = {}

    def __enter__(self) -> "Replicas":
        self._open.enter_context(ray_cluster(self._args.ray_address, self._args.replicas * self._num_cpus))
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._open.close()

    @property
    def _num_cpus(self) -> int:
        return self._args.threads or 1

    def rows(self, indices: Sequence[int]) -> Iterator[dict[str, Any]]:
        """
        Yield the answered rows in order, so that an interrupted command can go on after the last one.

        Raises:
            UsageError: if a worker cannot be made, or an engine fails.
        """
        import ray.data
        from ray.exceptions import RayError

        if not indices:
            return
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
            num_cpus=self._num_cpus,
            num_gpus=float(torch.device(self._args.device).type == "cuda"),
        )
        try:
            for row in answered.iter_rows():
                if row["so_far"]:
                    self._statistics[row["worker"]] = GenerationStatistics(**json.loads(row["so_far"]))
                yield json.loads(row["line"])
        except RayError as error:
            raise UsageError(f"the replicas could not go on: {last_line(error)}; the same command does") from error

    @property
    def statistics(self) -> GenerationStatistics:
        """Statistics of the batches that were answered."""
        return sum(self._statistics.values(), GenerationStatistics())
