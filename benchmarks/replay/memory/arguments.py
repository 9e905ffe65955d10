"""Arguments of `python -m benchmarks memory`."""

import argparse
from functools import partial
from pathlib import Path

from hf_smartspec.commands.common.arguments import add_output_arguments, not_negative

from ...kit.arguments import add_resume_arguments, add_tokenizer_argument

LEAST_TOKENS = 4  # of a tree, a quarter of which is timed

LEAST_BYTES = 64  # of the tree that has to forget: one token is added for so many


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "files",
        nargs="*",
        type=Path,
        metavar="FILE",
        help=".jsonl or .jsonl.gz with responses (default: the demo's)",
    )
    parser.add_argument(
        "--tokens", type=partial(_at_least, LEAST_TOKENS), nargs="+", metavar="N",
        default=[100_000, 1_000_000],
        help="sizes of the tree at which to measure (default: 100000 1000000)",
    )  # fmt: skip
    parser.add_argument(
        "--datastore-tokens", type=not_negative, default=2_000_000, metavar="N",
        help="size of the datastore to build; 0: none (default: 2000000)",
    )  # fmt: skip
    parser.add_argument("--max-bytes", type=partial(_at_least, LEAST_BYTES), default=2**24, metavar="N",
                        help="bound on the tree that has to forget (default: 16777216)")  # fmt: skip
    add_tokenizer_argument(parser)
    add_output_arguments(parser)
    add_resume_arguments(parser)


def _at_least(least: int, text: str) -> int:
    value = not_negative(text)
    if value < least:
        raise argparse.ArgumentTypeError(f"must be at least {least}, got {value}")
    return value
