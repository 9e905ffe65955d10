"""Figures of `python -m benchmarks sources`; matplotlib is optional."""

import math
from pathlib import Path
from textwrap import fill
from typing import Any

import numpy as np

from hf_smartspec.commands.common.outputs import draw, shared_legend

from ...kit.plots import Panel, plot_lines
from .claims import Figures, Settings


def plot_bars(figures: Figures, path: Path, series: str, keys: dict[str, str], legend: str | None = None) -> None:
    """
    Draw a group of bars per data set, one bar per setting, and a panel for each of `keys`, which name numbers and their
    labels.
    """
    settings = list(next(iter(figures.values()))[series])
    width = 0.8 / len(settings)

    def paint(figure: Any, axes: list[Any]) -> None:
        for axis, (key, label) in zip(axes, keys.items()):
            for index, setting in enumerate(settings):
                heights = [groups[series][setting][key] or 0.0 for groups in figures.values()]
                places = np.arange(len(figures)) + (index - (len(settings) - 1) / 2) * width
                axis.bar(places, heights, width, label=setting)
            axis.set_xticks(range(len(figures)), [_wrapped(name) for name in figures])
            axis.set_ylabel(label)
            axis.grid(axis="y", alpha=0.3)
        figure.set_size_inches(max(6.0, 1.8 * len(figures)), 3.6 * len(axes))
        shared_legend(figure, axes[:1], legend)

    draw(path, len(keys), paint, num_columns=1)


def plot_trees(figures: Figures, path: Path) -> None:
    plot_bars(figures, path, "trees", {"tokens_per_step": "tokens per step"})


def plot_datastore(figures: Figures, path: Path) -> None:
    plot_bars(figures, path, "sources", {"tokens_per_step": "tokens per step"})


def plot_temperatures(figures: Figures, path: Path) -> None:
    plot_bars(figures, path, "SSSD", {"accepted_per_step": "accepted tokens per step"}, legend="temperature")


def plot_confidences(figures: Figures, path: Path) -> None:
    """Draw shares of tokens over confidence, a panel per data set."""
    panels = [
        Panel(name, "confidence", "share of tokens", {
            series: {float(first) + 0.05: numbers["share"] for first, numbers in bins.items()}
            for series, bins in groups.items()
        })
        for name, groups in figures.items()
    ]  # fmt: skip
    plot_lines(path, panels)


def plot_hybrids(figures: Figures, path: Path) -> None:
    keys = {"tokens_per_step": "tokens per step", "speed_up": "speed-up, verification\nas one forward"}
    plot_bars(figures, path, "tau", keys, legend=r"threshold $\tau$")


def plot_lengths(figures: Figures, path: Path) -> None:
    """Draw accepted against drafted tokens: a curve per way to choose the length, a panel per data set."""
    labels = {
        "alpha": r"$\alpha$ · match length",
        "published": r"$\alpha$ · match length, as published",
        "fixed": "fixed number of nodes",
        "learned": "learnt path probability",
    }
    drafted, accepted = "drafted tokens per step", "accepted tokens per step"
    panels = [
        Panel(name, drafted, accepted, {label: _points(groups[series]) for series, label in labels.items()})
        for name, groups in figures.items()
    ]
    plot_lines(path, panels, is_from_zero=False)


def _points(settings: Settings) -> dict[float, float]:
    pairs = ((item["drafted_per_step"] or 0.0, item["accepted_per_step"] or 0.0) for item in settings.values())
    return dict(sorted(pairs))


def plot_sizes(figures: Figures, path: Path) -> None:
    keys = {
        "tokens_per_step": "tokens per step",
        "acceptance_rate": "acceptance rate",
        "us_per_node": "µs per drafted token",
    }
    panels = [
        Panel("", "earlier outputs in the global tree", label, {
            name: {int(size): _number(numbers[key]) for size, numbers in groups["size"].items()}
            for name, groups in figures.items()
        }, is_log=True)
        for key, label in keys.items()
    ]  # fmt: skip
    plot_lines(path, panels)


def _number(value: float | None) -> float:
    return math.nan if value is None else value


def plot_shifts(figures: Figures, path: Path) -> None:
    """Draw tokens per step over the requests, a panel per shift."""
    labels = {"kept": "memory kept", "frozen": "memory kept, nothing added", "fresh": "fresh start at the shift"}

    def paint(figure: Any, axes: list[Any]) -> None:
        for axis, (name, groups) in zip(axes, figures.items()):
            means = {setting: numbers["moving_mean"] for setting, numbers in groups["means"].items()}
            for index, (setting, label) in enumerate(labels.items()):
                axis.plot(means[setting], label=label, color=f"C{index}", linewidth=1.2, zorder=3 - 0.1 * index)
            before = means["before"]
            settled = before[len(before) // 4 :]  # the mean of the first few requests is a matter of chance
            axis.plot(range(-len(settled), 0), settled, color="C0", linewidth=1.2)
            axis.axvline(0, color="gray", linestyle="--", linewidth=1)
            axis.set_title(name.replace(" > ", " →\n"), fontsize="medium")
            axis.set_xlabel("request, counted from the shift")
            axis.set_ylabel("tokens per step,\nmoving mean")
            axis.grid(alpha=0.3)
        shared_legend(figure, axes)

    draw(path, len(figures), paint)


def _wrapped(name: str) -> str:
    return fill(name.replace("_", " "), 13, break_long_words=False)
