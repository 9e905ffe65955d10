"""Results of `smartspec bench load`: tables, verdicts, and a figure."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console
from rich.markup import escape

from ...simulator import LoadResult
from ...simulator.results import pooled
from ..common.console import table
from ..common.outputs import draw, from_zero, shared_legend
from .arguments import AUCTION, NONE
from .explain import LEGEND, Explanation, print_explanations
from .policies import is_fixed

LEAST_GOODPUT, MOST_LATENCY = 0.98, 1.02  # limits of the auction, as multiples of no speculation's
MOST_BY_BEST = 1.03  # limit of its percentiles, as multiples of the best fixed choice's in hindsight
PERCENTILES = {
    "p50_latency": "p50 of latency",
    "p99_latency": "p99 of latency",
    "p50_per_token": "p50 of seconds per token",
    "p99_per_token": "p99 of seconds per token",
}
FIDELITY = 0.10  # relative error of the simulated mean latency that counts as faithful
_SATURATED = 0.1  # share of their latency that requests of a saturated engine wait in the queue


class Point(NamedTuple):
    """One load."""

    data_set: str
    source: str
    rate: float  # requests per second

    def __str__(self) -> str:
        return f"{short(self.data_set)}, {self.source}, {self.rate:g}/s"


@dataclass
class Cell:
    """
    Results of one policy with one load, one per repetition: of the real engine or, with --virtual, of the simulated
    one. With --simulated, `simulated` holds the same loads in virtual time, and `factors` by how much steps were slower
    than in the calibration, just before and after each; the simulation's steps are slowed down by as much.
    """

    results: list[LoadResult] = field(default_factory=list)
    explanations: list[Explanation] = field(default_factory=list)
    simulated: list[LoadResult] = field(default_factory=list)
    factors: list[float] = field(default_factory=list)


Cells = dict[Point, dict[str, Cell]]  # by load and policy; "none" comes first


def short(data_set: str) -> str:
    """Return the name of a file without its suffixes."""
    return Path(data_set).name.partition(".")[0]


def summaries(cells: Cells) -> list[dict[str, Any]]:
    """
    Return one row per load and policy. Figures are over the requests of all repetitions; ratios are medians over the
    repetitions, each against the run without speculation of the same arrivals, and None where no pair is complete.
    """
    rows = []
    for point, policies in cells.items():
        measured = {
            name: pooled(_finished(cell.results)).as_dict()
            for name, cell in policies.items()
            if _is_served(cell.results)
        }
        if NONE not in measured:
            continue
        best = best_fixed(measured)
        for name, figures in measured.items():
            cell = policies[name]
            row: dict[str, Any] = point._asdict() | {"policy": name} | figures
            row |= _ratios(policies[NONE].results, cell.results)
            row["is_best_fixed"] = name == best
            if name == AUCTION:
                row["latency_by_best_fixed"] = _median(latency_ratios(cell.results, policies[best].results))
                least = {key: min(measured[item][key] for item in measured if is_fixed(item)) for key in PERCENTILES}
                row["percentiles_by_best_fixed"] = {
                    key: figures[key] / least[key]
                    for key in PERCENTILES
                    if least[key] > 0  # not of single tokens
                }
            is_slow = row["speedup"] is not None and (
                row["goodput_ratio"] < LEAST_GOODPUT or row["speedup"] < 1 / MOST_LATENCY
            )
            row["is_too_slow"] = name == AUCTION and bool(is_slow)
            if _is_served(cell.simulated):
                row |= _fidelity(cell)
            if cell.explanations:
                row["explanations"] = [item.as_dict() for item in cell.explanations]
            rows.append(row)
    return rows


def _fidelity(cell: Cell) -> dict[str, Any]:
    """Return the errors of simulated mean latencies, run by run."""
    errors = [ratio - 1 for ratio in latency_ratios(cell.simulated, cell.results)]
    real = pooled(_finished(cell.results))
    return {
        "simulated_latency": pooled(cell.simulated).mean_latency,
        "simulation_factors": cell.factors,
        "simulation_errors": errors,
        "simulation_error": _median(errors),
        "is_saturated": real.seconds_waited > _SATURATED * float(real.latencies.sum()),
    }


def _is_served(results: list[LoadResult]) -> bool:
    return any(result.served for result in results)


def _finished(results: Sequence[LoadResult]) -> list[LoadResult]:
    """Return the results without an interrupted last one, unless it is the only one."""
    most = max(len(result.served) for result in results)
    return [result for result in results if len(result.served) == most]


def _ratios(plain: Sequence[LoadResult], results: Sequence[LoadResult]) -> dict[str, Any]:
    speedups = latency_ratios(plain, results)
    ratios = [after.goodput / before.goodput for before, after in _pairs(plain, results)]
    return {
        "speedup": _median(speedups), "speedups": speedups,
        "goodput_ratio": _median(ratios), "goodput_ratios": ratios,
    }  # fmt: skip


def latency_ratios(results: Sequence[LoadResult], others: Sequence[LoadResult]) -> list[float]:
    """Return the ratio of mean latencies, first by second, for every repetition that both have finished."""
    return [result.mean_latency / other.mean_latency for result, other in _pairs(results, others)]


def _pairs(results: Sequence[LoadResult], others: Sequence[LoadResult]) -> list[tuple[LoadResult, LoadResult]]:
    """Return pairs of the same repetition; a pair of which one run was interrupted is left out."""
    pairs = zip(results, others)
    return [(one, other) for one, other in pairs if one.served and len(one.served) == len(other.served)]


def _median(values: Sequence[float]) -> float | None:
    return median(values) if values else None


def best_fixed(measured: dict[str, dict[str, Any]]) -> str:
    """Return the fixed policy with the least latency, in hindsight."""
    return min((name for name in measured if is_fixed(name)), key=lambda name: measured[name]["mean_latency"])


# Heading, key, format.
_COLUMNS: tuple[tuple[str, str, str], ...] = (
    ("mean", "mean_latency", ".3f"),
    ("p50", "p50_latency", ".3f"),
    ("p99", "p99_latency", ".3f"),
    ("first", "first_token", ".3f"),
    ("token p50", "p50_per_token", ".4f"),
    ("token p99", "p99_per_token", ".4f"),
    ("tokens/s", "goodput", ".1f"),
    ("lat. x", "speedup", ".2f"),
    ("good. x", "goodput_ratio", ".2f"),
    ("/step", "mean_accepted_length", ".2f"),
)
_SIMULATED = (("sim.", "simulated_latency", ".3f"), ("error", "simulation_error", "+.1%"))


def print_points(rows: list[dict[str, Any]], cells: Cells, console: Console) -> None:
    """Print a table per data set, an overview and verdicts, then the explanations."""
    for data_set in dict.fromkeys(row["data_set"] for row in rows):
        _print_data_set(data_set, [row for row in rows if row["data_set"] == data_set], console)
    _print_overview([row for row in rows if row["policy"] == AUCTION and row["speedup"] is not None], console)
    for line in verdicts(rows):
        console.print(line)
    explained = {
        point: {name: cell.explanations[-1] for name, cell in policies.items() if cell.explanations}
        for point, policies in cells.items()
    }
    if any(explained.values()):
        console.print()
        for point, explanations in explained.items():
            if explanations:
                print_explanations(f"Why: {point}", explanations, console)
        console.print(LEGEND)


def _print_data_set(data_set: str, rows: list[dict[str, Any]], console: Console) -> None:
    columns = _COLUMNS
    if any("simulated_latency" in row for row in rows):
        columns = tuple(column for column in _COLUMNS if column[0] != "p99") + _SIMULATED
    title = f"{short(data_set)}: latencies in seconds"
    lines = table(escape(title), "source", "rate", "policy", *(name for name, _, _ in columns), num_text=3)
    labels = ("", "")
    for row in rows:
        before, labels = labels, (row["source"], f"{row['rate']:g}/s")
        if before not in (("", ""), labels):
            lines.add_section()
        name = row["policy"] + (" *" if row["is_best_fixed"] else "")
        values = [format(row[key], form) if row.get(key) is not None else "" for _, key, form in columns]
        lines.add_row(
            *(labels if labels != before else ("", "")),
            f"[red]{name} SLOWER[/red]" if row["is_too_slow"] else name,
            *values,
        )
    console.print(lines)


def _print_overview(auction: list[dict[str, Any]], console: Console) -> None:
    """Print the auction's worst ratio over the rates, where there are several data sets or sources."""
    sources, data_sets = (list(dict.fromkeys(row[key] for row in auction)) for key in ("source", "data_set"))
    if len(sources) * len(data_sets) < 2:
        return
    console.print("[bold]Auction: latency x no speculation, at the worst rate[/bold]")
    lines = table("", "data set", *sources)
    for data_set in data_sets:
        cells = []
        for source in sources:
            same = [row for row in auction if (row["data_set"], row["source"]) == (data_set, source)]
            value = f"{min(row['speedup'] for row in same):.2f}" if same else ""
            cells.append(f"[red]{value}[/red]" if any(row["is_too_slow"] for row in same) else value)
        lines.add_row(escape(short(data_set)), *cells)
    console.print(lines)


