"""Arguments of `smartspec chat`."""

import argparse
from pathlib import Path

from ..common.answering.arguments import add_model_arguments, add_sampling_arguments, add_text_arguments

_MAX_NEW_TOKENS = 512


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_text_arguments(parser)
    add_model_arguments(parser)
    add_sampling_arguments(parser, _MAX_NEW_TOKENS)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the conversation to this file when it ends")
