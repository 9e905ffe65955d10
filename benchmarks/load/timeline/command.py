"""`python -m benchmarks timeline`: latency over time while busy and quiet phases alternate (Su et al., Figure 6)."""

import argparse
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from hf_smartspec.commands.common.arguments import UsageError, usage_errors
from hf_smartspec.commands.common.console import table, track
from hf_smartspec.commands.common.names import check_simulated, shown
from hf_smartspec.commands.common.outputs import check_outputs, draw, from_zero, shared_legend
from hf_smartspec.commands.common.setup import Setup
from hf_smartspec.commands.load.arguments import AUCTION, NONE, ORACLE
from hf_smartspec.commands.load.costs import Calibrations
from hf_smartspec.commands.load.explain import LEGEND, print_explanations
from hf_smartspec.commands.load.policies import Policies, is_fixed
from hf_smartspec.commands.load.report import Cell, Point, latency_ratios, summaries
from hf_smartspec.commands.load.runs import Twin, calibrate, new_requests, serve, warm_up
from hf_smartspec.goodput import LengthPolicy
from hf_smartspec.simulator import LoadResult

from ...kit.claims import Claim
from ...kit.models import described, new_setup
from ...kit.session import Case, Section, new_session, print_head
from ...kit.tables import Row
from ..arrivals import alternating, read_trace
from .arguments import BUSY, QUIET

_NAME = "timeline"
_LEAST_GAIN = 1.10  # what the auction is to gain on the best fixed length over mixed traffic


def run(args: argparse.Namespace) -> int:
    check_outputs(args)
    if ORACLE in args.policies and not args.simulated:
        raise UsageError("--policies: only simulations have an oracle, see --simulated")
    args.sources = [args.source]
    check_simulated(args.sources, args.simulated or "table" in args.policies)
    setup = new_setup(args, args.sources, "--source")
    args.source = shown(args.source)
    session = new_session(args, setup.model.device, setup.model.dtype)
    cells: dict[str, Cell] = {name: Cell() for name in dict.fromkeys([NONE, *args.policies])}
    section = Section(
        _NAME, lambda: _cases(setup, args, cells), turns=args.repeats,
        show=lambda console, _: _print(summarized(setup, args, cells), cells, args, console),
        claims=lambda _: claims(summarized(setup, args, cells)),
    )  # fmt: skip
    try:
        return session.run([section], print_head(session, _NAME, described(args, setup.model)))
    finally:
        rows = summarized(setup, args, cells)
        session.report["results"][_NAME] = rows
        session.write()
        if rows and args.plot:
            plot(rows, args, args.plot)


def _cases(setup: Setup, args: argparse.Namespace, cells: dict[str, Cell]) -> Iterator[Case]:
    """Yield the policies, which take turns; all serve the same requests, and new ones in every turn."""
    with track(total=1, desc=f"measuring what steps with {args.source} cost") as progress:
        calibration = Calibrations(partial(calibrate, setup))[args.source]
        progress.update()
    twin = Twin(setup, args.source, calibration)
    if args.rates is None:
        args.rates = [float(f"{share * twin.capacity():.2g}") for share in (BUSY, QUIET)]
    arrivals(args, args.repeats - 1, np.random.default_rng(0))  # refuses a trace that is too short
    policies = Policies(calibration.cost)
    if "table" in cells:
        policies.table = twin.lookup_table()
    if not args.simulated:
        warm_up(setup, args.source, policies.new(list(cells)[-1]))
    for name, cell in cells.items():
        yield Case(name, partial(_serve, twin, args, partial(policies.new, name), cell))


def _serve(twin: Twin, args: argparse.Namespace, new_policy: Callable[..., LengthPolicy], cell: Cell) -> Row:
    """Serve the requests of a policy's next turn; the results are kept in its cell, also those of a broken turn."""
    setup = twin.setup
    rng = np.random.default_rng([setup.seed, len(cell.results)])
    requests = new_requests(setup, arrivals(args, len(cell.results), rng), rng)
    if args.simulated:
        result, explanation = twin.run_logged(requests, new_policy)
        cell.results.append(result)
    else:
        cell.results.append(result := LoadResult())
        explanation = serve(setup, args.source, new_policy(), requests, result)
    if args.explain:
        cell.explanations.append(explanation)
    return {}


def arrivals(args: argparse.Namespace, turn: int, rng: np.random.Generator) -> np.ndarray:
    """Return the arrival times of a turn, `[n]` float64: seconds, of phases drawn anew or of the trace's next part."""
    phases = [args.rates[phase % 2] for phase in range(args.phases)]
    number = max(round(sum(phases) * args.period), 2)
    if args.trace is None:
        return alternating(phases, args.period, number, rng)
    with usage_errors("--trace"):
        trace = read_trace(args.trace, (turn + 1) * number)
        if len(trace.times) < (turn + 1) * number:
            raise ValueError(f"{str(args.trace)!r} has {len(trace.times)} requests, too few for turn {turn + 1}")
    times = trace.times[turn * number :] - trace.times[turn * number]
    return times * (args.period * args.phases / max(float(times[-1]), 1e-9))


