"""Answers to a few prompts, printed while they are generated."""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import Any

from rich.markup import escape

from ...sampling.noise import row_seed
from ...serving.engine import Engine
from ...serving.outputs import EngineOutput
from ..common.answering.arguments import sampling_of
from ..common.answering.speaker import Prompter, Speaker, new_seed, shown, summary
from ..common.answering.text import GrowingText, Piece, printable
from ..common.arguments import usage_errors
from ..common.console import make_console
from ..common.outputs import json_safe, write_json

STDOUT = Path("-")
_SHOWN = 60  # characters of a prompt above its answer


class Answers:
    """Answers to the prompts of one command line, which run at once and are printed in order."""

    def __init__(self, args: argparse.Namespace, speaker: Speaker, prompter: Prompter):
        self._args, self._speaker, self._prompter = args, speaker, prompter
        self._seed = new_seed() if args.seed is None else args.seed
        self._shows_text = args.json != STDOUT
        self._comparison: dict[str, Any] | None = None

    def run(self, prompts: Sequence[str]) -> int:
        """Answer the prompts; return the exit status, 1 if one could not be answered."""
        with usage_errors():
            ids = [self._prompter.token_ids(prompt) for prompt in prompts]
        rows: list[dict[str, Any]] = []
        engine = self._new_engine(self._speaker)
        try:
            started = perf_counter()
            for index, name in enumerate(self._begin(engine, ids)):
                if self._shows_text and len(prompts) > 1:
                    self._print_heading(index, prompts)
                rows.append(self._answer(engine, name, prompts[index]))
            seconds = perf_counter() - started
            if self._args.compare:
                self._comparison = self._compared(ids, rows, seconds)
        finally:
            engine.stop(drain=False)
            self._report(rows, engine)
        return 1 if any(row["error"] for row in rows) else 0

    def _new_engine(self, speaker: Speaker) -> Engine:
        if self._args.compare:  # compiling and the like happens once, and counts for neither side
            with speaker.new_engine() as engine:
                engine.generate([[0]], max_new_tokens=2)
        return speaker.new_engine(max_batch_size=self._args.max_batch_size)

    def _compared(self, ids: Sequence[list[int]], rows: Sequence[dict[str, Any]], seconds: float) -> dict[str, Any]:
        """Answer the prompts once more, without speculation; return times and whether the tokens are the same."""
        engine = self._new_engine(replace(self._speaker, assistant="none"))
        try:
            started = perf_counter()
            plain = [engine.get_result(name) for name in self._begin(engine, ids)]
            plain_seconds = perf_counter() - started
        finally:
            engine.stop(drain=False)
        is_same = [output.generated_tokens if output else None for output in plain] == [
            row["token_ids"] for row in rows
        ]
        speedup = plain_seconds / seconds
        return {"seconds": seconds, "plain_seconds": plain_seconds, "speedup": speedup, "is_same": is_same}

    def _begin(self, engine: Engine, ids: Sequence[list[int]]) -> list[str]:
        """Send all prompts to an engine; return the names of their requests."""
        args = self._args
        common = sampling_of(args), args.max_new_tokens
        with usage_errors():
            return [
                self._speaker.add_request(
                    engine, item, *common, row_seed(self._seed, index), args.stop, streaming=self._shows_text
                )
                for index, item in enumerate(ids)
            ]

    def _print_heading(self, index: int, prompts: Sequence[str]) -> None:
        line = " ".join(prompts[index].split())
        line = line if len(line) <= _SHOWN else line[: _SHOWN - 1] + "…"
        space = "\n" * (index > 0)
        make_console().print(f"{space}[bold]{index + 1} of {len(prompts)}:[/bold] {escape(line)}", soft_wrap=True)

    def _answer(self, engine: Engine, name: str, prompt: str) -> dict[str, Any]:
        growing = GrowingText(self._speaker.tokenizer, self._args.stop)
        output: EngineOutput | None = None
        try:
            for output in engine.request_id_iter(name):
                self._write(growing.feed(output.generated_tokens))
            assert output is not None, "a request has at least its last output"
            self._write(growing.end())
        finally:  # also after Ctrl-C, whose message begins a line
            if self._shows_text and not growing.text.endswith("\n"):
                print(flush=True)
        if output.error:
            print(f"smartspec generate: error: {output.error}", file=sys.stderr)
        return {
            "prompt": prompt,
            "text": growing.text,
            "finish_reason": output.finish_reason,
            "error": output.error,
            "prompt_tokens": len(output.prompt_ids),
            "generated_tokens": len(output.generated_tokens),
            "token_ids": list(output.generated_tokens),
            "statistics": output.statistics.as_dict(),
        }

    def _write(self, pieces: Sequence[Piece]) -> None:
        if self._shows_text and pieces:
            text = "".join(piece.text for piece in pieces)
            sys.stdout.write(printable(text) if sys.stdout.isatty() else text)
            sys.stdout.flush()

    def _report(self, rows: list[dict[str, Any]], engine: Engine) -> None:
        if self._args.stats and rows:
            print(summary(engine.statistics), file=sys.stderr)
        if self._comparison:
            print(_comparison_line(self._comparison), file=sys.stderr)
        if not self._args.json or not rows:
            return
        report = {
            "model": self._speaker.name,
            "assistant": shown(self._speaker.assistant),
            "dtype": str(self._speaker.model.dtype).removeprefix("torch."),
            "seed": self._seed,
            "sampling": sampling_of(self._args).arguments(),
            "answers": rows,
            "statistics": engine.statistics.as_dict(),
            "comparison": self._comparison,
        }
        if self._shows_text:
            write_json(self._args.json, report)
        else:
            print(json.dumps(json_safe(report), indent=2))


def _comparison_line(found: dict[str, Any]) -> str:
    same = "the same tokens" if found["is_same"] else "other tokens, where rounding decides (docs/exactness.md)"
    times = f"{found['plain_seconds']:.2f} s without speculation, {found['seconds']:.2f} s with it"
    return f"{times}: {found['speedup']:.2f} x; {same}"
