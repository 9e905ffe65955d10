"""Arguments of `python -m benchmarks sources`."""

import argparse
from pathlib import Path

from hf_smartspec.commands.common.arguments import positive

from ...kit.arguments import add_session_arguments, add_tokenizer_argument

ABLATIONS = ("trees", "length", "size", "shift", "datastore", "hybrid")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(needs_files=True)
    parser.add_argument("files", nargs="*", type=Path, metavar="FILE", help=".jsonl or .jsonl.gz; one is one data set")
    parser.add_argument(
        "--only", nargs="+", choices=ABLATIONS, metavar="NAME", help=f"of {', '.join(ABLATIONS)} (default: all)"
    )
    parser.add_argument("--limit", type=positive, default=100, metavar="N", help="replayed per file (default: 100)")
    parser.add_argument(
        "--earlier", type=positive, default=1000, metavar="N",
        help="requests before them, whose outputs sources know (default: 1000)",
    )  # fmt: skip
    add_tokenizer_argument(parser)
    parser.add_argument(
        "--models", type=Path, metavar="FOLDER",
        help="with a target and a draft in it, for the hybrid (default: the demo's)",
    )  # fmt: skip
    add_session_arguments(parser)
    parser.add_argument("--plots", type=Path, metavar="FOLDER", help="also draw them, one .png file each")
