"""Arguments of `python -m benchmarks memory`."""

import argparse
from functools import partial
from pathlib import Path

from hf_smartspec.commands.common.arguments import add_output_arguments, not_negative

from ...kit.arguments import add_options, add_resume_arguments, add_tokenizer_argument

LEAST_TOKENS = 4  # of a tree, a quarter of which is timed
LEAST_BYTES = 64  # of the tree that has to forget: one token is added for so many


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "files", nargs="*", type=Path, metavar="FILE", help=".jsonl or .jsonl.gz with responses (default: the demo's)"
    )
    tokens, num_bytes = (partial(_at_least, least) for least in (LEAST_TOKENS, LEAST_BYTES))
    add_options(
        parser,
        ("--tokens", tokens, [100_000, 1_000_000], "N", "sizes of the tree at which to measure"),
        (
            "--project",
            not_negative,
            1_000_000_000,
            "N",
            "tokens whose memory is calculated from the largest tree; 0: none",
        ),
        ("--datastore-tokens", not_negative, 2_000_000, "N", "size of the datastore to build; 0: none"),
        ("--max-bytes", num_bytes, 2**24, "N", "bound on the tree that has to forget"),
    )
    add_tokenizer_argument(parser)
    add_output_arguments(parser)
    add_resume_arguments(parser)


def _at_least(least: int, text: str) -> int:
    value = not_negative(text)
    if value < least:
        raise argparse.ArgumentTypeError(f"must be at least {least}, got {value}")
    return value
