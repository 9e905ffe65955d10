"""Arguments of `python -m benchmarks drafters`."""

import argparse
from pathlib import Path

from hf_smartspec.commands.common.arguments import add_target_arguments, positive

from ...kit.arguments import add_session_arguments

STEPS, TREES, SPEED = PARTS = ("steps", "trees", "speed")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "files", nargs="*", type=Path, metavar="FILE",
        help="prompts, .jsonl or .jsonl.gz; one is one kind of text (default: the demo's, which neither target nor "
        "draft has learnt from, by category)",
    )  # fmt: skip
    parser.add_argument("--kinds", nargs="+", metavar="KIND", help="of texts (default: all)")
    add_target_arguments(parser)
    parser.add_argument(
        "--drafters", nargs="+", metavar="MODEL_OR_PRESET",
        help="folders, hub ids or presets, lists joined by plus signs (suffix+FOLDER); default: suffix trees, what was "
        "trained for the demo's target, and lists of both",
    )  # fmt: skip
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="default: all")
    parser.add_argument(
        "--nodes", type=positive, nargs="+", default=[4, 8, 16], metavar="N",
        help="of a draft in the first part, and the most of them in the second (default: 4 8 16)",
    )  # fmt: skip
    parser.add_argument(
        "--width", type=positive, default=4, metavar="W", help="of draft models' trees in the first part (default: 4)"
    )
    parser.add_argument("--batch-size", type=positive, nargs="+", default=[1, 8], metavar="B", help="default: 1 8")
    parser.add_argument("--limit", type=positive, default=6, metavar="N", help="prompts of each kind (default: 6)")
    parser.add_argument("--max-new-tokens", type=positive, default=96, metavar="N", help="default: 96")
    parser.add_argument("--max-prompt", type=positive, default=400, metavar="N", help="its last tokens (default: 400)")
    parser.add_argument("--repetitions", type=positive, default=1, metavar="N", help="timed rounds (default: 1)")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="also write the tables for a page")
    add_session_arguments(parser)
