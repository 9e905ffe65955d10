"""Arguments of `python -m benchmarks tenants`."""

import argparse
from pathlib import Path

from hf_smartspec.commands.common.arguments import (
    DTYPES,
    add_machine_arguments,
    positive,
    positive_number,
)

from ...kit.arguments import add_session_arguments

ATTACKS = ("prompts", "streams")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model",
        metavar="MODEL",
        help="folder or hub id (default: SmolLM2, where it is in the cache, else the demo's target)",
    )
    parser.add_argument(
        "--prompts", type=Path, metavar="FILE", help=".jsonl, or lines of text, for the others (default: short ones)"
    )
    parser.add_argument("--assistant", default="suffix", metavar="SOURCE", help="as in `serve` (default: suffix)")
    parser.add_argument(
        "--dtype", choices=DTYPES, default="float32",
        help="float32: the others' answers beside the attacker are those alone, and compared (default: float32)",
    )  # fmt: skip
    add_machine_arguments(parser)
    parser.add_argument(
        "--tenants", type=positive, default=5, metavar="N", help="one of which attacks; at least 2 (default: 5)"
    )
    parser.add_argument(
        "--requests", type=positive, default=150, metavar="N",
        help="of every other tenant, one after the other, alone and again beside the attacker; more than 100, so that "
        "one pause, which all tenants notice, is not their p99 (default: 150)",
    )  # fmt: skip
    parser.add_argument("--max-new-tokens", type=positive, default=4, metavar="N", help="of these (default: 4)")
    parser.add_argument(
        "--attack", nargs="+", choices=ATTACKS, default=list(ATTACKS),
        help="prompts: one request with 1,024 of them; streams: 20 with n=4 and log-probabilities (default: both)",
    )  # fmt: skip
    parser.add_argument(
        "--attack-tokens", type=positive, default=2000, metavar="N", help="of each of its answers (default: 2000)"
    )
    parser.add_argument("--max-batch-size", type=positive, default=32, metavar="N", help="of the server (default: 32)")
    parser.add_argument("--max-requests-per-key", type=positive, metavar="N", help="of the server (default: its own)")
    parser.add_argument(
        "--most", type=positive_number, default=3.0, metavar="R",
        help="exit with 1 if the others' p99 is more than so many times that alone (default: 3)",
    )  # fmt: skip
    add_session_arguments(parser)
