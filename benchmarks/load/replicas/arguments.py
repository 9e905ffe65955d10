"""Arguments of `python -m benchmarks replicas`."""

import argparse
from pathlib import Path

from hf_smartspec.commands.common.arguments import not_negative, positive, positive_list, positive_number

from ...kit.arguments import add_options, add_session_arguments, add_tokenizer_argument


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "files", nargs="*", type=Path, metavar="FILE",
        help=".jsonl or .jsonl.gz with prompts and responses (default: the demo's)",
    )  # fmt: skip
    parser.add_argument("--replicas", type=positive_list, default=[2, 4, 8], metavar="N,N", help="default: 2,4,8")
    add_options(
        parser,
        ("--requests", positive, 100, "N", "per replica"),
        ("--rate", positive_number, 4.0, "R", "requests per second and replica"),
        ("--tenants", positive, 16, "N", "each has a namespace and texts of one FILE"),
        ("--system", not_negative, 256, "N", "tokens with which all prompts of a tenant begin, made up"),
        ("--interval", positive_number, 5.0, "S", "seconds between exchanges of shared trees"),
        ("--max-new-tokens", positive, 128, "N", "of each request"),
        ("--seed", not_negative, 0, "N", "of arrivals and made-up tokens"),
    )
    add_tokenizer_argument(parser)
    add_session_arguments(parser)
