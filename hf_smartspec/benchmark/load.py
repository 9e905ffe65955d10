"""`smartspec bench load`: latency and goodput of the real engine over the request rate, for every way to speculate."""

import argparse
import json
from functools import partial
from typing import Any

import numpy as np
from rich.console import Console
from transformers.utils.logging import tqdm

from ..simulator import LoadResult, poisson
from .load_report import Cell, Cells, Point, plot, print_points, summaries
from .load_runs import Calibration, calibrate, lookup_table, new_engine, new_requests, serve, simulate_beside, warm_up
from .load_setup import (
    NONE,
    SOURCES,
    Policies,
    Setup,
    add_model_arguments,
    check_outputs,
    check_sources,
    command_of,
    load_setup,
    policy_name,
    positive_number,
)
from .report import make_console
from .timing import environment
from .verify import positive

_POLICIES = (NONE, "k=1", "k=3", "k=5", "table", "step", "auction")
_SHARES = (0.3, 0.6, 0.9)  # of what the engine can serve without speculation: the default rates


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_arguments(parser)
    parser.add_argument(
        "--rates", type=positive_number, nargs="+", metavar="R",
        help="requests per second (default: 0.3, 0.6 and 0.9 of what can be served without speculation)",
    )  # fmt: skip
    parser.add_argument("--sources", nargs="+", choices=SOURCES, default=list(SOURCES), help="default: all")
    parser.add_argument(
        "--policies", type=policy_name, nargs="+", default=list(_POLICIES), metavar="P",
        help=f"{', '.join(_POLICIES)} or request (default: all but the last); {NONE} is always measured",
    )  # fmt: skip
    parser.add_argument(
        "--seconds", type=positive_number, default=20.0, metavar="S", help="of arrivals, per run (default: 20)"
    )
    parser.add_argument("--repeats", type=positive, default=1, metavar="N", help="runs of every row (default: 1)")
    parser.add_argument(
        "--simulated",
        action="store_true",
        help="show the same loads in virtual time beside them, on a machine as fast as it was at each",
    )


def run(args: argparse.Namespace) -> int:
    check_outputs(args)
    setup = load_setup(args)
    check_sources(args, setup)
    console = make_console()
    report: dict[str, Any] = {
        "command": command_of(args),
        "environment": environment(setup.model.device, setup.model.dtype),
    }
    _print_setting(setup, args, report["environment"], console)
    cells: Cells = {}
    try:
        LoadBench(setup, args, cells).run()
    finally:  # interrupted, what was measured so far is still worth reading
        rows = summaries(cells)
        if rows:
            print_points(rows, console)
            if args.json:
                args.json.write_text(json.dumps(report | {"results": rows}, indent=2) + "\n")
            if args.plot:
                plot(rows, args.plot)
    return 1 if any(row["is_too_slow"] for row in rows) else 0


def _print_setting(setup: Setup, args: argparse.Namespace, system: dict[str, Any], console: Console) -> None:
    lengths = list(map(len, setup.prompts))
    console.print(
        f"[bold]smartspec bench load[/bold] {setup.model.num_parameters() / 1e6:.0f} M parameters, {system['dtype']}, "
        f"{system['device']}, {system['threads']} threads\n{len(lengths)} prompts of {min(lengths)} to {max(lengths)} "
        f"tokens, up to {args.max_new_tokens} new ones, at most {args.max_batch_size} requests at once; Poisson "
        f"arrivals for {args.seconds:g} s\n",
        highlight=False,
    )


class LoadBench:
    """Fills `cells`: every source, rate, repetition and policy, the policies side by side."""

    def __init__(self, setup: Setup, args: argparse.Namespace, cells: Cells):
        self.setup, self.args, self.cells = setup, args, cells
        self.names = list(dict.fromkeys([NONE, *args.policies]))
        self.responses: list[np.ndarray] = []

    def run(self) -> None:
        rates = self.args.rates or []
        num_rates = len(rates) or len(_SHARES)
        num = len(self.args.sources) * (1 + num_rates * self.args.repeats * len(self.names))
        with tqdm(total=num, desc="serving", disable=None, leave=False) as progress:
            for source in self.args.sources:
                calibration, responses = calibrate(self.setup, source)
                self.responses = self.responses or responses
                progress.update()
                if not rates:
                    most = capacity(self.setup, source, calibration, self.responses)
                    rates = [float(f"{share * most:.2g}") for share in _SHARES]
                policies = Policies(calibration.cost)
                if "table" in self.names:
                    policies.table = lookup_table(self.setup, source, calibration, self.responses)
                for rate in rates:
                    warm_up(self.setup, source, policies.new(self.names[-1]))
                    self._measure(Point(source, rate), calibration, policies, progress)

    def _measure(self, point: Point, calibration: Calibration, policies: Policies, progress: Any) -> None:
        cells = self.cells[point] = {name: Cell() for name in self.names}
        for repeat in range(self.args.repeats):
            rng = np.random.default_rng([self.setup.seed, repeat])
            times = poisson(point.rate, max(round(point.rate * self.args.seconds), 1), rng)
            requests = new_requests(self.setup, times, rng, self.responses)
            for name, cell in cells.items():
                cell.real.append(result := LoadResult())
                serve(self.setup, point.source, policies.new(name), requests, result)
                if self.args.simulated:
                    twin, factor = simulate_beside(
                        self.setup, point.source, calibration, partial(policies.new, name), requests, result
                    )
                    cell.simulated.append(twin)
                    cell.factors.append(factor)
                progress.update()


def capacity(setup: Setup, source: str, calibration: Calibration, responses: list[np.ndarray]) -> float:
    """Requests per second that the simulated engine answers without speculation when all have arrived already."""
    requests = new_requests(setup, np.zeros(4 * setup.max_batch_size), np.random.default_rng(setup.seed), responses)
    result = new_engine(setup, source, calibration).run(requests, Policies(calibration.cost).new(NONE))
    return len(requests) / result.seconds
