"""Figures of `smartspec replay`; matplotlib is optional."""

import importlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from ..common.models import UsageError
from .loop import Tally
from .sources import SourceSpec


def check_matplotlib(path: Path | None = None) -> None:
    """A figure that cannot be drawn, or not into a file of this kind, is refused before any work."""
    try:
        importlib.import_module("matplotlib")
        backends = importlib.import_module("matplotlib.backend_bases")
    except ImportError as error:
        raise UsageError("--plot needs matplotlib: pip install matplotlib") from error
    kinds = backends.FigureCanvasBase.get_supported_filetypes()
    if path is not None and path.suffix and path.suffix[1:].lower() not in kinds:
        raise UsageError(f"cannot draw into {str(path)!r}: its suffix must be one of {', '.join(sorted(kinds))}")


@contextmanager
def saved_figure(path: Path, rows: int, columns: int, size: tuple[float, float]) -> Iterator[tuple[Any, np.ndarray]]:
    """
    Figure and axes `[rows, columns]`, `size` inches wide and high, to paint on; written behind the block.

    Raises:
        UsageError: if the file cannot be written.
    """
    matplotlib = importlib.import_module("matplotlib")
    matplotlib.use("Agg")
    pyplot = importlib.import_module("matplotlib.pyplot")
    figure, axes = pyplot.subplots(rows, columns, figsize=size, squeeze=False, layout="constrained")
    try:
        yield figure, axes
        _save(figure, path)
    finally:
        pyplot.close(figure)


def _save(figure: Any, path: Path) -> None:
    try:
        figure.savefig(path, dpi=120)
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot write {str(path)!r}: {error}") from error


def plot(results: Mapping[str, Mapping[SourceSpec, Tally]], path: Path) -> None:
    """One row per data set: tokens per step against drafted per step, and tokens per step over the requests."""
    with saved_figure(path, len(results), 2, (12, 4 * len(results))) as (_, axes):
        for (left, right), (name, tallies) in zip(axes, results.items()):
            _plot_settings(left, tallies)
            _plot_adaptation(right, tallies)
            left.set_title(name)
            right.set_title(f"{name}: over the requests")


def _plot_settings(axes: Any, tallies: Mapping[SourceSpec, Tally]) -> None:
    """A point per setting; the settings of one source are joined."""
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


def moving_average(requests: np.ndarray, window: int | None = None) -> np.ndarray:
    """
    Tokens per step over the last `window` requests, a twentieth of them by default.

    Args:
        requests (`np.ndarray` of shape `[n, 4]`): As in `Tally`: tokens and steps come first. Those without steps are
            left out.

    Returns:
        `np.ndarray` of shape `[m]`, float64; m is the number of requests with steps.
    """
    done = requests[requests[:, 1] > 0, :2]
    window = max(1, len(done) // 20) if window is None else window
    totals = np.concatenate([np.zeros((1, 2)), np.cumsum(done, axis=0)])
    ends = np.arange(1, len(totals))
    sums = totals[ends] - totals[np.maximum(ends - window, 0)]
    return sums[:, 0] / sums[:, 1]
