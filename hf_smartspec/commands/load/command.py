"""`smartspec bench load`: latency and goodput of the engine over the request rate, by source and policy."""

import argparse
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
from rich.console import Console

from ...goodput.papers.policies import BatchLookupTable
from ...simulator import LoadResult, poisson
from ..common.arguments import UsageError, command_of
from ..common.console import environment, make_console, print_head, track
from ..common.names import check_simulated, shown
from ..common.outputs import check_output, check_outputs, write_json
from ..common.setup import Setup, check_sources, load_setups, merged
from .arguments import NONE, ORACLE
from .costs import Calibrations
from .policies import Policies
from .report import Cell, Cells, Point, plot, print_points, summaries
from .runs import Twin, calibrate, new_requests, serve, warm_up

_SHARES = (0.3, 0.8)  # of the engine's capacity without speculation: the default rates
_REHEARSAL = 0.5  # length of a rehearsal, as a share of its load's
_NUM_CALIBRATED = 32  # prompts by which costs for virtual time are measured


def run(args: argparse.Namespace) -> int:
    _check(args)
    setups = load_setups(args)
    check_sources(args.sources, setups[0], "--sources")
    console, system = make_console(), environment(setups[0].model.device, setups[0].model.dtype)
    report: dict[str, Any] = {"command": command_of(args), "environment": system}
    cells: Cells = {}
    bench = LoadBench(setups, args, cells)
    _print_setting(setups, args, system, console)
    try:
        bench.run()
    finally:  # interrupted, what was measured so far is still worth reading
        rows = summaries(cells)
        if rows:
            print_points(rows, cells, console)
            if args.json:
                write_json(args.json, report | {"results": rows})
            if args.plot:
                plot(rows, args.plot)
    return 1 if any(row["is_too_slow"] for row in rows) else 0


def _check(args: argparse.Namespace) -> None:
    check_outputs(args)
    check_output(args.profile)
    if args.profile and not args.virtual:
        raise UsageError("--profile goes with --virtual")
    if args.simulated and args.virtual:
        raise UsageError("--simulated goes with the real engine, not with --virtual")
    if ORACLE in args.policies and not args.virtual:
        raise UsageError("--policies: only simulations have an oracle, see --virtual")
    check_simulated(args.sources, args.simulated or args.virtual or "table" in args.policies)
    if args.rates and args.shares:
        raise UsageError("--rates and --shares exclude each other")
    args.replay = args.replay or args.virtual


def _print_setting(setups: Sequence[Setup], args: argparse.Namespace, system: dict[str, Any], console: Console) -> None:
    lengths = [len(prompt) for setup in setups for prompt in setup.prompts]
    model, time = setups[0].model, "virtual time, " if args.virtual else ""
    texts = "recorded responses, replayed" if args.replay else "the target's own outputs"
    past = f"; suffix trees remember {args.remember} more of each" if args.remember else ""
    lines = (
        f"{len(lengths)} prompts of {min(lengths)} to {max(lengths)} tokens from {len(setups)} data sets{past}",
        f"{texts}, up to {args.max_new_tokens} tokens, at most {args.max_batch_size} requests at once",
        f"Poisson arrivals for {args.seconds:g} s",
    )
    print_head(console, "bench load", f"{time}{model.num_parameters() / 1e6:.0f} M parameters", system, *lines)


