"""Figures; matplotlib is optional."""

import importlib
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from .arguments import UsageError

_SIZE = (5.0, 3.4)  # inches of one panel


def check_matplotlib(path: Path | None = None) -> None:
    """Raise `UsageError`, before any work, where matplotlib is missing or cannot write files of this kind."""
    try:
        importlib.import_module("matplotlib")
        backends = importlib.import_module("matplotlib.backend_bases")
    except ImportError as error:
        raise UsageError("--plot needs matplotlib: pip install matplotlib") from error
    kinds = backends.FigureCanvasBase.get_supported_filetypes()
    if path is not None and path.suffix and path.suffix[1:].lower() not in kinds:
        raise UsageError(f"cannot draw into {str(path)!r}: its suffix must be one of {', '.join(sorted(kinds))}")


def check_folder(folder: Path) -> None:
    """Figures that cannot be drawn are refused before any work; the folder is made."""
    try:
        importlib.import_module("matplotlib")
        folder.mkdir(parents=True, exist_ok=True)
    except ImportError as error:
        raise UsageError("--plots needs matplotlib: pip install matplotlib") from error
    except OSError as error:
        raise UsageError(f"--plots: cannot make the folder {str(folder)!r}: {error}") from error


@contextmanager
def saved_figure(path: Path, rows: int, columns: int, size: tuple[float, float]) -> Iterator[tuple[Any, np.ndarray]]:
    """
    Yield a figure and its axes `[rows, columns]`, `size` inches wide and high; the figure is written after the block.

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


def draw(path: Path, num_panels: int, paint: Callable[[Any, list[Any]], None], num_columns: int = 3) -> None:
    """Write a figure of `num_panels` panels, which `paint(figure, axes)` draws."""
    columns = min(num_columns, num_panels)
    rows = math.ceil(num_panels / columns)
    with saved_figure(path, rows, columns, (_SIZE[0] * columns, _SIZE[1] * rows)) as (figure, grid):
        axes = list(grid.flat)
        for unused in axes[num_panels:]:
            unused.set_axis_off()
        paint(figure, axes[:num_panels])


def shared_legend(figure: Any, axes: Sequence[Any], title: str | None = None) -> None:
    """Draw one legend of all labels below the panels."""
    lines = dict(zip(*reversed(axes[0].get_legend_handles_labels())))
    for axis in axes[1:]:
        handles, labels = axis.get_legend_handles_labels()
        lines |= {label: handle for handle, label in zip(handles, labels) if label not in lines}
    letters = max(map(len, lines)) + 6  # the line's picture included
    columns = max(1, min(len(lines), int(11 * figure.get_size_inches()[0] / letters)))
    figure.legend(lines.values(), lines.keys(), loc="outside lower center", ncols=columns, title=title)


def from_zero(axis: Any) -> None:
    """Let the vertical axis begin at 0 and end above the largest marker."""
    axis.set_ylim(0, 1.1 * axis.dataLim.y1)
