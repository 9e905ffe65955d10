"""`python -m benchmarks batch`: seconds per token over batch size and draft length (Su et al., Figure 1)."""

import argparse
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from statistics import median

from rich.console import Console

from hf_smartspec.commands.common.names import shown
from hf_smartspec.commands.common.outputs import check_outputs
from hf_smartspec.commands.common.setup import Setup
from hf_smartspec.commands.profile.lookup import decode_batch

from ...kit.models import described, new_setup
from ...kit.plots import Panel, plot_lines
from ...kit.session import Case, Section, new_session, print_head
from ...kit.sources import sources_by_name
from ...kit.tables import Lines, Row, Rows, print_lines

Grid = dict[int, dict[int, float]]  # by batch size and length: seconds per token


def run(args: argparse.Namespace) -> int:
    check_outputs(args)
    setup = new_setup(args, args.sources, "--sources")
    model, free = setup.model, ("sources", "batch_sizes", "lengths", "repeats")
    session = new_session(args, model.device, model.dtype, {"parameters": model.num_parameters()}, free)
    sources = [shown(source) for source in args.sources]
    console = print_head(session, "batch", described(args, model))
    try:
        return session.run([_section(setup, source, args) for source in sources], console)
    finally:
        grids = {source: grid for source in sources if (grid := _grid(session.rows(source)))}
        if args.plot and grids:
            plot(grids, args.plot)


def _section(setup: Setup, source: str, args: argparse.Namespace) -> Section:
    """Return a source's measurements: at every batch size, the lengths take turns."""
    sizes, lengths = sorted(set(args.batch_sizes)), sorted(set(args.lengths))

    def cases() -> Iterator[Case]:
        seconds_per_token(setup, source, min(sizes), max(lengths))  # warms up
        for size in sizes:
            for length in lengths:
                yield Case(f"batch {size}, k={length}", partial(_measured, setup, source, size, length))

    return Section(source, cases, show=partial(_show, source), turns=args.repeats, summary=_median)


def _measured(setup: Setup, source: str, batch_size: int, length: int) -> Row:
    seconds = seconds_per_token(setup, source, batch_size, length)
    return {"batch_size": batch_size, "length": length, "seconds_per_token": seconds}


def _median(runs: Sequence[Row]) -> Row:
    return dict(runs[-1]) | {"seconds_per_token": median(row["seconds_per_token"] for row in runs)}


def seconds_per_token(setup: Setup, source: str, batch_size: int, length: int) -> float:
    """
    Decode one batch with drafts of one length. Return the mean over the requests of their seconds from the first to the
    last token, per token.
    """
    config = sources_by_name([source], setup)[source]()
    return decode_batch(setup.model, config, setup.prompts, batch_size, length, setup.max_new_tokens).per_token


def _grid(rows: Rows) -> Grid:
    grid: Grid = {}
    for row in rows.values():
        grid.setdefault(row["batch_size"], {})[row["length"]] = row["seconds_per_token"]
    return grid


def best_length(seconds: dict[int, float]) -> int:
    """Return the length of the least seconds per token."""
    return min(seconds, key=seconds.__getitem__)


def _show(source: str, console: Console, rows: Rows) -> None:
    grid = _grid(rows)
    lengths = list(next(iter(grid.values())))
    best = {size: best_length(cells) for size, cells in grid.items()}
    cells = [
        [str(size), *(_cell(seconds.get(length), length == best[size]) for length in lengths)]
        for size, seconds in grid.items()
    ]
    title = f"{source}: ms per token of a request; *: best length"
    print_lines(console, Lines(title, ["batch", *(f"k={length}" for length in lengths)], cells))
    console.print(f"Best lengths: {best}", highlight=False)


def _cell(seconds: float | None, is_best: bool) -> str:
    return "" if seconds is None else f"{1e3 * seconds:.1f}{'*' if is_best else ' '}"


def plot(grids: dict[str, Grid], path: Path) -> None:
    """Draw a panel per source with a line per batch size; a star marks its best length."""
    panels = []
    for source, grid in grids.items():
        named = {f"batch {size}": seconds for size, seconds in grid.items()}
        series = {name: {float(k): 1e3 * value for k, value in seconds.items()} for name, seconds in named.items()}
        best = {name: float(best_length(seconds)) for name, seconds in named.items()}
        panels.append(Panel(source, "draft length", "ms per token of a request", series, starred=best))
    plot_lines(path, panels)
