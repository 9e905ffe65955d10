"""Arguments of `python -m benchmarks queue`."""

import argparse

from hf_smartspec.commands.common.arguments import add_model_arguments, add_text_arguments, positive
from hf_smartspec.commands.common.names import SOURCES
from hf_smartspec.commands.load.arguments import AUCTION, NONE

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
    parser.add_argument(
        "--static", nargs="+", default=[], choices=SOURCES,
        help="sources of this library's `generate` on static batches, too (Su et al., section 5.3)",
    )  # fmt: skip
    parser.add_argument(
        "--lengths", nargs="+", type=length_name, default=["auction"], metavar="P",
        help="with --static, how much is drafted: none, k=NUMBER, table (which `smartspec profile --table` has "
        "measured), auction (default: auction)",
    )  # fmt: skip
    add_options(parser, ("--repetitions", positive, 1, "N", "timed rounds"))


def length_name(text: str) -> str:
    """Return how much is drafted on static batches from the command line."""
    if text in (NONE, "table", AUCTION) or (text.startswith("k=") and text[2:].isdecimal()):
        return text
    raise argparse.ArgumentTypeError(f"must be none, k=NUMBER, table or auction, got {text!r}")
