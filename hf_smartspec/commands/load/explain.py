"""Explanations of a load's speed: the engine's reports on each policy, side by side."""

from dataclasses import asdict
from typing import Any, NamedTuple

from rich.console import Console
from rich.markup import escape

from ...goodput.report import SpeculationReport
from ..common.console import table

_DEPTHS = 4


class Explanation(NamedTuple):
    """Report on one load."""

    report: SpeculationReport  # sums over all steps
    wait: float  # mean seconds that a request waited in the queue

    def as_dict(self) -> dict[str, Any]:
        return {"wait": self.wait, "best_fixed": self.report.best_fixed} | asdict(self.report)


def print_explanations(title: str, explanations: dict[str, Explanation], console: Console) -> None:
    """Print a table with one line per policy."""
    columns = ("draft", "other", "prefill", "verify", "wait", "nodes", "in vain", "pays", "best", "accepted")
    lines = table(escape(title), "policy", *columns)
    for name, (report, wait) in explanations.items():
        parts = [f"{report.seconds[part]:.2f}" for part in ("draft", "other", "prefill", "verify")]
        num_rows = max(sum(report.nodes_per_row.values()), 1)
        mean = sum(size * count for size, count in report.nodes_per_row.items()) / num_rows
        in_vain = f"{report.in_vain / report.drafted:.0%}" if report.drafted else "-"
        pays = "-" if report.break_even is None else f"{report.break_even:.2f}"
        best = report.best_fixed
        gain = "-" if best is None else f"{best}: {report.hindsight[best] / max(report.goodput, 1e-9):.2f}"
        lines.add_row(name, *parts, f"{wait:.2f}", f"{mean:.1f}", in_vain, pays, gain, _acceptance(report) or "-")
    console.print(lines)


LEGEND = (
    "draft (with selecting), other (verification, commit), prefill, verify (the rest of forwards): seconds of all "
    "steps. wait: in the queue, mean seconds. nodes: verified per row and step; in vain: of them. pays: probability "
    "from which a node has paid. best: fixed number of nodes in hindsight, and its goodput by the one reached, by the "
    "cost model. accepted: % of levels, from the first on."
)


def _acceptance(report: SpeculationReport) -> str:
    """Return percents by depth, a line per source, with its name where there are several."""
    lines = []
    for source, levels in report.acceptance.items():
        name = source.removesuffix("Candidates") + " " if len(report.acceptance) > 1 else ""
        lines.append(name + " ".join(f"{rate:.0%}".rstrip("%") for num, rate in levels[:_DEPTHS] if num))
    return "\n".join(lines)
