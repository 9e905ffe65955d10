"""Results of `python -m benchmarks online`, as tables and figures."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hf_smartspec.commands.common.outputs import draw, shared_legend

from ...kit.tables import Lines
from .arguments import COSTS, LIVE, LOAD, MIX, ONLINE, SEVERAL, SHIFT, SPEED, TABLE
from .costs import ALPHAS, NUM_DRAFTERS
from .streams import mean
from .tokens import NUM_FREQUENT, most_improved

LATEST = 50  # requests that are averaged, as in the paper
_NAMED = 15  # tokens of table 6
_WHAT = ("precision", "recall")


def tables(parts: dict[str, Any]) -> list[Lines]:
    """Return the tables of the parts that have been measured."""
    makers = {
        TABLE: _table, ONLINE: _online, SHIFT: _shift, MIX: _mix, SEVERAL: _several, COSTS: _costs, SPEED: _speed,
        LIVE: _live, LOAD: _load,
    }  # fmt: skip
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
        f"Acceptance rate: the last {LATEST} requests online, of all tokens and of proposals (the paper's alpha), and "
        "held-out requests (figure 3)",
        [
            "task",
            "requests",
            "last, unchanged",
            "last, static",
            "last, online",
            "alpha, online",
            *(f"held out, {name}" for name in names),
        ],
        [
            [
                task,
                str(len(row["online"])),
                *(_number(mean(row[name][-LATEST:])) for name in ("unchanged", "static", "online", "alpha")),
                *(_number(row["test"][name]) for name in names),
            ]
            for task, row in rows.items()
        ],
    )
    columns = [(when, what) for what in _WHAT for when in ("original", "online")]
    tokens = Lines(
        f"The {NUM_FREQUENT} most frequent tokens, means over these (figure 7 by rank: --plots)",
        ["task", "share of all", *(f"{what}, {when}" for when, what in columns)],
        [
            [
                task,
                _number(row["tokens"]["share"]),
                *(_number(_mean_of_known(row["tokens"][when][what])) for when, what in columns),
            ]
            for task, row in rows.items()
        ],
    )
    named = Lines(
        f"Of these, the {_NAMED} that have gained most (table 6)",
        ["task, gain in", "tokens"],
        [
            [f"{task}, {what}", " ".join(map(repr, most_improved(row["tokens"], what, _NAMED)))]
            for task, row in rows.items()
            for what in _WHAT
        ],
    )
    return [rates, tokens, named]


def _mean_of_known(values: Sequence[float | None]) -> float:
    return mean([value for value in values if value is not None])


def _shift(part: dict[str, Any]) -> list[Lines]:
    found: list[Lines] = []
    for name, row in part["rows"].items():
        order, shares = list(dict.fromkeys(row["tasks"])), list(next(iter(part["static"].values())))
        ends = _ends(row)
        found.append(
            Lines(
                f"A {name} shift: acceptance of the last {LATEST} requests of each task (figures 4 and 11), also by "
                "drafters distilled on a share of as many, and of held-out requests after each phase",
                ["task", "last", *(f"static, {share}" for share in shares), *(f"after {phase}" for phase in order)],
                [
                    [
                        task,
                        _number(ends[task]),
                        *(_number(mean(part["static"][task][share][-LATEST:])) for share in shares),
                        *map(_number, row["test after each phase"][task]),
                    ]
                    for task in order
                ],
            )
        )
    return found


def _ends(row: dict[str, Any]) -> dict[str, float]:
    return {task: mean(values[-LATEST:]) for task, values in _by_task(row).items()}


def _mix(part: dict[str, Any]) -> list[Lines]:
    rows = []
    for name, row in part["rows"].items():
        for half, first in (("first", 0), ("second", row["half"])):
            own = list(zip(row["tasks"], row["online"]))[first:][: row["half"] or None]
            rates = [mean([rate for other, rate in own if other == task][-LATEST:]) for task in name.split(", ")]
            rows.append([name, half, *map(_number, rates)])
    columns = ["mixed tasks", "half", "requests of the first", "requests of the second"]
    title = f"Mixed requests, of which each half teaches by one task alone: the last {LATEST} (A.6)"
    return [Lines(title, columns, rows)]


def _costs(part: dict[str, Any]) -> list[Lines]:
    rows = part["rows"]
    giga = [
        [
            name,
            *(f"{value / 1e9:.2f}" for value in (*row["bytes"], *row["bytes read"].values())),
            *(f"{100 * row[key]:.1f} %" for key in ("share of one drafter", "share of several")),
            *(f"{row[key]:.1f}" for key in ("flops ratio", "inference over update")),
        ]
        for name, row in rows.items()
    ]
    columns = ["target, GB", "drafter, GB", *(f"read, {way}, GB" for way in ("original", "speculative", "online"))]
    columns += ["one drafter", f"{NUM_DRAFTERS} drafters", "FLOPs, target : drafter", "FLOPs, answers : update"]
    alphas = [f"{alpha:.1f}" for alpha in ALPHAS]
    speeds = [[name, "0", *map("{:.2f}".format, row["speed-up"])] for name, row in rows.items()]
    speeds += [
        [name, length, *map("{:.2f}".format, values)]
        for name, row in rows.items()
        for length, values in row["speed-up by length"].items()
    ]
    return [
        Lines(
            "Memory, bytes read and FLOPs by config (section 5.3, A.4, tables 5 and 9)",
            ["pair", *columns],
            giga,
        ),
        Lines(
            "Speed-up by Eq. 1 where reading weights, keys and values takes the time (tables 7 and 8)",
            ["pair", "new tokens", *(f"alpha {alpha}" for alpha in alphas)],
            speeds,
        ),
    ]


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
        _draw(folder / "static.png", parts[SHIFT]["static"], "requests")
    if MIX in parts and parts[MIX]["rows"]:
        mixed = {name: _by_task(row) for name, row in parts[MIX]["rows"].items()}
        _draw(folder / "mix.png", mixed, "requests of a task")
    if ONLINE in parts:
        _draw_tokens(folder / "tokens.png", parts[ONLINE]["rows"])
    if SEVERAL in parts:
        _draw(folder / "several.png", _chosen(parts[SEVERAL], ("one drafter", "its own")), "requests of this kind")


def _chosen(part: dict[str, Any], names: Sequence[str]) -> dict[str, dict[str, Sequence[float]]]:
    """Return some of the lines of each task."""
    return {task: {name: row[name] for name in names} for task, row in part["rows"].items()}


def _by_task(row: dict[str, Any]) -> dict[str, list[float]]:
    """Return the acceptance rates of each task's requests."""
    found: dict[str, list[float]] = {}
    for task, rate in zip(row["tasks"], row["online"]):
        found.setdefault(task, []).append(rate)
    return found


def _draw_tokens(path: Path, rows: dict[str, Any]) -> None:
    """Draw figure 7: precision and recall of frequent tokens by rank."""
    panels = [(task, what) for task in rows for what in _WHAT]

    def paint(figure: Any, axes: list[Any]) -> None:
        for axis, (task, what) in zip(axes, panels):
            for when in ("original", "online"):
                values = [np.nan if value is None else value for value in rows[task]["tokens"][when][what]]
                axis.plot(range(1, len(values) + 1), values, label=when)
            axis.set(title=f"{task}, {what}", xlabel="rank of the token", ylim=(0, 1))
        shared_legend(figure, axes)

    draw(path, len(panels), paint)


def _draw(path: Path, panels: Mapping[str, Mapping[str, Sequence[float]]], label: str) -> None:
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