def summarized(setup: Setup, args: argparse.Namespace, cells: dict[str, Cell]) -> dict[str, dict[str, Any]]:
    """
    Return a row per policy, of what has been measured; `gain` is the best fixed choice's mean latency by its own, the
    median over the repetitions.
    """
    rows = {row["policy"]: row for row in summaries({Point(setup.name, args.source, 0.0): cells})}
    best = next((name for name, row in rows.items() if row["is_best_fixed"]), NONE)
    for name, row in rows.items():
        results = cells[name].results
        served = sorted(item for result in results for item in result.served)  # phases are the same in all
        busy, quiet = phase_latencies(LoadResult(served), args.period)
        gains = latency_ratios(cells[best].results, results)
        row |= {"busy": busy, "quiet": quiet, "gain": float(np.median(gains)) if gains else None, "gains": gains}
        row["groups"] = groups(LoadResult(served), args.group * len(results))
        del row["rate"], row["is_too_slow"]  # of one load, and this is a mixture
    return rows


def groups(result: LoadResult, size: int) -> list[tuple[float, float]]:
    """Return the arrival of the first of every `size` requests in a row, and their mean latency, in seconds."""
    parts = (result.served[first : first + size] for first in range(0, len(result.served), size))
    return [(part[0].arrival, float(np.mean([item.latency for item in part]))) for part in parts]


def phase_latencies(result: LoadResult, period: float) -> tuple[float, float]:
    """Return the mean latency of requests that arrived in busy and in quiet phases, in seconds, NaN without any."""
    by_phase: list[list[float]] = [[], []]
    for item in result.served:
        by_phase[int(item.arrival / period) % 2].append(item.latency)
    busy, quiet = (float(np.mean(values)) if values else float("nan") for values in by_phase)
    return busy, quiet


def _print(rows: dict[str, dict[str, Any]], cells: dict[str, Cell], args: argparse.Namespace, console: Console) -> None:
    kind = "simulated" if args.simulated else "real"
    load = f"{args.rates[0]:g} and {args.rates[1]:g} requests/s in turn, every {args.period:g} s"
    if args.trace:
        load = f"arrivals of {args.trace.name}, {np.mean(args.rates):.2g} requests/s on average"
    title = f"{args.source}, {kind} engine, {load}: mean latency, s"
    phases = [] if args.trace else ["busy", "quiet"]
    lines = table(title, "policy", *phases, "all", "p90", "tokens/s", "lat. x", "x best fixed")
    for name, row in rows.items():
        values = (row[key] for key in (*phases, "mean_latency", "p90_latency"))
        ratios = ("" if row[key] is None else f"{row[key]:.2f}" for key in ("speedup", "gain"))
        label = f"{name} *" if row["is_best_fixed"] else name
        lines.add_row(label, *(f"{value:.3f}" for value in values), f"{row['goodput']:.1f}", *ratios)
    console.print(lines)
    console.print(
        "*: best fixed choice in hindsight. lat. x, x best fixed: how many times better than no speculation, and than "
        "*; medians over the repetitions.",
        highlight=False,
    )
    explanations = {name: cell.explanations[-1] for name, cell in cells.items() if cell.explanations}
    if explanations:
        print_explanations("Why", explanations, console)
        console.print(LEGEND, highlight=False)


def claims(rows: dict[str, dict[str, Any]]) -> list[Claim]:
    """Return whether the auction gains enough, where it was measured beside a fixed length."""
    auction = rows.get(AUCTION)
    if auction is None or auction["gain"] is None or not any(is_fixed(name) for name in rows if name != NONE):
        return []
    each = ", ".join(f"{gain:.2f}" for gain in auction["gains"])
    text = f"the auction's latency is at least {_LEAST_GAIN:.2f} times better than the best fixed choice's"
    return [Claim(text, auction["gain"] >= _LEAST_GAIN, f"{auction['gain']:.2f} times (by repetition: {each})")]


def plot(rows: dict[str, dict[str, Any]], args: argparse.Namespace, path: Path) -> None:
    def paint(figure: Any, axes: list[Any]) -> None:
        for name, row in rows.items():
            axes[0].plot(*zip(*row["groups"]), marker="o", label=name)
        for phase in range(0, 0 if args.trace else args.phases, 2):
            axes[0].axvspan(phase * args.period, (phase + 1) * args.period, color="0.9")
        axes[0].set_xlabel(f"arrival of the first of {args.group} requests, s")
        axes[0].set_ylabel("mean latency, s")
        from_zero(axes[0])
        shared_legend(figure, axes)

    draw(path, 1, paint)
