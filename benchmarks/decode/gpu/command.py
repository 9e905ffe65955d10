"""`python -m benchmarks gpu`: exactness, speed against bandwidth and transformers' own, on one GPU in eight minutes."""

import argparse
import platform
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import numba
import numpy
import torch
from rich.console import Console
from rich.markup import escape

from hf_smartspec import __version__
from hf_smartspec.commands.common.arguments import UsageError
from hf_smartspec.commands.common.models import check_device, demo_folder

from ...kit.session import Section, Session, new_session, print_head
from ...kit.tables import Column, Row, lines_of, print_lines
from ...kit.time_limit import interrupted_by_sigterm
from . import bandwidth, correctness, speed, verification, waits
from .arguments import BANDWIDTH, CORRECTNESS, OWN
from .shapes import Plan, World
from .targets import targets

_TARGETS = (
    Column("target", "target"),
    Column("measured", "measured", "{:.2f}"),
    Column("reached", lambda row, _: {None: "not measured", True: "yes", False: "NO"}[row["reached"]]),
)


def run(args: argparse.Namespace) -> int:
    device = _device(args)
    plan = Plan.smoke() if args.smoke else Plan()
    if args.model:
        plan = replace(plan, shapes={OWN: 0.0})
    world = World(plan, device, _names(args), args.prompts or demo_folder("--prompts") / "prompts.jsonl")
    session = new_session(args, device, getattr(torch, plan.dtype), _versions(device), free=("section", "shape"))
    console = _print_head(session, "the embedded target, cost-matched" if args.model is None else Path(args.model).name)
    shapes = [shape for shape in plan.shapes if args.model or shape in args.shape]
    sections = make_sections(world, session.report["results"], args.section, shapes)
    world.has_time = lambda: session.has_time
    try:
        with interrupted_by_sigterm():
            status = session.run(sections, console)
    finally:
        bounds = targets(next(iter(plan.shapes)), set(plan.batch_sizes) - {1})
        session.report["targets"] = [item.check(session.report["results"]) for item in bounds]
        session.write()
        _print_end(session.report, args.json, console)
    return 1 if differences(session.report) else status


def differences(report: dict[str, Any]) -> list[str]:
    """Return the names of the cases in which the tokens are not those of plain decoding."""
    return [name for name, row in report["results"].get(CORRECTNESS, {}).items() if not row["is_equal"]]


def make_sections(
    world: World, results: dict[str, dict[str, Row]], names: list[str], shapes: list[str]
) -> list[Section]:
    """Return the sections in order; compiling may take very long, and comes last, the smallest target first."""
    rates = results.setdefault(BANDWIDTH, {})
    found = [correctness.section(world, 60.0), bandwidth.section(world)]
    for shape in shapes:
        share = 0.25 if shape == "1B" else 1.0
        found += [
            verification.section(world, shape, rates, 30 * share),
            speed.acceptance(world, shape, 150 * share),
            speed.text(world, shape, 95 * share),
            waits.section(world, shape, 20 * share),
        ]
    found += [speed.compiled(world, shape, 30.0 if shape == "1B" else 45.0) for shape in reversed(shapes)]
    return [section for section in found if section.name.split()[0] in {*names, BANDWIDTH}]


def _names(args: argparse.Namespace) -> dict[str, str]:
    """Return the models by the names that `World` uses."""
    if args.model:
        return {"target": args.model} | ({"draft": args.draft} if args.draft else {})
    models = demo_folder("--model") / "models"
    return {"target": str(models / "target"), "draft": args.draft or str(models / "draft")}


def _device(args: argparse.Namespace) -> torch.device:
    name = args.device or "cuda"
    if not args.device and not torch.cuda.is_available():
        raise UsageError("there is no CUDA device here; --device cpu --smoke runs the same code on tiny shapes")
    check_device(name)
    device = torch.device(name)
    if device.type != "cuda" and not args.smoke:
        raise UsageError(f"--device {name} needs --smoke: the shapes of this bench are a GPU's")
    return device


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
    """Return the driver's version; None where nvidia-smi does not print it."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None
    asked = [tool, "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        lines = subprocess.run(asked, capture_output=True, text=True, timeout=10).stdout.splitlines()
    except (OSError, subprocess.TimeoutExpired):
        return None
    return lines[0].strip() if lines else None


def _print_head(session: Session, model: str) -> Console:
    system = session.report["environment"]
    console = print_head(session, "gpu", f"{model}; Python {system['python']}, driver {system['driver']}")
    if session.report["is_smoke"]:
        console.print("[dim]A trial run on tiny shapes: the figures mean nothing.[/dim]", highlight=False)
    return console


def _print_end(report: dict[str, Any], path: Path, console: Console) -> None:
    rows = {item["text"]: item for item in report["targets"]}
    print_lines(console, lines_of("Targets", "", _TARGETS, rows))
    for name in differences(report):
        console.print(f"[red]other tokens[/red]: {escape(name)}", highlight=False)
    console.print(f"everything is in {escape(str(path))}; {report['elapsed']:.0f} s", highlight=False)
