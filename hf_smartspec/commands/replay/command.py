"""`smartspec replay`: drafts of sources for recorded responses, and the cost of drafting."""

import argparse
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.markup import escape

from ...goodput.papers.entropy import empirical_entropy
from ..common.arguments import UsageError, command_of
from ..common.console import environment, fold, make_console, table
from ..common.outputs import check_outputs, saved_figure, write_json
from ..common.recordings import Recording, load_recordings
from .arguments import _DEFAULT_SOURCES
from .curves import Point, geometric_mean, moving_average, ratios_at_equal_drafts
from .loop import Results, Tally, replay
from .sources import SourceSpec, parse_specs

_ENTROPY_DEPTH = 16
_LENGTHS, _STATISTICS = ("prompt", "response"), {"mean": np.mean, "std": np.std}  # as in SmartSpec, Figure 10


def run(args: argparse.Namespace) -> int:
    specs = _specs(args)
    check_outputs(args)
    data = load_recordings(args, max(args.limit, args.entropy or 0))
    console = make_console()
    report: dict[str, Any] = {"command": command_of(args)}
    report["environment"] = environment(torch.device("cpu"), torch.float32)
    if args.entropy:
        report |= _print_entropy(data, args.entropy, console)
    results: Results = {}
    try:
        if specs:
            replay(data, specs, results, args.limit, args.batch_size, args.max_nodes, args.carry_over)
    finally:  # interrupted, what was measured so far is still worth reading
        _report(results, report, args, console)
    return 0


def _specs(args: argparse.Namespace) -> list[SourceSpec]:
    texts = args.sources or ([] if args.entropy else _DEFAULT_SOURCES)
    specs = [spec for text in texts for spec in parse_specs(text)]
    if len({spec.text for spec in specs}) < len(specs):
        raise UsageError(f"--sources: one is named twice in {' '.join(texts)}")
    if args.against is not None and args.against not in {spec.name for spec in specs}:
        raise UsageError(f"--against: {args.against!r} is none of the sources ({' '.join(texts)})")
    return specs


def compare(results: Results, against: str) -> list[dict[str, Any]]:
    """
    Compare every source with the settings of one, data set by data set, at the baseline's number of drafted tokens per
    step. Return rows of the data set, the baseline's setting and point, and the ratio of accepted tokens by source.
    """
    rows = []
    for name, tallies in results.items():
        curves = _curves(tallies)
        baseline = curves.pop(against)
        settings = [spec.text for spec in tallies if spec.name == against]
        ratios = {other: ratios_at_equal_drafts(curve, baseline) for other, curve in curves.items()}
        for index, (setting, point) in enumerate(zip(settings, baseline)):
            by_source = {other: values[index] for other, values in ratios.items()}
            rows.append({"data_set": name, "baseline": setting, **point._asdict(), "ratios": by_source})
    return rows


def _curves(tallies: Mapping[SourceSpec, Tally]) -> dict[str, list[Point]]:
    curves: dict[str, list[Point]] = {}
    for spec, tally in tallies.items():
        numbers = tally.summary()
        point = Point(numbers["drafted_per_step"] or 0.0, numbers["accepted_per_step"] or 0.0)
        curves.setdefault(spec.name, []).append(point)
    return curves


def _report(results: Results, report: dict[str, Any], args: argparse.Namespace, console: Console) -> None:
    report["data_sets"] = {
        name: {spec.text: tally.summary() | {"by_request": tally.requests.tolist()} for spec, tally in tallies.items()}
        for name, tallies in results.items()
    }
    for name, tallies in results.items():
        _print_tallies(name, tallies, console)
    if args.against and results:
        report["against"] = compare(results, args.against)
        report["against_mean"] = _print_comparison(report["against"], console)
    if results:
        console.print(
            "[dim]Tokens per request and step. ECE of draft probabilities in the second half of the requests: raw, "
            "calibrated on the first half, and calibrated on all before. Microseconds are medians: to draft, per "
            "request and step, and per draft token; to take in what a step committed, a token of the prompt, and the "
            "end of a request, per token of the response; and all that together, of whole requests, per token of the "
            f"response; batch {args.batch_size} on {escape(str(report['environment']['device']))}.[/dim]"
        )
    if args.json and (results or args.entropy):
        write_json(args.json, report)
    if args.plot and results:
        plot({Path(name).name: tallies for name, tallies in results.items()}, args.plot)


