"""`python -m benchmarks simulate`: the papers' figures about load, and recorded traces, on a simulated engine."""

import argparse
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape

from hf_smartspec.commands.common.arguments import UsageError
from hf_smartspec.commands.common.console import make_console, table
from hf_smartspec.commands.common.demo import demo_folder
from hf_smartspec.commands.common.figures import check_folder, draw, shared_legend
from hf_smartspec.commands.common.outputs import check_output, write_json
from hf_smartspec.commands.common.progress import track
from hf_smartspec.commands.common.recordings import Fields, Recording, read_requests, tokenize, tokenizer_of
from hf_smartspec.simulator import LoadRequest, read_trace, with_acceptance

from ...kit.claims import exit_status, print_claims
from .figures import FIGURES
from .world import ALPHA, Figure, World

_MAX_PROMPT = 1024
_TRACE_POLICIES = ("none", "k=1", "k=3", "k=5", "step", "auction")
_MAX_TRACE_PROMPT, _MAX_TRACE_OUTPUT = 4096, 1024


def run(args: argparse.Namespace) -> int:
    check_output(args.json)
    if args.plots:
        check_folder(args.plots)
    world = World(args.requests, _recordings(args), args.seed)
    traces = {path.name: _trace_requests(path, args, world) for path in args.traces}
    console, done = make_console(), []
    _print_setting(world, console)
    try:
        with track(desc="simulating", unit=" loads") as progress:
            world.tick = progress.update
            for figure in _figures(args.figures, traces, world):
                done.append(figure)
                _print(figure, console)
    finally:  # interrupted, what was simulated so far is still worth having
        if args.json:
            write_json(args.json, [asdict(figure) for figure in done])
        for figure in done if args.plots else ():
            _plot(figure, args.plots / f"{figure.name.replace(' ', '_').replace(',', '').replace('.', '')}.png")
    return exit_status(claim for figure in done for claim in figure.claims)


def _recordings(args: argparse.Namespace) -> dict[str, list[Recording]]:
    if "12" not in args.figures:
        return {}
    files = args.files or [demo_folder("FILE", *([] if args.tokenizer else ["--tokenizer"])) / "prompts.jsonl"]
    tokenizer = tokenizer_of(args.tokenizer)
    return {path.name: tokenize(read_requests(path, Fields(), args.requests), tokenizer, _MAX_PROMPT) for path in files}


def _trace_requests(path: Path, args: argparse.Namespace, world: World) -> list[LoadRequest]:
    try:
        trace = read_trace(path)
    except (OSError, ValueError) as error:
        raise UsageError(f"--traces: {error}") from error
    if args.trace_rate:
        trace = trace.at_rate(args.trace_rate)
    requests = LoadRequest.of_trace(trace.shortened(_MAX_TRACE_PROMPT, _MAX_TRACE_OUTPUT), world.rng(16))
    if args.trace_seconds:
        requests = [item for item in requests if item.arrival <= args.trace_seconds]
    return with_acceptance(requests, world.rng(17).beta(10 * ALPHA, 10 * (1 - ALPHA), len(requests)), world.rng(18))


def _figures(names: list[str], traces: dict[str, list[LoadRequest]], world: World) -> Iterator[Figure]:
    for name in names:
        made = FIGURES[name](world)
        yield from [made] if isinstance(made, Figure) else made
    for name, requests in traces.items():
        yield trace_figure(name, requests, world)


def trace_figure(name: str, requests: list[LoadRequest], world: World) -> Figure:
    """Latencies of all policies on one trace."""
    span = requests[-1].arrival
    title = f"{len(requests)} requests in {span:.0f} s, draft model of alpha {ALPHA}"
    figure = Figure(f"trace {name}", title, "percentile (0: mean)", "latency, s")
    panel: dict[str, dict[float, float]] = {}
    start = time.perf_counter()
    for policy in _TRACE_POLICIES:
        result = world.run_draft(requests, world.policy(policy))
        panel[policy] = {0.0: result.mean_latency} | {float(rank): result.latency(rank) for rank in (50, 90, 99)}
    seconds = (time.perf_counter() - start) / len(_TRACE_POLICIES)
    figure.panels[f"{span / 3600:.2f} h, simulated in {seconds:.0f} s each"] = panel
    ratio = panel["auction"][0.0] / panel["none"][0.0]
    figure.claim(f"the auction is not slower than no speculation ({ratio:.2f} of its mean latency)", ratio <= 1.02)
    return figure


def _print_setting(world: World, console: Console) -> None:
    one, many = (1e3 * float(world.target.seconds(0, size)) for size in (1, 128))
    console.print(
        "[bold]benchmarks simulate[/bold] A 7 B model on an A100 and its 160 M draft, by data sheet: forwards of "
        f"1 and 128 tokens take {one:.1f} and {many:.1f} ms, a level of drafts {1e3 * world.draft.per_call:.1f} ms.\n",
        highlight=False,
    )


def _print(figure: Figure, console: Console) -> None:
    for name, series in figure.panels.items():
        title = f"{figure.name}: {figure.title}. {name}: {figure.y}"
        lines = table(escape(title), figure.x, *series)
        for x in next(iter(series.values()), {}):
            lines.add_row(f"{x:g}", *(f"{values[x]:.4g}" for values in series.values()))
        console.print(lines)
    print_claims(figure.claims, console)
    console.print()


def _plot(figure: Figure, path: Path) -> None:
    def paint(canvas: Any, axes: list[Any]) -> None:
        for axis, (name, series) in zip(axes, figure.panels.items()):
            for label, values in series.items():
                axis.plot(list(values), list(values.values()), marker="o", label=label)
            axis.set_title(name)
            axis.set_xlabel(figure.x)
            axis.set_ylabel(figure.y)
            axis.grid(alpha=0.3)
        canvas.suptitle(f"{figure.name}: {figure.title}")
        shared_legend(canvas, axes)

    draw(path, len(figure.panels), paint)
