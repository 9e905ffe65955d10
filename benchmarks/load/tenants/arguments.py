"""Arguments of `python -m benchmarks tenants`."""

import argparse
from pathlib import Path

from hf_smartspec.commands.common.arguments import DTYPES, add_machine_arguments, positive, positive_number

from ...kit.arguments import add_options, add_session_arguments

ATTACKS = ("prompts", "streams")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--dtype", choices=DTYPES, default="float32",
        help="float32: the others' answers beside the attacker are those alone, and compared (default: float32)",
    )  # fmt: skip
    parser.add_argument(
        "--attack", nargs="+", choices=ATTACKS, default=list(ATTACKS),
        help="prompts: one request with 1,024 of them; streams: 20 with n=4 and log-probabilities (default: both)",
    )  # fmt: skip
    add_options(
        parser,
        ("--model", str, None, "MODEL", "folder or hub id (default: SmolLM2, if in the cache, else the demo's target)"),
        ("--prompts", Path, None, "FILE", ".jsonl, or lines of text, for the others (default: short ones)"),
        ("--assistant", str, "suffix", "SOURCE", "as in `serve`"),
        ("--tenants", positive, 5, "N", "one of which attacks; at least 2"),
        ("--requests", positive, 150, "N", "of every other tenant, one after the other, alone and beside the attacker; "
         "more than 100, so that one pause, which all tenants notice, is not their p99"),
        ("--max-new-tokens", positive, 4, "N", "of these requests"),
        ("--attack-tokens", positive, 2000, "N", "of each answer to the attacker"),
        ("--max-batch-size", positive, 32, "N", "of the server"),
        ("--max-requests-per-key", positive, None, "N", "of the server (default: its own)"),
        ("--most", positive_number, 3.0, "R", "exit with 1 if the others' p99 is more than R times that alone"),
    )  # fmt: skip
    add_machine_arguments(parser)
    add_session_arguments(parser)
