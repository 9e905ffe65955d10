"""Arguments of `smartspec datastore build`."""

import argparse
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "inputs",
        nargs="+",
        type=Path,
        metavar="FILE",
        help="texts: .jsonl (one JSON object a line) or plain text (one document a file), either of them also as .gz; "
        "or token ids: .npy (one axis, -1 between documents)",
    )
    parser.add_argument("--tokenizer", required=True, metavar="MODEL", help="the target's: a local folder or a hub id")
    parser.add_argument("--output", required=True, type=Path, metavar="FILE", help="the file to write or to replace")
    parser.add_argument(
        "--field",
        action="append",
        metavar="NAME",
        help="where the text is in a row of .jsonl; may be given several times (default: response)",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write what was built to this file")
