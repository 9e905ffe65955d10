"""`smartspec tune`: options of candidate sources that fit recorded responses, found by replay (SSSD, section 3.1.3)."""

import argparse
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.markup import escape
from transformers import PreTrainedModel

from ...candidates.combined.tuned import TunedSources
from ..common.arguments import UsageError
from ..common.console import make_console, table, track
from ..common.models import load_model
from ..common.outputs import check_output, write_json
from ..common.recordings import load_recordings
from ..replay.curves import geometric_mean
from .arguments import Costs
from .search import Requests, Search, Trial, num_requests, speed
from .space import THRESHOLD, Choice, Parameter, calibrated, space_of, value_of


def run(args: argparse.Namespace) -> int:
    check_output(args.output)
    check_output(args.json)
    space = space_of(args.sources, args.nodes)
    data = _load(args)
    space = calibrated(space, [pair for item in data for pair in item.recordings[: item.num_training]])
    draft = load_model(args.drafter, is_draft=True) if args.drafter else None
    costs, console = Costs(args.node_cost, args.drafter_cost), make_console()
    choice, is_complete = space.default, False

    def keep(search: Search) -> None:
        nonlocal choice
        choice = search.best.choice

    try:
        _search(choice, data, costs, None, space.parameters, keep)
        if draft is not None:
            _search(choice, data, costs, draft, [THRESHOLD], keep)
        is_complete = True
    finally:  # interrupted, the best so far is still worth having; the defaults are not worth an earlier file
        found = _origin(args, data) | {"is_complete": is_complete}
        if is_complete or choice != space.default:
            TunedSources.of(choice | {"found": found}).save(args.output)
            state = "the best options found" if is_complete else "interrupted; the best options so far"
            console.print(f"{args.output}: {state}", soft_wrap=True, markup=False)
            _print_choice(space.default, choice, [*space.parameters, THRESHOLD], console)
    report = _compare(space.default, choice, data, costs, draft, console)
    TunedSources.of(choice | {"found": found | {"mean_gain": report["mean_gain"]}}).save(args.output)
    if args.json:
        write_json(args.json, {"choice": choice, **report})
    return 0


def _load(args: argparse.Namespace) -> list[Requests]:
    data = []
    for name, recordings in load_recordings(args, args.limit).items():
        num_training = len(recordings) - math.ceil(args.held_out * len(recordings))
        if num_training < 1:
            raise UsageError(f"{name!r} has {len(recordings)} responses: too few to hold some out")
        data.append(Requests(name, recordings, num_training))
    return data


def _search(
    choice: Choice,
    data: Sequence[Requests],
    costs: Costs,
    draft: PreTrainedModel | None,
    parameters: Sequence[Parameter],
    keep: Callable[[Search], None],
) -> None:
    """Tune the parameters; `keep` gets the search after every one of them."""
    total = num_requests(data, parameters)
    with track(total=total, desc="tuning", unit=" requests") as progress:
        search = Search(choice, data, costs, draft, progress.update)
        for parameter in search.run(parameters):
            keep(search)
            progress.set_postfix_str(f"{parameter.label}, speed {search.value:.3f}")


def _origin(args: argparse.Namespace, data: Sequence[Requests]) -> dict[str, Any]:
    """Return a description of the search, for the file."""
    return {
        "files": {item.name: {"requests": len(item.recordings), "training": item.num_training} for item in data},
        "node_cost": args.node_cost,
        **({"drafter": args.drafter, "drafter_cost": args.drafter_cost} if args.drafter else {}),
    }


def _compare(
    default: Choice,
    choice: Choice,
    data: Sequence[Requests],
    costs: Costs,
    draft: PreTrainedModel | None,
    console: Console,
) -> dict[str, Any]:
    """Compare default and tuned options, on the training requests and then on those that were held out."""
    trials = [Trial(item, data, draft) for item in (default, choice)]
    total = 2 * sum(len(item.recordings) for item in data)
    with track(total=total, desc="comparing", unit=" requests") as progress:
        for trial in trials:
            trial.advance([len(item.recordings) for item in data], progress.update)
    rows = []
    lines = table(
        "Default and tuned", "data set", "requests", "options", "per step", "drafted", "accepted", "speed", "gain",
        num_text=3,
    )  # fmt: skip
    for index, item in enumerate(data):
        parts = {"training": slice(item.num_training), "held out": slice(item.num_training, None)}
        for part, requests in parts.items():
            counts = [trial.counts[index][requests] for trial in trials]
            rows.append({"data_set": item.name, "part": part} | _row(counts, costs))
            _add_rows(lines, rows[-1])
    means = {part: geometric_mean([row["gain"] for row in rows if row["part"] == part]) for part in parts}
    for part, mean in means.items():
        lines.add_row("geometric mean", part, "", "", "", "", "", f"{mean:.3f}")
    console.print(lines)
    console.print(
        f"[dim]Speed: tokens per cost, where a step costs 1 and each of its draft nodes {costs.node:g}"
        + (f", those of the draft model {costs.drafter:g} more" if draft is not None else "")
        + "; without drafts, 1. Sources go on learning through the held-out requests, as they do in use.[/dim]"
    )
    return {"rows": rows, "mean_gain": means}


def _row(counts: Sequence[np.ndarray], costs: Costs) -> dict[str, Any]:
    row: dict[str, Any] = {}
    for name, numbers in zip(("default", "tuned"), counts):
        tokens, steps, drafted, accepted, _ = (int(value) for value in numbers.sum(axis=0))
        row[name] = {
            "tokens_per_step": tokens / steps,
            "drafted_per_step": drafted / steps,
            "acceptance_rate": accepted / drafted if drafted else None,
            "speed": speed(numbers, costs),
        }
    return row | {"gain": row["tuned"]["speed"] / row["default"]["speed"]}


def _add_rows(lines: Any, row: dict[str, Any]) -> None:
    for name in ("default", "tuned"):
        item, is_first = row[name], name == "default"
        place = (escape(Path(row["data_set"]).name), row["part"]) if is_first else ("", "")
        rate = item["acceptance_rate"]
        lines.add_row(
            *place, name, f"{item['tokens_per_step']:.2f}", f"{item['drafted_per_step']:.2f}",
            "-" if rate is None else f"{rate:.1%}", f"{item['speed']:.3f}", "" if is_first else f"{row['gain']:.3f}",
        )  # fmt: skip


def _print_choice(default: Choice, choice: Choice, parameters: Sequence[Parameter], console: Console) -> None:
    lines = table("Options", "option", "default", "tuned")
    for parameter in parameters:
        before, after = value_of(default, parameter), value_of(choice, parameter)
        if (before, after) != (None, None):
            shown = ("measured" if isinstance(value, dict) else str(value) for value in (before, after))
            lines.add_row(parameter.label, *shown)
    console.print(lines)
