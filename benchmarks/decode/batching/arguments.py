"""Arguments of `python -m benchmarks batching`."""

import argparse

from hf_smartspec.commands.common.arguments import add_model_arguments, add_text_arguments, positive
from hf_smartspec.commands.common.names import SOURCES

from ...kit.arguments import add_options, add_resume_arguments


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_arguments(parser)
    add_text_arguments(parser)
    add_resume_arguments(parser)
    parser.set_defaults(limit=32, max_new_tokens=64)
    parser.add_argument(
        "--assistant", default="auto", choices=["none", *SOURCES], help="source of the engine (default: auto)"
    )
    parser.add_argument(
        "--serve", action="store_true",
        help='also measure `transformers serve --continuous-batching`, which needs pip install "transformers[serving]"',
    )  # fmt: skip
    add_options(
        parser,
        ("--repetitions", positive, 3, "N", "timed rounds"),
        ("--requests", positive, 64, "N", "to the server"),
        ("--clients", positive, 16, "N", "that ask at once"),
    )
