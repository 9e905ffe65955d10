"""Files that commands read and write."""

import argparse
import gzip
import importlib
import json
import math
import os
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from .arguments import UsageError, usage_errors
from .workloads import is_workload, workload_rows


@contextmanager
def opened(path: Path) -> Iterator[TextIO]:
    """Open a text file, which may be compressed as .gz; raises `UsageError` where reading fails within the context."""
    kinds = OSError, EOFError, UnicodeDecodeError, zlib.error
    opener: Any = gzip.open if path.suffix == ".gz" else open
    with usage_errors(f"cannot read {str(path)!r}", *kinds), opener(path, "rt", encoding="utf-8") as file:
        yield file


def read_rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """
    Yield number and content of the rows of a .jsonl or .jsonl.gz file, or of a data set named as in `workloads`; raises
    `UsageError` if it cannot be read, or a row is no JSON object.
    """
    if is_workload(path):
        yield from workload_rows(path)
        return
    with opened(path) as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            with usage_errors(f"{str(path)!r}, row {number} is no JSON", json.JSONDecodeError):
                row = json.loads(line)
            if not isinstance(row, dict):
                raise UsageError(f"{str(path)!r}, row {number} is no JSON object")
            yield number, row


def check_output(path: Path | None) -> None:
    """Raise `UsageError` for a file that cannot be written, before any work."""
    if path is not None and (path.is_dir() or not path.absolute().parent.is_dir()):
        raise UsageError(f"cannot write {str(path)!r}: {'it is a folder' if path.is_dir() else 'no such folder'}")


def check_outputs(args: argparse.Namespace) -> None:
    """Check --json and --plot before any work."""
    check_output(args.json)
    check_output(args.plot)
    if args.plot:
        check_matplotlib(args.plot)


def json_safe(value: Any) -> Any:
    """Return the value with NaN as None and infinity as text, which JSON does not have."""
    if isinstance(value, dict):
        return {key: json_safe(item) for key, item in value.items()}
    if isinstance(value, list):
        return [json_safe(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None if math.isnan(value) else str(value)
    return value


def write_json(path: Path, report: Any) -> None:
    """Write a report as JSON, NaN as null; raises `UsageError` if the file cannot be written."""
    with usage_errors(f"cannot write {str(path)!r}", OSError):
        path.write_text(json.dumps(json_safe(report), indent=2) + "\n")


def replace_json(path: Path, report: Any) -> None:
    """Write a report as JSON in one step: a run that is killed leaves the earlier file as it was."""
    part = path.with_name(path.name + ".part")
    write_json(part, report)
    os.replace(part, path)


_SIZE = (5.0, 3.4)  # inches of one panel


def check_matplotlib(path: Path | None = None, option: str = "--plot") -> None:
    """Raise `UsageError`, before any work, where matplotlib is missing or cannot write files of this kind."""
    try:
        importlib.import_module("matplotlib")
        backends = importlib.import_module("matplotlib.backend_bases")
    except ImportError as error:
        raise UsageError(f"{option} needs matplotlib: pip install matplotlib") from error
    kinds = backends.FigureCanvasBase.get_supported_filetypes()
    if path is not None and path.suffix and path.suffix[1:].lower() not in kinds:
        raise UsageError(f"cannot draw into {str(path)!r}: its suffix must be one of {', '.join(sorted(kinds))}")


@contextmanager
def saved_figure(path: Path, rows: int, columns: int, size: tuple[float, float]) -> Iterator[tuple[Any, np.ndarray]]:
    """
    Yield a figure and its axes `[rows, columns]`, `size` inches wide and high; the figure is written after the block.
    Raises `UsageError` if the file cannot be written.
    """
    matplotlib = importlib.import_module("matplotlib")
    matplotlib.use("Agg")
    pyplot = importlib.import_module("matplotlib.pyplot")
    figure, axes = pyplot.subplots(rows, columns, figsize=size, squeeze=False, layout="constrained")
    try:
        yield figure, axes
        with usage_errors(f"cannot write {str(path)!r}", OSError, ValueError):
            figure.savefig(path, dpi=120)
    finally:
        pyplot.close(figure)


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
