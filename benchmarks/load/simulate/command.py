"""`python -m benchmarks simulate`: the papers' figures about load, and recorded traces, on a simulated engine."""

import argparse
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path

from rich.console import Console

from benchmarks.kit.plots import check_folder
from hf_smartspec.commands.common.arguments import usage_errors
from hf_smartspec.commands.common.recordings import Fields, Recording, read_requests, tokenize
from hf_smartspec.simulator import LoadRequest

from ...kit.claims import Claim
from ...kit.models import choose_model, files_of, tokenizer_of
from ...kit.plots import Panel, plot_lines
from ...kit.session import Case, Section, new_session, print_head
from ...kit.tables import Lines, Row, Rows, print_lines
from ..arrivals import read_trace
from ..requests import of_trace, with_acceptance
from .figures import FIGURES
from .world import ALPHA, Figure, World

_MAX_PROMPT = 1024
_TRACE_POLICIES = ("none", "k=1", "k=3", "k=5", "step", "auction")
_MAX_TRACE_PROMPT, _MAX_TRACE_OUTPUT = 4096, 1024


def run(args: argparse.Namespace) -> int:
    choose_model(args)
    session = new_session(args, free=["figures", "traces"])
    if args.plots:
        check_folder(args.plots)
    world = World(args.requests, _recordings(args), args.seed)
    traces = {path.name: _trace_requests(path, args, world) for path in args.traces}
    cases = [Case(name, partial(_played, FIGURES[name], world)) for name in args.figures]
    cases += [Case(name, partial(_played, partial(trace_figure, name, found), world)) for name, found in traces.items()]
    sections = [Section(case.name, partial(iter, [case]), show=_show, claims=_claims) for case in cases]
    try:
        return session.run(sections, print_head(session, "simulate", _about(world)))
    finally:
        for figure in _figures([row for case in cases for row in session.rows(case.name).values()]):
            if args.plots:
                _plot(figure, args.plots)


def _played(make: Callable[[World], Figure | Iterator[Figure]], world: World) -> Row:
    made = make(world)
    return {"figures": [asdict(figure) for figure in ([made] if isinstance(made, Figure) else made)]}


def _figures(rows: Iterable[Row]) -> list[Figure]:
    """Return the figures of rows, which may have been read from a file."""
    return [Figure.of(item) for row in rows for item in row["figures"]]


def _claims(rows: Rows) -> list[Claim]:
    return [claim for figure in _figures(rows.values()) for claim in figure.claims]


def _recordings(args: argparse.Namespace) -> dict[str, list[Recording]]:
    if not {"12", "sssd"} & {*args.figures}:
        return {}
    tokenizer = tokenizer_of(args)
    return {
        path.name: tokenize(read_requests(path, Fields(), args.requests), tokenizer, _MAX_PROMPT)
        for path in files_of(args)
    }


def _trace_requests(path: Path, args: argparse.Namespace, world: World) -> list[LoadRequest]:
    with usage_errors("--traces", OSError, ValueError):
        trace = read_trace(path)
    if args.trace_rate:
        trace = trace.at_rate(args.trace_rate)
    requests = of_trace(trace.shortened(_MAX_TRACE_PROMPT, _MAX_TRACE_OUTPUT), world.rng(16))
    if args.trace_seconds:
        requests = [item for item in requests if item.arrival <= args.trace_seconds]
    return with_acceptance(requests, world.rng(17).beta(10 * ALPHA, 10 * (1 - ALPHA), len(requests)), world.rng(18))


def trace_figure(name: str, requests: list[LoadRequest], world: World) -> Figure:
    """Return latencies of all policies on one trace."""
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


def _about(world: World) -> str:
    one, many = (1e3 * float(world.target.seconds(0, size)) for size in (1, 128))
    return (
        f"A 7 B model on an A100 and its 160 M draft, by data sheet: forwards of 1 and 128 tokens take {one:.1f} and "
        f"{many:.1f} ms, a level of drafts {1e3 * world.draft.per_call:.1f} ms."
    )


def _show(console: Console, rows: Rows) -> None:
    for figure in _figures(rows.values()):
        for name, series in figure.panels.items():
            title = f"{figure.name}: {figure.title}. {name}: {figure.y}"
            xs = next(iter(series.values()), {})
            cells = [[f"{x:g}", *(f"{values[x]:.4g}" for values in series.values())] for x in xs]
            print_lines(console, Lines(title, [figure.x, *series], cells))


def _plot(figure: Figure, folder: Path) -> None:
    name = figure.name.replace(" ", "_").replace(",", "").replace(".", "")
    panels = [Panel(name, figure.x, figure.y, series) for name, series in figure.panels.items()]
    plot_lines(folder / f"{name}.png", panels, f"{figure.name}: {figure.title}")
