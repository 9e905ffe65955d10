"""Results of `python -m benchmarks online`, as tables and figures."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hf_smartspec.commands.common.outputs import draw, shared_legend

from ...kit.tables import Lines
from .arguments import LIVE, LOAD, ONLINE, SEVERAL, SHIFT, SPEED, TABLE
from .streams import mean

LATEST = 50  # requests that are averaged, as in the paper


def tables(parts: dict[str, Any]) -> list[Lines]:
    """Return the tables of the parts that have been measured."""
    makers = {TABLE: _table, ONLINE: _online, SHIFT: _shift, SEVERAL: _several, SPEED: _speed, LIVE: _live, LOAD: _load}
    return [lines for part, make in makers.items() if part in parts for lines in make(parts[part])]


def _number(value: float | None) -> str:
    return "-" if value is None or not np.isfinite(value) else f"{value:.3f}"


def _table(part: dict[str, Any]) -> list[Lines]:
    rows = part["rows"]
    columns = list(next(iter(rows.values())))
    return [
        Lines(
            "Acceptance rate after two epochs offline (the paper's table 1)",
            ["task", *columns],
            [[task, *(_number(row[name]) for name in columns)] for task, row in rows.items()],
        )
    ]


def _online(part: dict[str, Any]) -> list[Lines]:
    rows = part["rows"]
    names = ("original", "static", "online", "offline")
    rates = Lines(
        f"Acceptance rate: the last {LATEST} requests online, and held-out requests (figure 3)",
        [
            "task",
            "requests",
            "last, unchanged",
            "last, static",
            "last, online",
            *(f"held out, {name}" for name in names),
        ],
        [
            [
                task,
                str(len(row["online"])),
                *(_number(mean(row[name][-LATEST:])) for name in ("unchanged", "static", "online")),
                *(_number(row["test"][name]) for name in names),
            ]
            for task, row in rows.items()
        ],
    )
    columns = [(when, what) for what in ("precision", "recall") for when in ("original", "online")]
    tokens = Lines(
        "The 100 most frequent tokens, means over these (figure 7, table 6)",
        ["task", *(f"{what}, {when}" for when, what in columns)],
        [[task, *(_number(row["tokens"][when][what]) for when, what in columns)] for task, row in rows.items()],
    )
    return [rates, tokens]


def _shift(part: dict[str, Any]) -> list[Lines]:
    found: list[Lines] = []
    for name, row in part["rows"].items():
        order = list(dict.fromkeys(row["tasks"]))
        ends = _ends(row)
        found.append(
            Lines(
                f"A {name} shift: acceptance of the last {LATEST} requests of each task (figures 4 and 11), and of "
                "held-out requests after each phase (figure 9)",
                ["task", "last", *(f"after {phase}" for phase in order), "distilled offline on it"],
                [
                    [
                        task,
                        _number(ends[task]),
                        *map(_number, row["test after each phase"][task]),
                        _number(part["offline"][task]),
                    ]
                    for task in order
                ],
            )
        )
    return found


def _ends(row: dict[str, Any]) -> dict[str, float]:
    rates: dict[str, list[float]] = {}
    for task, rate in zip(row["tasks"], row["online"]):
        rates.setdefault(task, []).append(rate)
    return {task: mean(values[-LATEST:]) for task, values in rates.items()}


def _several(part: dict[str, Any]) -> list[Lines]:
    names = ("one drafter", "its own")
    rows = [
        [task, *(_number(mean(row[name][-LATEST:])) for name in names), *(_number(row["test"][name]) for name in names)]
        for task, row in part["rows"].items()
    ]
    means = [mean([float(row[place]) for row in rows]) for place in range(1, 5)]
    rows.append(["mean", *map(_number, means)])
    columns = ["requests of", *(f"last, {name}" for name in names), *(f"held out, {name}" for name in names)]
    title = f"One drafter for all, or one for each kind: the last {LATEST} requests (figures 5 and 6)"
    return [Lines(title, columns, rows)]


def _speed(part: dict[str, Any]) -> list[Lines]:
    columns = ["acceptance", "tokens per step", "speed-up", "predicted", "different"]
    rows = [
        [task, name, *(_number(row[column]) if column != "different" else str(row[column]) for column in columns)]
        for task, methods in part["rows"].items()
        for name, row in methods.items()
    ]
    return [
        Lines(
            f"One request at a time, chains of {part['nodes']} (tables 3 and 4); predicted by Eq. 1",
            ["task", "drafter", *columns],
            rows,
        )
    ]


def _live(part: dict[str, Any]) -> list[Lines]:
    rows = [
        [str(number), f"{window['speed-up']:.2f}", f"{window['without learning']:.2f}"]
        for number, window in enumerate(part["windows"], 1)
    ]
    total = sum(row["plain"] for row in part["requests"]) / sum(row["online"] for row in part["requests"])
    rows.append([f"all {len(part['requests'])} requests", f"{total:.2f}", ""])
    columns = ["part of the run", "x plain, learning included", "x plain, without"]
    return [Lines(f"From random weights, live: {part['report']}", columns, rows)]


def _load(part: dict[str, Any]) -> list[Lines]:
    rows = []
    for name, row in part["rows"].items():
        latencies = {mode: np.array(row[mode]) for mode in ("off", "on")}
        at = [(np.percentile(latencies["off"], place), np.percentile(latencies["on"], place)) for place in (50, 99)]
        figures = [text for off, on in at for text in (f"{off:.3f} s", f"{on:.3f} s", f"{on / off:.3f}")]
        each = np.median(latencies["on"] / latencies["off"])
        rows.append([name, str(len(row["on"])), str(sum(row["updates"])), *figures, f"{each:.3f}"])
    columns = ["load", "requests", "updates", *(f"{p}, {w}" for p in ("p50", "p99") for w in ("off", "on", "ratio"))]
    columns.append("ratio of each request, median")
    return [Lines("Latency beside learning in the background, which changes no drafts here", columns, rows)]


def plot(parts: dict[str, Any], folder: Path) -> None:
    """Draw the figures of the parts that have been measured."""
    if ONLINE in parts:
        _draw(folder / "online.png", _chosen(parts[ONLINE], ("unchanged", "static", "online")), "requests")
    if SHIFT in parts:
        rows = {f"{name} shift": {"online": row["online"]} for name, row in parts[SHIFT]["rows"].items()}
        _draw(folder / "shift.png", rows, "requests")
    if SEVERAL in parts:
        _draw(folder / "several.png", _chosen(parts[SEVERAL], ("one drafter", "its own")), "requests of this kind")


def _chosen(part: dict[str, Any], names: Sequence[str]) -> dict[str, dict[str, Sequence[float]]]:
    """Return some of the lines of each task."""
    return {task: {name: row[name] for name in names} for task, row in part["rows"].items()}


def _draw(path: Path, panels: dict[str, dict[str, Sequence[float]]], label: str) -> None:
    def paint(figure: Any, axes: list[Any]) -> None:
        for axis, (title, lines) in zip(axes, panels.items()):
            for name, values in lines.items():
                axis.plot(running(values), label=name)
            axis.set(title=title, xlabel=label, ylabel=f"acceptance, last {LATEST}", ylim=(0, 1))
        shared_legend(figure, axes)

    draw(path, len(panels), paint)


def running(values: Sequence[float]) -> np.ndarray:
    """Return the means over the latest requests up to each."""
    sums = np.concatenate([[0.0], np.cumsum(values)])
    ends = np.arange(1, len(values) + 1)
    starts = np.maximum(ends - LATEST, 0)
    return np.asarray((sums[ends] - sums[starts]) / (ends - starts))
