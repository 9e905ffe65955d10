"""`smartspec profile`: costs of a model's forward, tokens that are free, and the best draft length by batch size."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from transformers import PreTrainedModel

from ...candidates.base import saved_name
from ...goodput import CostModel, CostPoint, Roofline, free_tokens
from ...prepare.config import SmartSpecConfig
from ...prepare.sources import resolve
from ...target_model.cost.measuring import DESIGN, HELD_OUT, measure
from ...target_model.cost.profiling import keep_profile, profile_path, read_profile
from ...target_model.cost.tables import keep_table
from ...target_model.support.capabilities import can_pack
from ..common.arguments import UsageError, usage_errors
from ..common.console import environment, make_console, print_head, table
from ..common.cost_matched import enlarge
from ..common.drafters import DrafterFiles
from ..common.models import encode, load_model, load_tokenizer, read_prompts, use_machine
from ..common.outputs import check_matplotlib, check_output, saved_figure, write_json
from .lookup import measure_table, print_table
from .operators import analysed, print_operators

_LONGEST_PROMPT = 1024  # tokens; of longer prompts, the end is taken
_SLACK = 0.1  # "free": at most so much slower than one token


def run(args: argparse.Namespace) -> int:
    check_output(args.json)
    check_output(args.show)
    if args.show:
        check_matplotlib(args.show)
    if args.operators:
        print_operators(analysis := analysed(args), make_console())
        if args.json:
            write_json(args.json, analysis)
        return 0
    if args.table and args.max_new_tokens < 2:
        raise UsageError("--max-new-tokens: with --table, the time between two tokens is measured, so at least 2")
    use_machine(args)
    model = _load(args)
    config, prompts = _table_setting(args, model) if args.table else (None, [])
    measured = measure(model, DESIGN, HELD_OUT)
    points = {"design": measured.designs, "held out": measured.held_out}
    cost = read_profile(model)
    if cost is None or cost.is_provisional or args.refresh:
        cost = keep_profile(model, measured.cost(), is_asked=True)
    is_new = cost == measured.cost()
    report = _report(args, model, cost, points) | {"is_new": is_new, "was_busy": measured.was_busy}
    _print(report, console := make_console())
    if config is not None:
        report["table"] = _measure_table(args, model, config, prompts, console)
    if args.json:
        write_json(args.json, report)
    if args.show:
        _draw(report, args.show)
    return 0


def _load(args: argparse.Namespace) -> PreTrainedModel:
    model = load_model(args.model, args.dtype, args.device)
    if args.parameters:
        with usage_errors("--parameters"):
            model = enlarge(model, args.parameters)
    if not can_pack(model):
        raise UsageError(f"{type(model).__name__} is served by transformers' own loop: there is nothing to profile")
    return model


def _table_setting(args: argparse.Namespace, model: PreTrainedModel) -> tuple[SmartSpecConfig, list[list[int]]]:
    """Return the source of a table, and its prompts."""
    texts = [row["prompt"] for row in read_prompts(args.table)]
    tokenizer = load_tokenizer(args.model)
    if tokenizer is None:
        raise UsageError(f"--table: {args.model!r} has no tokenizer for the prompts")
    prompts = encode(texts, tokenizer, _LONGEST_PROMPT)
    if not prompts:
        raise UsageError(f"--table: {str(args.table)!r} holds no prompts with tokens")
    return SmartSpecConfig(DrafterFiles(model, option="--assistant").named(args.assistant).assistant), prompts


def _measure_table(
    args: argparse.Namespace,
    model: PreTrainedModel,
    config: SmartSpecConfig,
    prompts: list[list[int]],
    console: Console,
) -> dict[str, Any]:
    """Measure, print and keep a table, and return it as plain numbers."""
    sizes = args.max_batch_size, args.max_length, args.max_new_tokens, args.long_draft
    name = saved_name(resolve(config, model).source)
    with usage_errors("--table"):
        found = measure_table(model, config, prompts, *sizes)
        print_table(found, console)
        path = keep_table(model, name, found.table)
    console.print(
        f'kept in {path}: policy="table" looks up lengths for drafts of {name!r}', soft_wrap=True, markup=False
    )
    return {"assistant": args.assistant, "source": name, "file": str(path)} | found.as_dict()


def _report(
    args: argparse.Namespace, model: PreTrainedModel, cost: CostModel, points: dict[str, list[CostPoint]]
) -> dict[str, Any]:
    """Return all results as plain numbers."""
    per_parameter = model.dtype.itemsize
    roofline = Roofline.of_profile(cost, model.num_parameters(), per_parameter)
    hidden_size = model.config.get_text_config(decoder=True).hidden_size
    theoretical = roofline.free_tokens(hidden_size, per_parameter)
    return {
        "model": args.model,
        "parameters": model.num_parameters(),
        "environment": environment(model.device, model.dtype),
        "profile": str(profile_path(model)),
        "cost": cost.as_dict(),
        "points": {name: [_line(cost, point) for point in items] for name, items in points.items()},
        "median_error": {name: cost.median_error(items) for name, items in points.items()},
        "free_tokens": free_tokens(cost, _SLACK),
        "roofline": {
            "flops": roofline.flops if np.isfinite(roofline.flops) else None,
            "bandwidth": roofline.bandwidth,
            "free_tokens": theoretical if np.isfinite(theoretical) else None,
        },
    }


def _line(cost: CostModel, point: CostPoint) -> dict[str, float]:
    context, batched, width, seconds = point
    return {
        "rows": batched // width,
        "context": context * width // batched,
        "width": width,
        "measured": seconds,
        "predicted": float(cost.seconds(context, batched, width)),
    }


def _print(report: dict[str, Any], console: Console) -> None:
    about = f"{report['model']}, {report['parameters'] / 1e6:.1f} M parameters"
    print_head(console, "profile", about, report["environment"])
    profile = f"profile {'measured now, kept in' if report['is_new'] else 'as kept in'} {report['profile']}\n"
    console.print(profile, soft_wrap=True, markup=False)
    if report["was_busy"]:
        console.print("[yellow]The machine was busy meanwhile: what was measured now is too high.[/yellow]\n")
    for name, title in (("design", "At the points of the fit"), ("held out", "At other points")):
        _print_points(report["points"][name], title, console)
        console.print(f"median error: {report['median_error'][name]:.1%}\n")
    _print_cost(report, console)
    _print_budget(report, console)


def _print_points(points: Sequence[dict[str, float]], title: str, console: Console) -> None:
    columns = ("rows", "context", "tokens per row", "measured ms", "predicted ms", "error")
    lines = table(title, *columns, num_text=0)
    for point in points:
        numbers = (str(point[name]) for name in ("rows", "context", "width"))
        seconds = (f"{point[name] * 1e3:.2f}" for name in ("measured", "predicted"))
        lines.add_row(*numbers, *seconds, f"{point['predicted'] / point['measured'] - 1:+.1%}")
    console.print(lines)


def _print_cost(report: dict[str, Any], console: Console) -> None:
    cost = report["cost"]
    tokens = f"{cost['gamma'] * 1e3:.3f} ms * tokens + {cost['delta'] * 1e3:.2f} ms"
    if cost["knots"]:
        pairs = zip(cost["knots"], cost["curve"])
        tokens = "a curve over tokens (" + ", ".join(f"{x:.0f}: {y * 1e3:.2f}" for x, y in pairs) + " ms)"
    device = f"({cost['alpha'] * 1e6:.3f} + {cost['beta'] * 1e6:.3f} * width) us * context + {tokens}"
    if cost["host"]:
        device = f"{device}, and at least {cost['host'] * 1e3:.2f} ms to launch it"
    console.print(f"T = {device}\ncontext: cached tokens read, over all rows; width: tokens of the row that has most\n")


def _print_budget(report: dict[str, Any], console: Console) -> None:
    roofline = report["roofline"]
    console.print(
        f"Up to {report['free_tokens']} tokens in a forward, rows times tokens per row, ride free: they take at most "
        f"{_SLACK:.0%} longer than one."
    )
    speed = "further tokens cost nothing measurable"
    if roofline["flops"] is not None:
        speed = f"multiplies at {roofline['flops'] / 1e12:.2f} TFLOP/s"
    console.print(
        f"Seen as a roofline (SSSD, section 3.2.1), the model reads its weights at {roofline['bandwidth'] / 1e9:.0f} "
        f"GB/s and {speed}."
    )
    if roofline["free_tokens"] is not None:
        console.print(
            f"If reading and multiplying overlapped perfectly, {roofline['free_tokens']:.0f} tokens would ride free."
        )


def _draw(report: dict[str, Any], path: Path) -> None:
    """Draw predicted against measured times, and both over the tokens in the forward."""
    with saved_figure(path, 1, 2, (12, 5)) as (_, ((left, right),)):
        _draw_predictions(left, report)
        _draw_sizes(right, report)
        for axes in (left, right):
            axes.grid(alpha=0.3)
            axes.legend(fontsize="small")


def _draw_predictions(axes: Any, report: dict[str, Any]) -> None:
    for (name, points), marker in zip(report["points"].items(), "ox"):
        measured, predicted = ([point[key] * 1e3 for point in points] for key in ("measured", "predicted"))
        axes.scatter(
            measured, predicted, marker=marker, label=f"{name} (median error {report['median_error'][name]:.1%})"
        )
    ends = [min(axes.get_xlim()[0], axes.get_ylim()[0]), max(axes.get_xlim()[1], axes.get_ylim()[1])]
    axes.plot(ends, ends, color="grey", linewidth=1, zorder=0)
    axes.set(xlabel="measured, ms", ylabel="predicted, ms", title="A forward: predicted against measured")


def _draw_sizes(axes: Any, report: dict[str, Any]) -> None:
    for (name, points), marker in zip(report["points"].items(), "ox"):
        tokens = [point["rows"] * point["width"] for point in points]
        axes.scatter(tokens, [point["measured"] * 1e3 for point in points], marker=marker, label=f"{name}, measured")
    largest = max(point["rows"] * point["width"] for points in report["points"].values() for point in points)
    sizes = np.arange(1, largest + 1)
    seconds = CostModel.from_dict(report["cost"]).seconds(0, sizes)
    axes.plot(sizes, seconds * 1e3, color="grey", label="predicted without context")
    axes.axvline(report["free_tokens"], linestyle=":", color="grey", label=f"{report['free_tokens']} tokens ride free")
    axes.set(xlabel="tokens in the forward", ylabel="ms", xscale="log", title="Cost of a forward by its tokens")
    ticks = [2**power for power in range(int(largest).bit_length())]
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.minorticks_off()
    axes.set_ylim(bottom=0)
