"""What `smartspec bench load` found: tables, verdicts, and a figure."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console

from ..simulator import LoadResult
from ..simulator.results import pooled
from .ablation_plots import draw, from_zero, shared_legend
from .load_setup import NONE, is_fixed
from .report import table

LEAST_GOODPUT, MOST_LATENCY = 0.98, 1.02  # of no speculation's: what the auction must keep to
FIDELITY = 0.10  # relative error of the simulated mean latency that counts as faithful


class Point(NamedTuple):
    """One load."""

    source: str
    rate: float  # requests per second


@dataclass
class Cell:
    """
    What one policy made of one load: one result per repetition. `factors`: by which steps were slower in the real run
    than in the calibration, so that the simulation's are, too.
    """

    real: list[LoadResult] = field(default_factory=list)
    simulated: list[LoadResult] = field(default_factory=list)
    factors: list[float] = field(default_factory=list)


Cells = dict[Point, dict[str, Cell]]  # by load and policy; "none" comes first


def summaries(cells: Cells) -> list[dict[str, Any]]:
    """One row per load and policy."""
    rows = []
    for point, policies in cells.items():
        measured: dict[str, Any] = {
            name: pooled(cell.real).as_dict() for name, cell in policies.items() if _is_served(cell.real)
        }
        if NONE not in measured:
            continue
        plain, best = measured[NONE], best_fixed(measured)
        for name, row in measured.items():
            row = {"source": point.source, "rate": point.rate, "policy": name} | row
            row["speedup"] = plain["mean_latency"] / row["mean_latency"]
            row["goodput_ratio"] = row["goodput"] / plain["goodput"]
            row["is_best_fixed"] = name == best
            row["is_too_slow"] = name == "auction" and (
                row["goodput_ratio"] < LEAST_GOODPUT or row["speedup"] < 1 / MOST_LATENCY
            )
            if _is_served(policies[name].simulated):
                row["simulated_latency"] = pooled(policies[name].simulated).mean_latency
                row["simulation_factors"] = policies[name].factors
                row["simulation_error"] = row["simulated_latency"] / row["mean_latency"] - 1
            rows.append(row)
    return rows


def _is_served(results: list[LoadResult]) -> bool:
    return any(result.served for result in results)


def best_fixed(measured: dict[str, dict[str, Any]]) -> str:
    """The fixed choice that would have had the least latency, known in hindsight."""
    return min((name for name in measured if is_fixed(name)), key=lambda name: measured[name]["mean_latency"])


# Heading, key, format.
_COLUMNS = (
    ("mean", "mean_latency", ".3f"),
    ("p90", "p90_latency", ".3f"),
    ("p99", "p99_latency", ".3f"),
    ("first", "first_token", ".3f"),
    ("tokens/s", "goodput", ".1f"),
    ("lat. x", "speedup", ".2f"),
    ("good. x", "goodput_ratio", ".2f"),
    ("/step", "mean_accepted_length", ".2f"),
)
_SIMULATED = (("sim.", "simulated_latency", ".3f"), ("error", "simulation_error", "+.0%"))


def print_points(rows: list[dict[str, Any]], console: Console) -> None:
    columns = _COLUMNS + (_SIMULATED if any("simulated_latency" in row for row in rows) else ())
    for source, rate in dict.fromkeys((row["source"], row["rate"]) for row in rows):
        shown = [row for row in rows if (row["source"], row["rate"]) == (source, rate)]
        title = f"{source}, {rate:g} requests/s ({shown[0]['requests']} requests), seconds"
        lines = table(title, "policy", *(name for name, _, _ in columns))
        for row in shown:
            name = row["policy"] + (" *" if row["is_best_fixed"] else "")
            cells = [format(row[key], form) if key in row else "" for _, key, form in columns]
            lines.add_row(f"[red]{name} SLOWER[/red]" if row["is_too_slow"] else name, *cells)
        console.print(lines)
    for line in verdicts(rows):
        console.print(line, highlight=False)


def verdicts(rows: list[dict[str, Any]]) -> Iterable[str]:
    """What the tables say about the auction, and about the simulation."""
    yield (
        "*: best fixed choice in hindsight. first: token. lat. x, good. x: how many times better than no speculation. "
        "/step: tokens."
    )
    auction = [row for row in rows if row["policy"] == "auction"]
    if auction:
        worst = min(auction, key=lambda row: row["speedup"])
        num_slow = sum(row["is_too_slow"] for row in auction)
        yield (
            f"Auction: slower than no speculation (goodput below {LEAST_GOODPUT}, or latency above {MOST_LATENCY}) at "
            f"{num_slow} of {len(auction)} loads; worst latency x {worst['speedup']:.2f} ({worst['source']}, "
            f"{worst['rate']:g}/s)."
        )
        ratios = [row["mean_latency"] / _best_latency(rows, row) for row in auction]
        yield (
            f"Auction's latency by that of the best fixed choice: median {np.median(ratios):.2f}, worst "
            f"{max(ratios):.2f}."
        )
    errors = [abs(row["simulation_error"]) for row in rows if "simulation_error" in row]
    if errors:
        num = sum(error <= FIDELITY for error in errors)
        factors = [factor for row in rows for factor in row.get("simulation_factors", [])]
        yield (
            f"Simulation: mean latency within {FIDELITY:.0%} of the engine's in {num} of {len(errors)} rows; median "
            f"error {np.median(errors):.1%}, worst {max(errors):.1%}. Steps took {min(factors, default=1):.2f} to "
            f"{max(factors, default=1):.2f} times what the calibration says, and so they do in the simulation."
        )


def _best_latency(rows: list[dict[str, Any]], like: dict[str, Any]) -> float:
    same = [row for row in rows if (row["source"], row["rate"]) == (like["source"], like["rate"])]
    return next(row["mean_latency"] for row in same if row["is_best_fixed"])


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    """Speed-up of the mean latency over the request rate, a panel per source; simulated ones dashed."""
    sources = list(dict.fromkeys(row["source"] for row in rows))

    def paint(figure: Any, axes: list[Any]) -> None:
        for axis, source in zip(axes, sources):
            for name in dict.fromkeys(row["policy"] for row in rows):
                shown = [row for row in rows if (row["source"], row["policy"]) == (source, name)]
                color = axis.plot([row["rate"] for row in shown], [row["speedup"] for row in shown],
                                  marker="o", label=name)[0].get_color()  # fmt: skip
                pairs = [(row["rate"], _simulated_speedup(rows, row)) for row in shown if "simulated_latency" in row]
                axis.plot(*zip(*pairs) if pairs else ([], []), linestyle="--", color=color)
            axis.set_title(source)
            axis.set_xlabel("requests per second")
            axis.set_ylabel("latency: no speculation / this")
            from_zero(axis)
        shared_legend(figure, axes)

    draw(path, len(sources), paint)


def _simulated_speedup(rows: list[dict[str, Any]], like: dict[str, Any]) -> float:
    same = [row for row in rows if (row["source"], row["rate"]) == (like["source"], like["rate"])]
    plain = next((row for row in same if row["policy"] == NONE and "simulated_latency" in row), None)
    return plain["simulated_latency"] / like["simulated_latency"] if plain else float("nan")
