"""The two plots of benches: lines in panels, and bars; matplotlib is optional."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from hf_smartspec.commands.common.arguments import UsageError
from hf_smartspec.commands.common.outputs import check_matplotlib, draw, from_zero, saved_figure, shared_legend

Series = Mapping[str, Mapping[float, float]]  # by label: y by x


class Panel(NamedTuple):
    """
    Args:
        title, x, y (`str`): Its title, and the labels of its axes.
        series (mapping): The y values by x of each label.
        is_log (`bool`): Whether the x axis is logarithmic.
        starred (mapping): The x of a label's point that gets a star.
    """

    title: str
    x: str
    y: str
    series: Series
    is_log: bool = False
    starred: Mapping[str, float] = {}


def plot_lines(path: Path, panels: Sequence[Panel], title: str = "", is_from_zero: bool = True) -> None:
    """Draw a line per label in every panel, with one legend."""

    def paint(figure: Any, axes: list[Any]) -> None:
        for axis, panel in zip(axes, panels):
            for label, values in panel.series.items():
                (line,) = axis.plot(list(values), list(values.values()), marker="o", label=label)
                if label in panel.starred:
                    x = panel.starred[label]
                    axis.plot(x, values[x], marker="*", markersize=12, color=line.get_color())
            axis.set(title=panel.title, xlabel=panel.x, ylabel=panel.y)
            if panel.is_log:
                axis.set_xscale("symlog", linthresh=10)  # which has a place for 0
            axis.grid(alpha=0.3)
            if is_from_zero:
                from_zero(axis)
        if title:
            figure.suptitle(title)
        if any(len(panel.series) > 1 for panel in panels):
            shared_legend(figure, axes)

    draw(path, len(panels), paint)


def plot_bars(path: Path, heights: Mapping[str, float], label: str) -> None:
    """Draw a horizontal bar for every name."""
    with saved_figure(path, 1, 1, (8, 1 + 0.5 * len(heights))) as (_, ((axis,),)):
        axis.bar_label(axis.barh(list(heights), list(heights.values())), fmt="%.1f", padding=3)
        axis.invert_yaxis()
        axis.margins(x=0.1)
        axis.set_xlabel(label)


def check_folder(folder: Path) -> None:
    """Make the folder; raise `UsageError`, before any work, where matplotlib or the folder is missing."""
    check_matplotlib(option="--plots")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--plots: cannot make the folder {str(folder)!r}: {error}") from error