class LoadBench:
    """Measurement of all cells: every data set, source, rate, repetition and policy, the policies side by side."""

    def __init__(self, setups: Sequence[Setup], args: argparse.Namespace, cells: Cells):
        self.setups, self.args, self.cells = setups, args, cells
        self.names = list(dict.fromkeys([NONE, *args.policies]))
        self._tables: dict[str, BatchLookupTable] = {}
        self._virtual: Calibrations | None = None
        if args.virtual:
            self._whole = merged(setups)
            model = self._whole.model
            machine = {"parameters": model.num_parameters()} | environment(model.device, model.dtype)
            sample = self._whole.sample(_NUM_CALIBRATED)
            self._virtual = Calibrations(partial(calibrate, sample), args.profile, machine)

    def run(self) -> None:
        shares = self.args.shares or _SHARES
        num_rates = len(self.args.rates or shares)
        num_runs = num_rates * self.args.repeats * len(self.names)
        num = len(self.setups) * len(self.args.sources) * (1 + num_runs)
        with track(total=num, desc="serving") as progress:
            for setup in self.setups:
                calibrations = self._virtual or Calibrations(partial(calibrate, setup))
                rates = self.args.rates
                for source in map(shown, self.args.sources):
                    progress.set_postfix_str(f"measuring what steps with {source} cost")
                    calibration = calibrations[source]
                    progress.update()
                    twin = Twin(setup, source, calibration)
                    if rates is None:
                        rates = [float(f"{share * twin.capacity():.2g}") for share in shares]
                    policies = self._policies(twin)
                    for rate in rates:
                        if not self.args.virtual:
                            warm_up(setup, source, policies.new(self.names[-1]))
                        self._measure(twin, rate, policies, progress)

    def _policies(self, twin: Twin) -> Policies:
        policies = Policies(twin.calibration.cost)
        if "table" in self.names and self.args.virtual:  # one for all data sets, as the costs are
            if twin.source not in self._tables:
                self._tables[twin.source] = twin._replace(setup=self._whole).lookup_table()
            policies.table = self._tables[twin.source]
        elif "table" in self.names:
            policies.table = twin.lookup_table()
        return policies

    def _measure(self, twin: Twin, rate: float, policies: Policies, progress: Any) -> None:
        setup, point = twin.setup, Point(twin.setup.name, twin.source, rate)
        cells = self.cells[point] = {name: Cell() for name in self.names}
        for repeat in range(self.args.repeats):
            rng = np.random.default_rng([setup.seed, repeat])
            times = poisson(point.rate, max(round(point.rate * self.args.seconds), 1), rng)
            requests = new_requests(setup, times, rng)
            times = poisson(point.rate, max(round(point.rate * self.args.seconds * _REHEARSAL), 2), rng)
            rehearsed = new_requests(setup, times, rng)
            order = list(cells.items())
            for name, cell in order if repeat % 2 == 0 else reversed(order):
                progress.set_postfix_str(f"{point}, {name}")
                new_policy = partial(policies.new, name)
                if self.args.simulated:
                    self._run_beside(twin, new_policy, requests, rehearsed, cell)
                else:
                    self._run(twin, new_policy, requests, cell)
                progress.update()

    def _run(self, twin: Twin, new_policy: Any, requests: Any, cell: Cell) -> None:
        if self.args.virtual and not self.args.explain:
            cell.results.append(twin.run(requests, new_policy))
        elif self.args.virtual:
            result, explanation = twin.run_logged(requests, new_policy)
            cell.results.append(result)
            cell.explanations.append(explanation)
        else:
            cell.results.append(result := LoadResult())
            explanation = serve(twin.setup, twin.source, new_policy(), requests, result)
            if self.args.explain:
                cell.explanations.append(explanation)

    def _run_beside(self, twin: Twin, new_policy: Any, requests: Any, rehearsed: Any, cell: Cell) -> None:
        """Run the load on the real engine between two rehearsals, then in virtual time, scaled by the rehearsals."""
        rehearsals = [LoadResult(), LoadResult()]
        serve(twin.setup, twin.source, new_policy(), rehearsed, rehearsals[0])
        self._run(twin, new_policy, requests, cell)
        serve(twin.setup, twin.source, new_policy(), rehearsed, rehearsals[1])
        factor = twin.slowness(rehearsed, new_policy, rehearsals)
        cell.factors.append(factor)
        cell.simulated.append(twin.scaled(factor).run(requests, new_policy))
