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
from hf_smartspec.commands.common.arguments import UsageError
from hf_smartspec.commands.common.models import check_device

from ...kit.session import Section, Session, new_session, print_head
from ...kit.tables import Column, Row, lines_of, print_lines
from . import bandwidth, correctness, speed, verification, waits
from .arguments import BANDWIDTH, CORRECTNESS
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
    session = new_session(args, device, getattr(torch, plan.dtype), _versions(device), free=("section", "shape"))
    world = World(plan, device)
    console = _print_head(session)
    sections = make_sections(world, session.report["results"], args.section, args.shape)
    status = session.run(sections, console)
    session.report["targets"] = [item.check(session.report["results"]) for item in targets(set(plan.batch_sizes) - {1})]
    session.write()
    _print_end(session.report, args.json, console)
    return 1 if differences(session.report) else status


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


def _print_head(session: Session) -> Console:
    system = session.report["environment"]
    console = print_head(session, "gpu", f"Python {system['python']}, driver {system['driver']}")
    if session.report["is_smoke"]:
        console.print("[dim]A trial run on tiny shapes: the figures mean nothing.[/dim]", highlight=False)
    return console


def _print_end(report: dict[str, Any], path: Path, console: Console) -> None:
    rows = {item["text"]: item for item in report["targets"]}
    print_lines(console, lines_of("Targets", "", _TARGETS, rows))
    for name in differences(report):
        console.print(f"[red]other tokens[/red]: {escape(name)}", highlight=False)
    console.print(f"everything is in {escape(str(path))}; {report['elapsed']:.0f} s", highlight=False)
