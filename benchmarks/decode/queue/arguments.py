"""Arguments of `python -m benchmarks queue`."""

import argparse

from hf_smartspec.commands.common.arguments import add_model_arguments, add_text_arguments, positive
from hf_smartspec.commands.common.names import SOURCES

from ...kit.arguments import add_options, add_resume_arguments


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_arguments(parser)
    add_text_arguments(parser)
    add_resume_arguments(parser)
    parser.set_defaults(limit=200, max_new_tokens=64)
    parser.add_argument(
        "--assistant", nargs="+", default=["none", "auto"], choices=["none", *SOURCES],
        help="sources of the engine (default: none auto)",
    )  # fmt: skip
    parser.add_argument(
        "--skip", nargs="+", default=[], choices=["static", "continuous"], help="leave out transformers' own"
    )
    add_options(parser, ("--repetitions", positive, 1, "N", "timed rounds"))