def verdicts(rows: list[dict[str, Any]]) -> Iterable[str]:
    """Yield a key to the tables, and verdicts on the auction and the simulation."""
    yield (
        "*: best fixed choice in hindsight. first: token. lat. x, good. x: how many times better than no speculation, "
        "median over the repetitions. /step: tokens."
    )
    auction = [row for row in rows if row["policy"] == AUCTION and row["speedup"] is not None]
    if auction:
        worst = min(auction, key=lambda row: row["speedup"])
        num_slow = sum(row["is_too_slow"] for row in auction)
        place = Point(worst["data_set"], worst["source"], worst["rate"])
        yield (
            f"Auction: slower than no speculation (goodput below {LEAST_GOODPUT}, or latency above {MOST_LATENCY}) at "
            f"{num_slow} of {len(auction)} loads; worst latency x {worst['speedup']:.2f} ({place})."
        )
    ratios = [row["latency_by_best_fixed"] for row in auction if row["latency_by_best_fixed"] is not None]
    if ratios:
        yield (
            f"Auction's latency by that of the best fixed choice: median {np.median(ratios):.2f}, worst "
            f"{max(ratios):.2f}."
        )
    yield from _percentile_verdicts(auction)
    yield from _fidelity_verdict([row for row in rows if row.get("simulation_error") is not None])


