"""Arguments of `python -m benchmarks gpu`."""

import argparse
from pathlib import Path

from hf_smartspec.commands.common.arguments import positive_number

SHAPES = ("7B", "1B")
CORRECTNESS, BANDWIDTH, VERIFICATION, ACCEPTANCE, TEXT, WAITS, COMPILED = SECTIONS = (
    "correctness", "bandwidth", "verification", "acceptance", "text", "waits", "compiled",
)  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", metavar="DEVICE", help="default: cuda, which must be there; cpu: with --smoke only")
    parser.add_argument(
        "--smoke", action="store_true", help="the same code on tiny shapes, in about a minute; figures mean nothing"
    )
    parser.add_argument(
        "--seconds", type=positive_number, default=520.0, metavar="S",
        help="for everything but loading Python: what was not reached by then is named (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--section", nargs="+", default=SECTIONS, choices=SECTIONS, metavar="NAME",
        help=f"of {', '.join(SECTIONS)} (default: all; {BANDWIDTH} is always measured)",
    )  # fmt: skip
    parser.add_argument("--shape", nargs="+", default=SHAPES, choices=SHAPES, metavar="NAME", help="default: 7B 1B")
    parser.add_argument(
        "--json", type=Path, default=Path("bench-gpu.json"), metavar="FILE",
        help="written anew after every measurement (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument("--resume", action="store_true", help="leave out what the file holds already")
