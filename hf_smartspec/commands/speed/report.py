"""Results of `smartspec bench generate`: tables, JSON and a figure."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.markup import escape

from ...decoding.statistics import GenerationStatistics
from ..common.console import fold, table
from ..common.outputs import saved_figure, shared_legend
from .loop import PLAIN, Results, Tally

SLOWER = 0.97  # below this times plain decoding's speed, a method counts as slower
_PARTS = ("forward", "draft", "select", "verify", "observe")


def summaries(results: Results) -> list[dict[str, Any]]:
    """Return all results, a row per data set, batch size and method."""
    rows = []
    for (name, batch_size), tallies in _timed(results).items():
        for method, tally in tallies.items():
            rows.append(
                {
                    "data_set": name,
                    "batch_size": batch_size,
                    "method": method,
                    "seconds_per_request": tally.seconds_per_request,
                    "tokens_per_second": tally.tokens_per_second,
                    "speedup": tally.speedup(tallies[PLAIN]),
                    "decode_speedup": tally.decode_speedup(tallies[PLAIN]),
                    "statistics": tally.statistics.as_dict(),
                    "num_tied_rows": sum(item.is_tie for item in tally.differences.values()),
                    "num_different_rows": num_different(tally),
                    "calls": [call._asdict() for call in tally.calls],
                }
            )
    return rows


def worst(results: Results) -> dict[str, float]:
    """Return every method's lowest speed-up over data sets and batch sizes."""
    ratios: dict[str, list[float]] = {}
    for tallies in _timed(results).values():
        for method, tally in tallies.items():
            ratios.setdefault(method, []).append(tally.speedup(tallies[PLAIN]))
    return {method: min(values) for method, values in ratios.items()}


def has_differences(results: Results, methods: Sequence[str]) -> bool:
    """Return whether one of the methods returned other tokens than plain decoding, and no tie explains it."""
    return any(num_different(tallies[name]) for tallies in results.values() for name in methods if name in tallies)


def print_results(results: Results, console: Console, replays: bool) -> None:
    results = _timed(results)
    for (name, batch_size), tallies in results.items():
        _print_tallies(f"{_short(name)}{', replayed' * replays}, batch {batch_size}", tallies, console)
    _print_parts(results, console)
    _print_overview(results, console, replays)
    console.print(
        f"[dim]Medians over the calls. x plain: tokens per second by those of plain generate, prefill included; "
        f"decode: without it (up to the end of the target's forward over the prompts). * below {SLOWER} x plain. "
        "Per step, drafted: tokens per row and step.[/dim]"
    )


def _print_tallies(title: str, tallies: dict[str, Tally], console: Console) -> None:
    columns = ("s/request", "tokens/s", "x plain", "decode", "per step", "drafted", "accepted", "identical")
    lines = table(escape(title), "method", *columns)
    for name, tally in tallies.items():
        counts, plain = tally.statistics, tallies[PLAIN]
        speeds = (f"{tally.seconds_per_request:.2f}", f"{tally.tokens_per_second:.1f}")
        ratios = (_ratio(tally.speedup(plain)), _ratio(tally.decode_speedup(plain)))
        drafts = (f"{counts.mean_accepted_length:.2f}", f"{counts.drafted_tokens / max(counts.steps, 1):.2f}")
        accepted = f"{counts.acceptance_rate:.0%}" if counts.drafted_tokens else "-"
        lines.add_row(escape(name), *speeds, *ratios, *drafts, accepted, _identical(tally))
    fold(lines)
    console.print(lines)


