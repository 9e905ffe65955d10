"""`smartspec bench timeline`: latency over time while busy and quiet phases alternate (Su et al., Figure 6)."""

import argparse
import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from transformers.utils.logging import tqdm

from ..simulator import LoadResult, alternating
from .ablation_plots import draw, from_zero, shared_legend
from .load_costs import Calibrations
from .load_explain import LEGEND, Explanation, print_explanations
from .load_policies import NONE, ORACLE, Policies, policy_name
from .load_report import best_fixed
from .load_runs import calibrate, capacity, lookup_table, new_requests, serve, simulate_logged, warm_up
from .load_setup import (
    Setup,
    add_model_arguments,
    add_text_arguments,
    check_outputs,
    check_sources,
    command_of,
    load_setup,
    positive_number,
)
from .load_sources import SOURCES
from .loading import UsageError
from .report import make_console, table
from .timing import environment
from .verify import positive

_POLICIES = (NONE, "k=2", "k=4", "table", "auction")
_BUSY, _QUIET = 0.8, 0.2  # of what can be served without speculation


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_arguments(parser)
    add_text_arguments(parser)
    parser.add_argument(
        "--rates", type=positive_number, nargs=2, metavar=("BUSY", "QUIET"),
        help=f"requests per second (default: {_BUSY} and {_QUIET} of what can be served without speculation)",
    )  # fmt: skip
    parser.add_argument("--period", type=positive_number, default=15.0, metavar="S", help="of a phase (default: 15)")
    parser.add_argument("--phases", type=positive, default=4, metavar="N", help="busy and quiet in turn (default: 4)")
    parser.add_argument("--source", choices=SOURCES, default="draft", help="default: draft")
    parser.add_argument(
        "--policies", type=policy_name, nargs="+", default=list(_POLICIES), metavar="P",
        help=f"default: {' '.join(_POLICIES)}",
    )  # fmt: skip
    parser.add_argument("--group", type=positive, default=10, metavar="N", help="requests per point (default: 10)")
    parser.add_argument("--simulated", action="store_true", help="in virtual time, after a calibration in real time")
    parser.add_argument("--explain", action="store_true", help="also say where each policy's time went, and why")


def run(args: argparse.Namespace) -> int:
    check_outputs(args)
    if ORACLE in args.policies and not args.simulated:
        raise UsageError("--policies: only simulations have an oracle, see --simulated")
    setup = load_setup(args)
    args.sources = [args.source]
    check_sources(args, setup)
    console = make_console()
    results: dict[str, LoadResult] = {}
    explanations: dict[str, Explanation] = {}
    try:
        measure(setup, args, results, explanations)
    finally:  # interrupted, what was measured so far is still worth reading
        results = {name: result for name, result in results.items() if result.served}
        if results:
            _print(results, args, console)
            if args.explain and explanations:
                print_explanations("Why", explanations, console)
                console.print(LEGEND, highlight=False)
            if args.json:
                system = environment(setup.model.device, setup.model.dtype)
                report = {"command": command_of(args), "environment": system}
                report["results"] = {name: _row(name, result, explanations, args) for name, result in results.items()}
                args.json.write_text(json.dumps(report, indent=2) + "\n")
            if args.plot:
                plot(results, args, args.plot)
    return 0


def _row(
    name: str, result: LoadResult, explanations: dict[str, Explanation], args: argparse.Namespace
) -> dict[str, Any]:
    row: dict[str, Any] = result.as_dict() | {"groups": groups(result, args.group)}
    return row | ({"explanation": explanations[name].as_dict()} if args.explain and name in explanations else {})


def measure(
    setup: Setup, args: argparse.Namespace, results: dict[str, LoadResult], explanations: dict[str, Explanation]
) -> None:
    """One sequence of requests for all policies; fills in what came of it, and the engine's explanations."""
    names = list(dict.fromkeys(args.policies))
    with tqdm(total=1 + len(names), desc="serving", disable=None, leave=False) as progress:
        calibration = Calibrations(partial(calibrate, setup))[args.source]
        progress.update()
        if args.rates is None:
            most = capacity(setup, args.source, calibration)
            args.rates = [float(f"{share * most:.2g}") for share in (_BUSY, _QUIET)]
        policies = Policies(calibration.cost)
        if "table" in names:
            policies.table = lookup_table(setup, args.source, calibration)
        rng = np.random.default_rng(setup.seed)
        phases = [args.rates[phase % 2] for phase in range(args.phases)]
        times = alternating(phases, args.period, round(sum(phases) * args.period), rng)
        requests = new_requests(setup, times, rng)
        if not args.simulated:
            warm_up(setup, args.source, policies.new(names[-1]))
        for name in names:
            if args.simulated:
                results[name], explanations[name] = simulate_logged(
                    setup, args.source, calibration, partial(policies.new, name), requests
                )
            else:
                result = results.setdefault(name, LoadResult())
                explanations[name] = serve(setup, args.source, policies.new(name), requests, result)
            progress.update()


def groups(result: LoadResult, size: int) -> list[tuple[float, float]]:
    """Of every `size` requests in a row: the arrival of the first, and their mean latency, in seconds."""
    parts = (result.served[first : first + size] for first in range(0, len(result.served), size))
    return [(part[0].arrival, float(np.mean([item.latency for item in part]))) for part in parts]


def phase_latencies(result: LoadResult, period: float) -> tuple[float, float]:
    """Mean latency of the requests that arrived in busy and in quiet phases, in seconds; NaN where there are none."""
    by_phase: list[list[float]] = [[], []]
    for item in result.served:
        by_phase[int(item.arrival / period) % 2].append(item.latency)
    busy, quiet = (float(np.mean(values)) if values else float("nan") for values in by_phase)
    return busy, quiet


def _print(results: dict[str, LoadResult], args: argparse.Namespace, console: Console) -> None:
    kind = "simulated" if args.simulated else "real"
    title = (
        f"{args.source}, {kind} engine, {args.rates[0]:g} and {args.rates[1]:g} requests/s in turn, every "
        f"{args.period:g} s: mean latency, s"
    )
    best = best_fixed({name: result.as_dict() for name, result in results.items()}) if NONE in results else ""
    lines = table(title, "policy", "busy", "quiet", "all", "p90", "tokens/s")
    for name, result in results.items():
        busy, quiet = phase_latencies(result, args.period)
        values = (busy, quiet, result.mean_latency, result.latency(90))
        label = f"{name} *" if name == best else name
        lines.add_row(label, *(f"{value:.3f}" for value in values), f"{result.goodput:.1f}")
    console.print(lines)
    console.print("*: best fixed choice in hindsight.", highlight=False)


def plot(results: dict[str, LoadResult], args: argparse.Namespace, path: Path) -> None:
    def paint(figure: Any, axes: list[Any]) -> None:
        for name, result in results.items():
            axes[0].plot(*zip(*groups(result, args.group)), marker="o", label=name)
        for phase in range(0, args.phases, 2):
            axes[0].axvspan(phase * args.period, (phase + 1) * args.period, color="0.9")
        axes[0].set_xlabel(f"arrival of the first of {args.group} requests, s")
        axes[0].set_ylabel("mean latency, s")
        from_zero(axes[0])
        shared_legend(figure, axes)

    draw(path, 1, paint)