# Heading, key of `Tally.summary`, format.
_DRAFTS = (
    ("per step", "tokens_per_step", ".2f"),
    ("drafted", "drafted_per_step", ".2f"),
    ("accepted", "acceptance_rate", ".1%"),
    ("ECE raw", "ece_raw", ".3f"),
    ("half", "ece_calibrated", ".3f"),
    ("online", "ece_online", ".3f"),
)
_COSTS = (
    ("propose a step", "propose_us_per_step_median", ".1f"),
    ("a draft token", "propose_us_per_drafted_token", ".1f"),
    ("observe", "observe_us_per_step", ".1f"),
    ("prompt", "start_us_per_prompt_token", ".2f"),
    ("stop", "stop_us_per_token", ".2f"),
    ("all, a token", "us_per_token", ".1f"),
    ("bytes cached", "bytes_per_cached_token", ".0f"),
)


def _print_tallies(name: str, tallies: Mapping[SourceSpec, Tally], console: Console) -> None:
    numbers = {spec.text: tally.summary() for spec, tally in tallies.items()}
    first = next(iter(numbers.values()))
    title = f"{Path(name).name}: {first['requests']} requests, {first['generated_tokens']} tokens"
    for heading, columns in ((title, _DRAFTS), ("Microseconds, and bytes per cached token", _COSTS)):
        lines = table(heading, "source", *(name for name, _, _ in columns))
        fold(lines, 0)
        for text, values in numbers.items():
            lines.add_row(escape(text), *(_shown(values[key], form) for _, key, form in columns))
        console.print(lines)


def _print_comparison(rows: Sequence[dict[str, Any]], console: Console) -> dict[str, float]:
    """Print the comparison; return the geometric mean of every source's ratios."""
    names = list(rows[0]["ratios"])
    lines = table(
        "Accepted tokens per step at equal drafted tokens", "data set", "baseline", "drafted", "accepted",
        *(escape(name) for name in names), num_text=2,
    )  # fmt: skip
    fold(lines, 0, 1, *range(4, 4 + len(names)))
    for row in rows:
        numbers = (f"{row['drafted']:.2f}", f"{row['accepted']:.2f}")
        ratios = (_shown(row["ratios"][name], ".2f") for name in names)
        lines.add_row(escape(Path(row["data_set"]).name), escape(row["baseline"]), *numbers, *ratios)
    means = {name: geometric_mean([row["ratios"][name] for row in rows]) for name in names}
    lines.add_row("geometric mean", "", "", "", *(_shown(mean, ".3f") for mean in means.values()))
    console.print(lines)
    return means


def _print_entropy(data: Mapping[str, Sequence[Recording]], num_responses: int, console: Console) -> dict[str, Any]:
    lines = table(
        f"Empirical entropy, suffix trees of {_ENTROPY_DEPTH} levels; lengths in tokens",
        "data set", "responses", "tokens", "bits", *(f"{part}, {text}" for text in _LENGTHS for part in _STATISTICS),
    )  # fmt: skip
    entropies, lengths = {}, {}
    for name, recordings in data.items():
        responses = [recording.response for recording in recordings[:num_responses]]
        entropies[name] = empirical_entropy(responses, _ENTROPY_DEPTH)
        sizes = [[len(getattr(recording, text)) for recording in recordings[:num_responses]] for text in _LENGTHS]
        lengths[name] = {
            text: {part: float(measure(size)) for part, measure in _STATISTICS.items()}
            for text, size in zip(_LENGTHS, sizes)
        }
        lines.add_row(
            escape(Path(name).name), str(len(responses)), str(sum(sizes[1])), f"{entropies[name]:.3f}",
            *(f"{number:.0f}" for numbers in lengths[name].values() for number in numbers.values()),
        )  # fmt: skip
    console.print(lines)
    return {"entropy_bits": entropies, "lengths": lengths}


def _shown(value: float | int | None, form: str) -> str:
    return "-" if value is None or not math.isfinite(value) else format(value, form)


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
