"""Arguments of `python -m benchmarks sources`."""

import argparse
from pathlib import Path

from hf_smartspec.commands.common.arguments import positive

from ...kit.arguments import add_options, add_session_arguments, add_tokenizer_argument

ABLATIONS = ("trees", "length", "size", "shift", "datastore", "hybrid", "temperature", "confidence")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(needs_files=True)
    parser.add_argument("files", nargs="*", type=Path, metavar="FILE", help=".jsonl or .jsonl.gz; one is one data set")
    parser.add_argument(
        "--only", nargs="+", choices=ABLATIONS, metavar="NAME", help=f"of {', '.join(ABLATIONS)} (default: all)"
    )
    add_options(
        parser,
        ("--limit", positive, 100, "N", "replayed per file"),
        ("--earlier", positive, 1000, "N", "requests before them, whose outputs sources know"),
        (
            "--models",
            Path,
            None,
            "FOLDER",
            "with a target and a draft in it, for hybrid, temperature and confidence (default: the demo's)",
        ),
        ("--plots", Path, None, "FOLDER", "also draw them, one .png file each"),
    )
    add_tokenizer_argument(parser)
    add_session_arguments(parser)
