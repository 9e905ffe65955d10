"""Arguments of `python -m benchmarks papers`."""

import argparse
import shlex
from pathlib import Path

PAPERS = ("smartspec", "sssd", "osd", "suffix", "su")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("paper", choices=PAPERS, help="whose figures and tables are measured")
    parser.add_argument(
        "--figure", nargs="+", metavar="N", help="figures or tables, such as 11 or table-1 (default: all)"
    )
    parser.add_argument(
        "--also", type=shlex.split, default=[], metavar="OPTIONS",
        help='further options of the benches that are played, such as --also="--seconds 5"',
    )  # fmt: skip
    parser.add_argument("--list", action="store_true", help="only show what there is, and the command of each")
    parser.add_argument(
        "--model", metavar="MODEL",
        help="folder or hub id (default: SmolLM2-135M-Instruct where `make setup` has put it into the cache, else the "
        "embedded target)",
    )  # fmt: skip
    parser.add_argument(
        "--prompts", nargs="+", type=Path, default=[], metavar="FILE",
        help=".jsonl or .jsonl.gz with prompts and responses, for all figures that take some (default: those of the "
        "repository)",
    )  # fmt: skip
    parser.add_argument("--json", type=Path, metavar="FILE", help="one for each figure, whose name is added to FILE's")
    parser.add_argument("--plots", type=Path, metavar="FOLDER", help="also draw what can be drawn, as .svg")
