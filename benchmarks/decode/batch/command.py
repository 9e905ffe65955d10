"""`python -m benchmarks batch`: seconds per token over batch size and draft length (Su et al., Figure 1)."""

import argparse
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from rich.console import Console

from hf_smartspec.commands.common.arguments import command_of
from hf_smartspec.commands.common.console import make_console, table
from hf_smartspec.commands.common.figures import draw, from_zero
from hf_smartspec.commands.common.names import shown
from hf_smartspec.commands.common.outputs import check_outputs, write_json
from hf_smartspec.commands.common.progress import track
from hf_smartspec.commands.common.setup import Setup, check_sources, load_setup
from hf_smartspec.commands.common.timing import environment
from hf_smartspec.goodput import FixedLength
from hf_smartspec.prepare.config import SmartSpecConfig
from hf_smartspec.serving.engine import Engine

Grid = dict[int, dict[int, list[float]]]  # by batch size and length: seconds per token of every repetition


def run(args: argparse.Namespace) -> int:
    check_outputs(args)
    setup = load_setup(args)
    check_sources(args, setup)
    console = make_console()
    grids: dict[str, Grid] = {shown(source): {} for source in args.sources}
    try:
        measure(setup, args, grids)
    finally:  # interrupted, what was measured so far is still worth reading
        rows = [row for source, grid in grids.items() for row in summaries(source, grid)]
        for source, grid in grids.items():
            _print(source, grid, setup, console)
        if args.json:
            system = environment(setup.model.device, setup.model.dtype)
            report = {"command": command_of(args), "environment": system, "results": rows}
            write_json(args.json, report)
        if args.plot and rows:
            plot({source: grid for source, grid in grids.items() if grid}, args.plot)
    return 0


def measure(setup: Setup, args: argparse.Namespace, grids: dict[str, Grid]) -> None:
    """Fills the grids; at every batch size, the lengths take turns."""
    sizes, lengths = sorted(set(args.batch_sizes)), sorted(set(args.lengths))
    num = len(args.sources) * len(sizes) * len(lengths) * args.repeats
    with track(total=num, desc="decoding") as progress:
        for source, grid in grids.items():
            seconds_per_token(setup, source, min(sizes), max(lengths))  # warms up
            for size in sizes:
                progress.set_postfix_str(f"{source}, batch {size}")
                for _ in range(args.repeats):
                    for length in lengths:
                        seconds = seconds_per_token(setup, source, size, length)
                        grid.setdefault(size, {}).setdefault(length, []).append(seconds)
                        progress.update()


def seconds_per_token(setup: Setup, source: str, batch_size: int, length: int) -> float:
    """
    Decodes one batch of requests that end together, with drafts of one length. Prompts are not counted: they are
    all run in the first step. The mean over the requests of their seconds from the first to the last token, by tokens.
    """
    prompts = [setup.prompts[index % len(setup.prompts)] for index in range(batch_size)]
    config = SmartSpecConfig(setup.new_source(source), policy=FixedLength(length))
    size = sum(map(len, prompts))
    engine = Engine(setup.model, config, max_batch_size=batch_size, max_prefill_tokens=size)
    outputs = engine.generate(prompts, max_new_tokens=setup.max_new_tokens, eos_token_id=None)
    seconds = [
        (output.lifespan[1] - (output.first_token_time or output.lifespan[0]))
        / max(len(output.generated_tokens) - 1, 1)
        for output in outputs
    ]
    return float(np.mean(seconds))


def best_length(lengths: dict[int, list[float]]) -> int:
    return min(lengths, key=lambda length: median(lengths[length]))


def summaries(source: str, grid: Grid) -> list[dict[str, Any]]:
    return [
        {"source": source, "batch_size": size, "length": length, "seconds_per_token": median(seconds),
         "is_best": length == best_length(lengths)}
        for size, lengths in grid.items() for length, seconds in lengths.items()
    ]  # fmt: skip


def _print(source: str, grid: Grid, setup: Setup, console: Console) -> None:
    if not grid:
        return
    lengths = list(next(iter(grid.values())))
    title = (
        f"{source}, {setup.model.num_parameters() / 1e6:.0f} M parameters: ms per token of a request; *: best length"
    )
    lines = table(title, "batch", *(f"k={length}" for length in lengths))
    for size, cells in grid.items():
        best = best_length(cells)
        shown = [
            f"{1e3 * median(cells[length]):.1f}{'*' if length == best else ' '}" if length in cells else ""
            for length in lengths
        ]
        lines.add_row(str(size), *shown)
    console.print(lines)
    console.print(f"Best lengths: { ({size: best_length(cells) for size, cells in grid.items()}) }", highlight=False)


def plot(grids: dict[str, Grid], path: Path) -> None:
    """A panel per source, a line per batch size, with a star at its best length."""

    def paint(figure: Any, axes: list[Any]) -> None:
        for axis, (source, grid) in zip(axes, grids.items()):
            for size, cells in grid.items():
                seconds = {length: 1e3 * median(values) for length, values in cells.items()}
                color = axis.plot(list(seconds), list(seconds.values()), label=f"batch {size}")[0].get_color()
                best = best_length(cells)
                axis.plot(best, seconds[best], marker="*", markersize=12, color=color)
            axis.set_title(source)
            axis.set_xlabel("draft length")
            axis.set_ylabel("ms per token of a request")
            from_zero(axis)
            axis.legend(fontsize="small")

    draw(path, len(grids), paint)
