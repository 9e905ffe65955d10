"""Arguments of `smartspec profile`."""

import argparse
from pathlib import Path

from ..common.arguments import add_dtype_argument, add_json_argument, add_machine_arguments, number


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="folder or hub id")
    add_dtype_argument(parser)
    add_machine_arguments(parser)
    parser.add_argument(
        "--parameters", type=number, metavar="N", help="enlarge the model to N parameters, such as 200e6, beforehand"
    )
    parser.add_argument("--refresh", action="store_true", help="measure anew, in place of an earlier profile")
    parser.add_argument("--show", type=Path, metavar="FILE", help="draw predicted against measured, into a .png file")
    add_json_argument(parser)
