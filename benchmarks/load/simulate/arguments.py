"""Arguments of `python -m benchmarks simulate`."""

import argparse
from pathlib import Path

from hf_smartspec.commands.common.arguments import not_negative, positive, positive_number

from ...kit.arguments import add_options, add_session_arguments, add_tokenizer_argument

FIGURES = ("1", "3", "5", "11", "12", "14", "15", "cv", "sssd")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "files", nargs="*", type=Path, metavar="FILE",
        help=".jsonl or .jsonl.gz with responses, for Figure 12 and SSSD (default: the demo's)",
    )  # fmt: skip
    parser.add_argument("--figures", nargs="*", choices=FIGURES, default=list(FIGURES), help="default: all")
    parser.add_argument(
        "--traces", nargs="+", type=Path, default=[], metavar="CSV",
        help="also play these traces, of Azure's or Mooncake's format",
    )  # fmt: skip
    add_options(
        parser,
        ("--requests", positive, 150, "N", "per load"),
        ("--trace-seconds", positive_number, None, "S", "the beginning of the traces only (default: all)"),
        ("--trace-rate", positive_number, None, "R", "play traces at R requests per second"),
        ("--seed", not_negative, 0, "N", "of loads"),
        ("--plots", Path, None, "FOLDER", "also draw the figures into this folder"),
    )
    add_tokenizer_argument(parser)
    add_session_arguments(parser)
