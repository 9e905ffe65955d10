"""Arguments of `smartspec bench generate`."""

import argparse
from pathlib import Path

from ..common.arguments import add_output_arguments, add_target_arguments, add_text_arguments, positive


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "files", nargs="*", type=Path, metavar="FILE",
        help="prompts, with --replay responses too, .jsonl or .jsonl.gz; one is one data set (default: the demo's)",
    )  # fmt: skip
    add_target_arguments(parser)
    parser.add_argument("--batch-size", type=positive, nargs="+", default=[1, 4], metavar="B", help="default: 1 4")
    parser.add_argument("--limit", type=positive, default=4, metavar="N", help="requests per data set (default: 4)")
    parser.add_argument("--max-new-tokens", type=positive, default=48, metavar="N", help="default: 48")
    parser.add_argument(
        "--max-prompt", type=positive, default=1024, metavar="N", help="tokens of a prompt, its end (default: 1024)"
    )
    parser.add_argument(
        "--assistant", nargs="+", metavar="MODEL_OR_PRESET",
        help="values of `assistant=`, lists joined by plus signs (suffix+MODEL); a single draft model, but no learned "
        "drafter, is measured as transformers' `assistant_model=`, too (default: auto, prompt_lookup, and the demo's "
        "draft for the demo's target)",
    )  # fmt: skip
    add_text_arguments(parser)
    parser.add_argument("--repetitions", type=positive, default=1, metavar="N", help="timed rounds (default: 1)")
    add_output_arguments(parser)