def _percentile_verdicts(auction: list[dict[str, Any]]) -> Iterable[str]:
    """Yield how far each percentile of the auction lies above the least of all fixed choices', load by load."""
    for key, name in PERCENTILES.items():
        ratios = {
            Point(row["data_set"], row["source"], row["rate"]): row["percentiles_by_best_fixed"][key]
            for row in auction
            if key in row["percentiles_by_best_fixed"]
        }
        if ratios:
            worst = max(ratios, key=lambda point: ratios[point])
            num_behind = sum(ratio > MOST_BY_BEST for ratio in ratios.values())
            yield (
                f"Auction's {name} by the best fixed choice's: worst {ratios[worst]:.2f} ({worst}), above "
                f"{MOST_BY_BEST} at {num_behind} of {len(ratios)} loads."
            )


def _fidelity_verdict(rows: list[dict[str, Any]]) -> Iterable[str]:
    if not rows:
        return
    below = [row for row in rows if not row["is_saturated"]]
    errors = [abs(row["simulation_error"]) for row in below]
    runs = [error for row in below for error in row["simulation_errors"]]
    factors = [factor for row in rows for factor in row["simulation_factors"]]
    spread = ""
    if below:
        single = max(map(abs, runs))
        spread = f": median {np.median(errors):.1%}, worst {max(errors):.1%}, worst of single runs {single:.1%}"
    yield (
        f"Simulation: mean latency within {FIDELITY:.0%} of the engine's in {sum(e <= FIDELITY for e in errors)} of "
        f"{len(below)} rows below saturation (at most {_SATURATED:.0%} of the latency is waiting in the queue)"
        f"{spread}. Errors are medians over the repetitions. In the rehearsals, by which the simulation is scaled, "
        f"steps took {min(factors):.2f} to {max(factors):.2f} times as long as in the calibration."
    )


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    """Draw speed-ups of the mean latency over the rate, a panel per data set and source; simulated ones dashed."""
    rows = [row for row in rows if row["speedup"] is not None]
    panels = list(dict.fromkeys((row["data_set"], row["source"]) for row in rows))
    if not panels:
        return

    def paint(figure: Any, axes: list[Any]) -> None:
        for axis, panel in zip(axes, panels):
            here = [row for row in rows if (row["data_set"], row["source"]) == panel]
            for name in dict.fromkeys(row["policy"] for row in rows):
                shown = [row for row in here if row["policy"] == name]
                color = axis.plot([row["rate"] for row in shown], [row["speedup"] for row in shown],
                                  marker="o", label=name)[0].get_color()  # fmt: skip
                pairs = [(row["rate"], _simulated_speedup(here, row)) for row in shown if "simulated_latency" in row]
                axis.plot(*zip(*pairs) if pairs else ([], []), linestyle="--", color=color)
            axis.set_title(f"{short(panel[0])}, {panel[1]}")
            axis.set_xlabel("requests per second")
            axis.set_ylabel("latency: no speculation / this")
            from_zero(axis)
        shared_legend(figure, axes)

    draw(path, len(panels), paint)


def _simulated_speedup(rows: list[dict[str, Any]], like: dict[str, Any]) -> float:
    same = [row for row in rows if row["rate"] == like["rate"]]
    plain = next((row for row in same if row["policy"] == NONE and "simulated_latency" in row), None)
    return plain["simulated_latency"] / like["simulated_latency"] if plain else float("nan")
