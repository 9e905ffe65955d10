"""`python -m benchmarks published`: methods as their papers publish them, beside the default, by batch size."""

import argparse
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from math import prod
from pathlib import Path
from statistics import mean, median
from typing import Any
from zlib import crc32

import numpy as np
from rich.console import Console

from hf_smartspec.candidates import Datastore, SSSDCandidates
from hf_smartspec.commands.common.arguments import usage_errors
from hf_smartspec.commands.common.drafters import DrafterFiles
from hf_smartspec.commands.common.names import shown
from hf_smartspec.commands.common.outputs import check_outputs
from hf_smartspec.commands.common.recordings import remember
from hf_smartspec.commands.common.setup import Setup, drafter_files
from hf_smartspec.commands.profile.lookup import seconds_per_token
from hf_smartspec.goodput import BatchLookupTable, NoSpeculation
from hf_smartspec.prepare.config import SmartSpecConfig
from hf_smartspec.prepare.sources import resolve
from hf_smartspec.serving.engine import Engine
from hf_smartspec.serving.outputs import EngineOutput

from ...kit.claims import Claim
from ...kit.models import described, new_setup
from ...kit.plots import Panel, plot_lines
from ...kit.session import Case, Section, new_session, print_head
from ...kit.tables import Lines, Row, Rows, print_lines
from .arguments import NONE, TABLE, Way

_NAME, _WARM_UP = "published", 8  # new tokens
Cells = dict[str, dict[int, Row]]  # by way and batch size


def run(args: argparse.Namespace) -> int:
    check_outputs(args)
    args.ways = list(dict.fromkeys([Way(NONE), *args.ways]))
    setup = new_setup(args, [way.drafter for way in args.ways], "--ways")
    bench = PublishedBench(setup, drafter_files(args, setup.model, "--ways"), args)
    bench.check()
    model, free = setup.model, ("ways", "batch_sizes", "repeats", "tolerance")
    session = new_session(args, model.device, model.dtype, {"parameters": model.num_parameters()}, free)
    about = f"{described(args, model)}, {len(setup.prompts)} prompts, {len(setup.past)} answers remembered"
    section = Section(
        _NAME, bench.cases, show=_show, turns=args.repeats, summary=_median,
        claims=partial(claims, ways=args.ways, tolerance=args.tolerance, is_exact=args.dtype == "float32"),
    )  # fmt: skip
    try:
        return session.run([section], print_head(session, _NAME, about))
    finally:
        if args.plot and (rows := session.rows(_NAME)):
            plot(rows, args.plot)


def title(way: Way) -> str:
    """Return the way as tables show it: models by the last part of their path."""
    return shown(way.drafter) + (f"@{way.policy}" if way.policy else "")


class PublishedBench:
    """
    Args:
        setup (`Setup`): The target with its prompts.
        files (`DrafterFiles`): Its drafters.
    """

    def __init__(self, setup: Setup, files: DrafterFiles, args: argparse.Namespace):
        self.setup, self.files, self.args = setup, files, args
        self._warm: set[tuple[Way, int]] = set()
        self._num_runs = 0

    def check(self) -> None:
        """Raise `UsageError` for drafters that cannot be loaded, and for tables that were not measured."""
        for way in self.args.ways:
            with usage_errors("--ways"):
                resolve(self.config(way, ""), self.setup.model)

    def cases(self) -> Iterator[Case]:
        for size in sorted(set(self.args.batch_sizes)):
            for way in self.args.ways:
                yield Case(f"batch {size}, {title(way)}", partial(self._measured, way, size))

    def config(self, way: Way, namespace: str) -> SmartSpecConfig:
        """Return the way's configuration; sources that are not kept by the model are new."""
        if way.drafter == NONE:
            return SmartSpecConfig(NONE, policy=NoSpeculation(), namespace=namespace)
        assistant = self.files.named(way.drafter).assistant
        if past := self.setup.past:
            store = Datastore.from_documents([item.response for item in past])
            items = [SSSDCandidates(store) if item == "sssd" else item for item in _listed(assistant)]
            assistant = items if isinstance(assistant, list) else items[0]
        options: dict[str, Any] = {}
        if way.length is not None:
            options["policy"] = BatchLookupTable({1: way.length})
        elif way.policy.startswith("nodes="):
            options["num_nodes"] = int(way.policy.removeprefix("nodes="))
        elif way.policy:
            options["policy"] = way.policy
        return SmartSpecConfig(assistant, namespace=namespace, **options)

    def _measured(self, way: Way, size: int) -> Row:
        """Answer all prompts, `size` at once; what begins together ends before others begin."""
        if (way, size) not in self._warm:
            self._answered(way, size, self.setup.prompts[:size], min(_WARM_UP, self.setup.max_new_tokens))
            self._warm.add((way, size))
        outputs, counts = self._answered(way, size, self.setup.prompts, self.setup.max_new_tokens)
        tokens = [output.generated_tokens for output in outputs]
        return {
            "way": title(way),
            "batch_size": size,
            "per_token": mean(seconds_per_token(output) for output in outputs),
            "tokens_per_second": sum(map(len, tokens)) / counts.seconds_total,
            "per_step": counts.mean_accepted_length,
            "checksums": [crc32(np.array(row, np.int64).tobytes()) for row in tokens],
        }

    def _answered(
        self, way: Way, size: int, prompts: Sequence[np.ndarray], max_new_tokens: int
    ) -> tuple[list[EngineOutput], Any]:
        """Return the outputs and the statistics of a new engine, whose trees hold nothing but the past."""
        self._num_runs += 1
        model, namespace = self.setup.model, f"{_NAME} {self._num_runs}"
        config = self.config(way, namespace)
        remember(resolve(config, model).source, self.setup.past, namespace)
        parts = [prompts[first : first + size] for first in range(0, len(prompts), size)]
        most = max(sum(map(len, part)) for part in parts)  # all prompts of a batch run in its first step
        with Engine(model, config, max_batch_size=size, max_prefill_tokens=most) as engine:
            outputs = [output for part in parts for output in engine.generate(part, max_new_tokens=max_new_tokens)]
        for output in outputs:
            if output.error is not None:
                raise RuntimeError(f"a request failed: {output.error}")
        return outputs, engine.statistics


