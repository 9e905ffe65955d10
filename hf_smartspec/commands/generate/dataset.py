"""Answers to the rows of a dataset, each once, even if the command is killed and called again."""

import argparse
import os
import sys
from collections.abc import Iterator
from contextlib import closing
from dataclasses import astuple
from typing import Any

from ..common.answering.arguments import sampling_of
from ..common.answering.speaker import Prompter, Speaker, shown, summary
from ..common.arguments import UsageError
from ..common.console import track
from ..common.outputs import write_json
from .answering import Replicas, RowAnswers
from .row_file import RowFile, as_json
from .rows import kept_columns, launched_shard


class DatasetAnswers:
    """Answers to the dataset of one command line, or to a shard of it."""

    def __init__(self, args: argparse.Namespace, rows: Any, speaker: Speaker, prompter: Prompter):
        self._args, self._rows, self._speaker, self._prompter = args, rows, speaker, prompter
        self._shard = args.shard or launched_shard(os.environ)
        self._indices = self._shard.range(len(rows))
        self._columns = kept_columns(args)

    def run(self) -> int:
        """
        Answer the rows; return the exit status, 1 if one could not be answered. Under a launcher, which would end the
        other processes, always 0.
        """
        path = self._shard.named(self._args.output)
        with RowFile(path, self._settings(), self._args.overwrite) as file:
            self._check(file)
            num_known = len(file.rows)
            num_errors = sum(row.get("error") is not None for row in file.rows)
            seed = file.settings["seed"]
            answering: Replicas | RowAnswers = (
                Replicas(self._args, seed)
                if self._args.replicas
                else RowAnswers(self._args, self._rows, self._speaker, self._prompter, seed)
            )
            try:
                with closing(answering.rows(self._indices[num_known:])) as rows:
                    num_errors += self._answer(rows, file)
            except KeyboardInterrupt:
                print(f"{path}: the same command goes on where this one was interrupted", file=sys.stderr)
                raise
            statistics = answering.statistics
        errors = f", {num_errors} of them without an answer" if num_errors else ""
        known = f", {num_known} of them from before" if num_known else ""
        print(f"{path}: {len(self._indices)} rows{known}{errors}; {summary(statistics)}", file=sys.stderr)
        if self._args.json:
            result = {"output": str(path), "rows": len(self._indices), "from_before": num_known, "errors": num_errors}
            result |= {"settings": file.settings, "assistant": shown(self._speaker.assistant)}
            write_json(self._shard.named(self._args.json), result | {"statistics": statistics.as_dict()})
        is_launched = self._args.shard is None and self._shard.num > 1
        return 1 if num_errors and not is_launched else 0

    def _settings(self) -> dict[str, Any]:
        """Return everything that the answers depend on; the assistant is not part of it."""
        args, speaker = self._args, self._speaker
        names = "dataset config split column response quantize max_new_tokens stop system seed".split()
        return {name: getattr(args, name) for name in names} | {
            "rows": len(self._rows),
            "keep": self._columns,
            "shard": list(astuple(self._shard)),
            "model": speaker.name,
            "dtype": str(speaker.model.dtype).removeprefix("torch."),
            "sampling": sampling_of(args).arguments(),
            "template": None if self._prompter.is_raw else speaker.tokenizer.chat_template,
        }

    def _check(self, file: RowFile) -> None:
        """Raise `UsageError` if the file's rows are not the first rows of the dataset, in order."""
        for place, row in enumerate(file.rows):
            if place >= len(self._indices) or not self._is_of(row, self._indices[place]):
                raise UsageError(
                    f"{str(file.path)!r}, line {place + 1}: not from this dataset's rows, or not in their order: "
                    "--overwrite begins anew"
                )

    def _is_of(self, found: Any, index: int) -> bool:
        row = self._rows[index]
        want = {"row": index, **{name: row[name] for name in self._columns}}
        return isinstance(found, dict) and all(found.get(name) == value for name, value in as_json(want).items())

    def _answer(self, rows: Iterator[dict[str, Any]], file: RowFile) -> int:
        """Write the missing rows; return the number of those without an answer."""
        num_errors = 0
        with track(desc="answering", total=len(self._indices), unit=" rows") as bar:
            bar.update(len(file.rows))
            for row in rows:
                file.append(row)
                num_errors += row["error"] is not None
                bar.update()
        return num_errors
