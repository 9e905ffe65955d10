"""Arguments of `python -m benchmarks batching`."""

import argparse

from hf_smartspec.commands.common.arguments import add_model_arguments, add_text_arguments, positive
from hf_smartspec.commands.common.names import SOURCES

from ...kit.arguments import add_resume_arguments


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_arguments(parser)
    add_text_arguments(parser)
    add_resume_arguments(parser)
    parser.set_defaults(limit=32, max_new_tokens=64)
    parser.add_argument(
        "--assistant", default="auto", choices=["none", *SOURCES], help="what drafts in the engine (default: auto)"
    )
    parser.add_argument("--repetitions", type=positive, default=3, metavar="N", help="timed rounds (default: 3)")
    parser.add_argument(
        "--serve", action="store_true",
        help='also measure `transformers serve --continuous-batching`, which needs pip install "transformers[serving]"',
    )  # fmt: skip
    parser.add_argument("--requests", type=positive, default=64, metavar="N", help="to the server (default: 64)")
    parser.add_argument("--clients", type=positive, default=16, metavar="N", help="that ask at once (default: 16)")