def _print_parts(results: Results, console: Console) -> None:
    """Print the parts of this library's decoding time, by method and batch size, over all data sets."""
    sums: dict[tuple[str, int], GenerationStatistics] = {}
    for (_, batch_size), tallies in results.items():
        for method, tally in tallies.items():
            if tally.statistics.seconds_total:
                key = (method, batch_size)
                sums[key] = sums.get(key, GenerationStatistics()) + tally.statistics
    if not sums:
        return
    lines = table("Where the time goes", "method", "batch", "ms per forward", *_PARTS, "rest")
    for (method, batch_size), counts in sums.items():
        shares = [getattr(counts, f"seconds_{part}") / counts.seconds_total for part in _PARTS]
        step = counts.seconds_forward / max(counts.forwards, 1)
        cells = [f"{share:.1%}" for share in (*shares, 1 - sum(shares))]
        lines.add_row(escape(method), str(batch_size), f"{step * 1e3:.1f}", *cells)
    fold(lines)
    console.print(lines)


def _print_overview(results: Results, console: Console, replays: bool) -> None:
    """Print the speed-ups of every method, and the lowest."""
    lowest = {method: ratio for method, ratio in worst(results).items() if method != PLAIN}
    lines = table(f"x plain{', replayed' * replays}", "data set", "batch", *map(escape, lowest))
    for (name, batch_size), tallies in results.items():
        ratios = [_ratio(tallies[item].speedup(tallies[PLAIN])) if item in tallies else "-" for item in lowest]
        lines.add_row(escape(_short(name)), str(batch_size), *ratios)
    lines.add_section()
    lines.add_row("worst", "", *map(_ratio, lowest.values()))
    fold(lines, 0, *range(2, 2 + len(lowest)))
    console.print(lines)


def _short(path: str) -> str:
    return Path(path).name.partition(".")[0]


def _timed(results: Results) -> Results:
    """Return the results without those that had no timed call yet when the measurement was interrupted."""
    timed = {key: {name: tally for name, tally in tallies.items() if tally.calls} for key, tallies in results.items()}
    return {key: tallies for key, tallies in timed.items() if tallies}


def num_different(tally: Tally) -> int:
    """Return the number of rows that differ from plain decoding, where no tie explains it."""
    return sum(not item.is_tie for item in tally.differences.values())


def _identical(tally: Tally) -> str:
    if not tally.differences:
        return "[green]yes[/green]"
    num = num_different(tally)
    return f"[red]NO: {num}[/red]" if num else f"[yellow]{len(tally.differences)} tied[/yellow]"


def _ratio(value: float) -> str:
    if np.isnan(value):
        return "-"
    return f"[red]{value:.2f}*[/red]" if value < SLOWER else f"{value:.2f}"


def plot(results: Results, path: Path, replays: bool) -> None:
    """Draw every method's speed-up by data set as bars, a panel per batch size."""
    results = _timed(results)
    sizes = list(dict.fromkeys(size for _, size in results))
    methods = [name for name in worst(results) if name != PLAIN]
    with saved_figure(path, len(sizes), 1, (10, 4 * len(sizes))) as (figure, axes):
        for panel, size in zip(axes[:, 0], sizes):
            _plot_size(panel, {name: tallies for (name, at), tallies in results.items() if at == size}, methods)
            panel.set_title(f"batch {size}{', replayed' * replays}")
        shared_legend(figure, list(axes[:, 0]))


def _plot_size(panel: Any, results: dict[str, dict[str, Tally]], methods: Sequence[str]) -> None:
    present = [method for method in methods if any(method in tallies for tallies in results.values())]
    width = 0.8 / max(len(present), 1)
    for index, method in enumerate(present):
        places = [place for place, tallies in enumerate(results.values()) if method in tallies]
        heights = [tallies[method].speedup(tallies[PLAIN]) for tallies in results.values() if method in tallies]
        panel.bar(
            np.array(places) + (index - (len(present) - 1) / 2) * width,
            heights,
            width,
            label=method,
            color=f"C{methods.index(method)}",
        )
    panel.axhline(1.0, color="black", linewidth=0.8)
    panel.set_xticks(range(len(results)), [_short(name) for name in results])
    panel.set_ylabel("tokens per second, x plain generate")
    panel.grid(axis="y", alpha=0.3)
