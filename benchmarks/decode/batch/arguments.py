"""Arguments of `python -m benchmarks batch`."""

import argparse

from hf_smartspec.commands.common.arguments import add_model_arguments, not_negative, positive
from hf_smartspec.commands.common.names import SOURCES, source_name

from ...kit.arguments import add_resume_arguments


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_arguments(parser)
    add_resume_arguments(parser)
    parser.set_defaults(replay=False, remember=0, limit=16, max_new_tokens=24)
    parser.add_argument(
        "--batch-sizes", type=positive, nargs="+", default=[1, 2, 4, 8], metavar="B",
        help="default: 1 2 4 8",
    )  # fmt: skip
    parser.add_argument(
        "--lengths", type=not_negative, nargs="+", default=[0, 1, 2, 4, 8], metavar="K", help="default: 0 1 2 4 8"
    )
    parser.add_argument(
        "--sources", type=source_name, nargs="+", default=["draft"], metavar="SOURCE",
        help=f"{', '.join(SOURCES)}, or folders of learned drafters (default: draft)",
    )  # fmt: skip
    parser.add_argument("--repeats", type=positive, default=1, metavar="N", help="runs of every cell (default: 1)")
