"""Arguments of `python -m benchmarks simulate`."""

import argparse
from pathlib import Path

from hf_smartspec.commands.common.arguments import not_negative, positive, positive_number

from ...kit.arguments import add_session_arguments, add_tokenizer_argument

FIGURES = ("1", "5", "11", "12", "14", "15", "cv")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "files", nargs="*", type=Path, metavar="FILE",
        help=".jsonl or .jsonl.gz with responses, for Figure 12 (default: the demo's)",
    )  # fmt: skip
    parser.add_argument("--figures", nargs="*", choices=FIGURES, default=list(FIGURES), help="default: all")
    parser.add_argument("--requests", type=positive, default=150, metavar="N", help="per load (default: 150)")
    parser.add_argument(
        "--traces", nargs="+", type=Path, default=[], metavar="CSV",
        help="also play these traces, of Azure's or Mooncake's format",
    )  # fmt: skip
    parser.add_argument(
        "--trace-seconds", type=positive_number, metavar="S", help="the beginning of the traces only (default: all)"
    )
    parser.add_argument("--trace-rate", type=positive_number, metavar="R", help="play traces at R requests per second")
    add_tokenizer_argument(parser)
    parser.add_argument("--seed", type=not_negative, default=0, metavar="N", help="default: 0")
    add_session_arguments(parser)
    parser.add_argument("--plots", type=Path, metavar="FOLDER", help="also draw the figures into this folder")
