"""Arguments of `python -m benchmarks gpu`."""

import argparse
from pathlib import Path

from ...kit.arguments import add_session_arguments

SHAPES = ("7B", "1B")
OWN = "own"  # the shape of --model, as it is
CORRECTNESS, BANDWIDTH, VERIFICATION, ACCEPTANCE, TEXT, WAITS, COMPILED = SECTIONS = (
    "correctness", "bandwidth", "verification", "acceptance", "text", "waits", "compiled",
)  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", metavar="DEVICE", help="default: cuda, which must be there; cpu: with --smoke only")
    parser.add_argument(
        "--smoke", action="store_true", help="the same code on tiny shapes, in about a minute; figures mean nothing"
    )
    parser.add_argument(
        "--section", nargs="+", default=SECTIONS, choices=SECTIONS, metavar="NAME",
        help=f"of {', '.join(SECTIONS)} (default: all; {BANDWIDTH} is always measured)",
    )  # fmt: skip
    parser.add_argument(
        "--shape", nargs="+", default=SHAPES, choices=SHAPES, metavar="NAME",
        help="sizes to which the embedded target is enlarged (default: 7B 1B)",
    )  # fmt: skip
    parser.add_argument("--model", metavar="MODEL", help="measure this model, folder or hub id, as it is")
    parser.add_argument("--draft", metavar="MODEL", help="its draft model (default: none, the demo's for the demo's)")
    parser.add_argument(
        "--prompts", type=Path, metavar="FILE", help=".jsonl with prompts and responses (default: the demo's)"
    )
    add_session_arguments(parser, Path("bench-gpu.json"), seconds=480.0)
