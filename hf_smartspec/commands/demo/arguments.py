"""Arguments of `smartspec demo`."""

import argparse
from pathlib import Path

from ..common.arguments import add_target_arguments, host, port


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_target_arguments(parser)
    parser.add_argument(
        "--draft", nargs="+", metavar="MODEL",
        help="draft models and learned drafters to choose among, by folder or hub id (default: the demo's for the "
        "demo's target)",
    )  # fmt: skip
    parser.add_argument(
        "--prompts",
        type=Path,
        metavar="FILE",
        help="examples: .jsonl with `prompt` and `category` (default: the demo's)",
    )
    parser.add_argument(
        "--host", type=host, default="127.0.0.1", metavar="ADDRESS", help="to listen on (default: this machine only)"
    )
    parser.add_argument("--port", type=port, metavar="N", help="default: the first free one from 7860 on")
