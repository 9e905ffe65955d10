"""Figures of `smartspec replay`; matplotlib is optional."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..common.figures import saved_figure
from .curves import moving_average
from .loop import Tally
from .sources import SourceSpec


def plot(results: Mapping[str, Mapping[SourceSpec, Tally]], path: Path) -> None:
    """Draw a row per data set: tokens per step against drafted per step, and tokens per step over the requests."""
    with saved_figure(path, len(results), 2, (12, 4 * len(results))) as (_, axes):
        for (left, right), (name, tallies) in zip(axes, results.items()):
            _plot_settings(left, tallies)
            _plot_adaptation(right, tallies)
            left.set_title(name)
            right.set_title(f"{name}: over the requests")


def _plot_settings(axes: Any, tallies: Mapping[SourceSpec, Tally]) -> None:
    """Draw a point per setting; the settings of one source are joined."""
    for name in dict.fromkeys(spec.name for spec in tallies):
        summaries = [tally.summary() for spec, tally in tallies.items() if spec.name == name]
        points = sorted((item["drafted_per_step"] or 0, item["tokens_per_step"] or 0) for item in summaries)
        axes.plot(*zip(*points), marker="o", label=name)
    axes.set_xlabel("drafted tokens per step")
    axes.set_ylabel("tokens per step")
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")


def _plot_adaptation(axes: Any, tallies: Mapping[SourceSpec, Tally]) -> None:
    for spec, tally in tallies.items():
        axes.plot(moving_average(tally.requests), label=spec.text)
    axes.set_xlabel("request")
    axes.set_ylabel("tokens per step, moving average")
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
