"""Arguments of `python -m benchmarks replicas`."""

import argparse
from pathlib import Path

from hf_smartspec.commands.common.arguments import (
    not_negative,
    positive,
    positive_list,
    positive_number,
)

from ...kit.arguments import add_session_arguments, add_tokenizer_argument


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "files", nargs="*", type=Path, metavar="FILE",
        help=".jsonl or .jsonl.gz with prompts and responses (default: the demo's)",
    )  # fmt: skip
    parser.add_argument("--replicas", type=positive_list, default=[2, 4, 8], metavar="N,N", help="default: 2,4,8")
    parser.add_argument("--requests", type=positive, default=100, metavar="N", help="per replica (default: 100)")
    parser.add_argument(
        "--rate", type=positive_number, default=4.0, metavar="R", help="requests per second and replica (default: 4)"
    )
    parser.add_argument(
        "--tenants", type=positive, default=16, metavar="N",
        help="each has a namespace and texts of one FILE (default: 16)",
    )  # fmt: skip
    parser.add_argument(
        "--system", type=not_negative, default=256, metavar="N",
        help="tokens that all prompts of a tenant begin with, made up (default: 256)",
    )  # fmt: skip
    parser.add_argument(
        "--interval", type=positive_number, default=5.0, metavar="S",
        help="seconds between exchanges of shared trees (default: 5)",
    )  # fmt: skip
    parser.add_argument("--max-new-tokens", type=positive, default=128, metavar="N", help="default: 128")
    add_tokenizer_argument(parser)
    parser.add_argument("--seed", type=not_negative, default=0, metavar="N", help="default: 0")
    add_session_arguments(parser)