def _listed(assistant: Any) -> list[Any]:
    return assistant if isinstance(assistant, list) else [assistant]


def _median(runs: list[Row]) -> Row:
    names = ("per_token", "tokens_per_second", "per_step")
    return runs[-1] | {name: median(row[name] for row in runs) for name in names}


def _cells(rows: Rows) -> Cells:
    cells: Cells = {}
    for row in rows.values():
        cells.setdefault(row["way"], {})[row["batch_size"]] = row
    return cells


def speed_ups(cells: Cells, way: str, other: str = NONE) -> dict[int, float]:
    """Return by batch size how many times as fast a way is as another, per token of a request."""
    sizes = [size for size in cells.get(way, {}) if size in cells.get(other, {})]
    return {size: cells[other][size]["per_token"] / cells[way][size]["per_token"] for size in sizes}


def _average(ratios: dict[int, float]) -> float:
    """Return the geometric mean over the batch sizes."""
    return float(prod(ratios.values()) ** (1 / len(ratios)))


def claims(rows: Rows, ways: Sequence[Way], tolerance: float, is_exact: bool) -> list[Claim]:
    """
    Return claims about ways that the auction decides, and the last one, the default: never slower than no drafts; about
    the default: on average not slower than any other; about tables: not slower than the best fixed length; and that all
    outputs are the same.
    """
    cells, least = _cells(rows), 1 - tolerance
    found, default = list[Claim](), title(ways[-1])
    for way in (item for item in ways[1:] if not item.policy or item is ways[-1]):
        if own := speed_ups(cells, title(way)):
            text, worst = f"{title(way)} is not slower than {NONE} at any batch size", min(own.values())
            found.append(Claim(text, worst >= least, f"at worst {worst:.2f} times as fast"))
    for way in ways[1:-1]:
        if ratios := speed_ups(cells, default, title(way)):
            text = f"{default} is not slower than {title(way)}, averaged over batch sizes"
            found.append(Claim(text, _average(ratios) >= least, f"{_average(ratios):.2f} times as fast"))
    for way in (item for item in ways if item.policy == TABLE):
        fixed = [title(item) for item in ways if item.drafter == way.drafter and item.length is not None]
        means = [_average(ratios) for name in fixed if (ratios := speed_ups(cells, title(way), name))]
        if means:
            text = f"{title(way)} is not slower than the best fixed length, averaged over batch sizes"
            found.append(Claim(text, min(means) >= least, f"{min(means):.2f} times as fast"))
    if is_exact:
        num = _num_different(cells)
        found.append(Claim(f"all outputs are those of {NONE}", not num, f"{num} differ" if num else ""))
    return found


def _num_different(cells: Cells) -> int:
    """Return the number of outputs that are not those without drafts at the smallest batch size."""
    plain = cells.get(NONE)
    if not plain:
        return 0
    expected = plain[min(plain)]["checksums"]
    every = (row["checksums"] for sizes in cells.values() for row in sizes.values())
    return sum(own != other for found in every for own, other in zip(found, expected))


def _show(console: Console, rows: Rows) -> None:
    cells = _cells(rows)
    sizes = list(dict.fromkeys(row["batch_size"] for row in rows.values()))
    heads = [f"batch {size}" for size in sizes]

    def lines(head: str, form: Callable[[Row], str]) -> Lines:
        table = [[way, *(form(own[size]) if size in own else "" for size in sizes)] for way, own in cells.items()]
        return Lines(head, ["way", *heads], table)

    print_lines(console, lines("ms per token of a request", lambda row: f"{1e3 * row['per_token']:.1f}"))
    ratios = {way: speed_ups(cells, way) for way in cells}
    table = [
        [way, *(f"{found[size]:.2f}" if size in found else "" for size in sizes), f"{_average(found):.2f}"]
        for way, found in ratios.items()
        if found
    ]
    print_lines(console, Lines(f"times as fast as {NONE}, per token of a request", ["way", *heads, "mean"], table))
    print_lines(console, lines("tokens per second, prompts included", lambda row: f"{row['tokens_per_second']:.1f}"))
    print_lines(console, lines("tokens per step of a request", lambda row: f"{row['per_step']:.2f}"))


def plot(rows: Rows, path: Path) -> None:
    """Draw the time of a token over the batch size, a line per way."""
    cells = _cells(rows)
    series = {way: {float(size): 1e3 * row["per_token"] for size, row in own.items()} for way, own in cells.items()}
    plot_lines(path, [Panel(_NAME, "requests at once", "ms per token of a request", series)])
