"""`python -m benchmarks gpu`: exactness, speed against the bandwidth, transformers' own, on one GPU in nine minutes."""

import argparse
import platform
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numba
import numpy
import torch
from rich.console import Console
from rich.markup import escape

from hf_smartspec import __version__
from hf_smartspec.commands.common.arguments import UsageError, command_of
from hf_smartspec.commands.common.console import fold, make_console, table
from hf_smartspec.commands.common.models import check_device
from hf_smartspec.commands.common.outputs import check_output, resumed
from hf_smartspec.commands.common.progress import track
from hf_smartspec.commands.common.timing import environment

from . import bandwidth, correctness, speed, verification, waits
from .arguments import BANDWIDTH, CORRECTNESS
from .session import Row, Section, Session
from .shapes import Plan, World
from .targets import targets


def run(args: argparse.Namespace) -> int:
    device = _device(args)
    check_output(args.json)
    plan = Plan.smoke() if args.smoke else Plan()
    report = _new_report(args, plan, device)
    if args.resume and args.json.exists():
        report = resumed(args.json, report)
    world, console = World(plan, device), make_console()
    _print_head(report, console)
    session = Session(args.json, report, args.seconds)
    sections = make_sections(world, report["results"], args.section, args.shape)
    with track(total=len(sections), desc="measuring") as progress:

        def done(section: Section, rows: dict[str, Row]) -> None:
            _print_section(section, rows, console)
            progress.update()

        session.run(sections, done)
    report["targets"] = [item.check(report["results"]) for item in targets(set(plan.batch_sizes) - {1})]
    session.write()
    _print_end(report, args.json, console)
    return 1 if report["failures"] or differences(report) else 0


def differences(report: dict[str, Any]) -> list[str]:
    """Names of the cases in which the tokens are not those of plain decoding."""
    return [name for name, row in report["results"].get(CORRECTNESS, {}).items() if not row["is_equal"]]


def make_sections(
    world: World, results: dict[str, dict[str, Row]], names: list[str], shapes: list[str]
) -> list[Section]:
    """In order; what may take long without end comes last."""
    rates = results.setdefault(BANDWIDTH, {})
    found = [correctness.section(world, 100.0), bandwidth.section(world)]
    shapes = [shape for shape in shapes if shape in world.plan.shapes]
    for shape, share in (("7B", 2.0), ("1B", 1.0)):
        if shape in shapes:
            found += [
                verification.section(world, shape, rates, 15 * share),
                speed.acceptance(world, shape, 40 * share),
                speed.text(world, shape, 35 * share),
                waits.section(world, shape, 10 * share),
            ]
    found += [speed.compiled(world, shape, 50.0) for shape in ("1B", "7B") if shape in shapes]
    return [section for section in found if section.name.split()[0] in {*names, BANDWIDTH}]


def _device(args: argparse.Namespace) -> torch.device:
    name = args.device or "cuda"
    if not args.device and not torch.cuda.is_available():
        raise UsageError("there is no CUDA device here; --device cpu --smoke runs the same code on tiny shapes")
    check_device(name)
    device = torch.device(name)
    if device.type != "cuda" and not args.smoke:
        raise UsageError(f"--device {name} needs --smoke: the shapes of this bench are a GPU's")
    return device


def _new_report(args: argparse.Namespace, plan: Plan, device: torch.device) -> dict[str, Any]:
    return {
        "command": command_of(args),
        "environment": environment(device, getattr(torch, plan.dtype)) | _versions(device),
        "is_smoke": args.smoke,
    }


def _versions(device: torch.device) -> dict[str, Any]:
    found: dict[str, Any] = {
        "hf-smartspec": __version__,
        "numpy": numpy.__version__,
        "numba": numba.__version__,
        "cuda": torch.version.cuda,
        "platform": platform.platform(),
        "driver": _driver(),
        "float32_products": torch.get_float32_matmul_precision(),  # with fewer bits, other shapes give other tokens
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        found |= {"memory": properties.total_memory, "multiprocessors": properties.multi_processor_count}
        found["capability"] = f"{properties.major}.{properties.minor}"
    return found


def _driver() -> str | None:
    """The driver's version, where the usual tool tells it."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None
    asked = [tool, "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        lines = subprocess.run(asked, capture_output=True, text=True, timeout=10).stdout.splitlines()
    except (OSError, subprocess.TimeoutExpired):
        return None
    return lines[0].strip() if lines else None


def _print_head(report: dict[str, Any], console: Console) -> None:
    system = report["environment"]
    console.print(
        f"[bold]benchmarks gpu[/bold] {escape(str(system['device']))}, torch {system['torch']}, "
        f"transformers {system['transformers']}, Python {system['python']}, driver {system['driver']}",
        highlight=False,
    )
    if report["is_smoke"]:
        console.print("[dim]A trial run on tiny shapes: the figures mean nothing.[/dim]", highlight=False)


def _print_section(section: Section, rows: dict[str, Row], console: Console) -> None:
    if not rows:
        return
    lines = table(section.name, "", *section.columns)
    fold(lines)
    for name, row in rows.items():
        lines.add_row(name, *section.show(row, rows))
    console.print(lines)


def _print_end(report: dict[str, Any], path: Path, console: Console) -> None:
    lines = table("Targets", "", "target", "measured", "reached")
    fold(lines)
    for item in report["targets"]:
        measured = "" if item["measured"] is None else f"{item['measured']:.2f}"
        reached = {None: "not measured", True: "yes", False: "NO"}[item["reached"]]
        lines.add_row(item["text"], item["target"], measured, reached)
    console.print(lines)
    for name in differences(report):
        console.print(f"[red]other tokens[/red]: {escape(name)}", highlight=False)
    for name, trace in report["failures"].items():
        console.print(f"[red]failed[/red]: {escape(name)}: {escape(trace.strip().splitlines()[-1])}", highlight=False)
    if report["skipped"]:
        console.print(f"skipped: {len(report['skipped'])}, named with reasons in {escape(str(path))}", highlight=False)
    console.print(f"everything is in {escape(str(path))}; {report['elapsed']:.0f} s", highlight=False)
