"""Arguments of `smartspec profile`."""

import argparse
from pathlib import Path

from ..common.arguments import (
    add_dtype_argument,
    add_json_argument,
    add_machine_arguments,
    number,
    positive,
    positive_number,
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="folder or hub id")
    add_dtype_argument(parser)
    add_machine_arguments(parser)
    parser.add_argument(
        "--parameters", type=number, metavar="N", help="enlarge the model to N parameters, such as 200e6, beforehand"
    )
    parser.add_argument("--refresh", action="store_true", help="measure anew, in place of an earlier profile")
    parser.add_argument("--show", type=Path, metavar="FILE", help="draw predicted against measured, into a .png file")
    parser.add_argument(
        "--table", type=Path, metavar="PROMPTS",
        help='also measure the best draft length for each batch size (Su et al., section 4) with these prompts (.jsonl '
        'with "prompt" in every row, or .txt with one per line), and keep it for `policy="table"`',
    )  # fmt: skip
    parser.add_argument(
        "--assistant", default="prompt_lookup", metavar="NAME",
        help="with --table, what drafts: a preset, the folder or hub id of a draft model or of heads, or some of these "
        "joined by plus signs (default: prompt_lookup)",
    )  # fmt: skip
    for name, default, text in (
        ("--max-batch-size", 32, "the largest batch; powers of two up to it are measured"),
        ("--max-length", 8, "the longest draft, in tokens"),
        ("--long-draft", 80, "tokens of the draft by which l(s) is estimated (Eq. 4)"),
        ("--max-new-tokens", 64, "tokens of every request"),
    ):
        parser.add_argument(
            name, type=positive, default=default, metavar="N", help=f"with --table, {text} (default: {default})"
        )
    parser.add_argument(
        "--operators", type=_speeds, metavar="FLOPS,BANDWIDTH",
        help="only print operations and memory traffic by operator (SSSD, table 1 and figure 3), and their times on a "
        "device of so many operations and bytes per second, such as 280e12,0.8e12; only the model's config is read",
    )  # fmt: skip
    for option, values, text in (
        ("--lengths", [1, 8, 16, 32, 54, 64, 96, 128], "tokens a row in the forward"),
        ("--contexts", [1024, 10_000], "tokens in a row's context"),
    ):
        shown = " ".join(map(str, values))
        parser.add_argument(
            option, type=positive, nargs="+", default=values, metavar="N",
            help=f"with --operators, {text} (default: {shown})",
        )  # fmt: skip
    parser.add_argument(
        "--batch-size", type=positive, default=8, metavar="N", help="with --operators, rows (default: 8)"
    )
    add_json_argument(parser)


def _speeds(text: str) -> tuple[float, float]:
    flops, _, bandwidth = text.partition(",")
    return positive_number(flops), positive_number(bandwidth)
