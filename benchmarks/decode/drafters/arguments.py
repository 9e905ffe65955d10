"""Arguments of `python -m benchmarks drafters`."""

import argparse
from pathlib import Path

from hf_smartspec.commands.common.arguments import add_target_arguments, positive

from ...kit.arguments import add_options, add_session_arguments

STEPS, TREES, BLOCKS, SPEED = PARTS = ("steps", "trees", "blocks", "speed")


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
        help="folders, hub ids or presets, lists joined by plus signs (suffix+FOLDER); default: suffix trees, the "
        "drafters trained for the demo's target, and lists of both",
    )  # fmt: skip
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="default: all")
    add_options(
        parser,
        (
            "--nodes",
            positive,
            [4, 8, 16],
            "N",
            "of a draft in part steps, and the most of them in parts trees and blocks",
        ),
        ("--width", positive, 4, "W", "of draft models' trees in part steps"),
        ("--levels", positive, [1, 2, 3, 4], "N", "of drafts that grow level by level, beside blocks"),
        ("--batch-size", positive, [1, 8], "B", "rows"),
        ("--limit", positive, 6, "N", "prompts of each kind"),
        ("--max-new-tokens", positive, 96, "N", "of each prompt"),
        ("--max-prompt", positive, 400, "N", "tokens of a prompt, its end"),
        ("--repetitions", positive, 1, "N", "timed rounds"),
        ("--markdown", Path, None, "FILE", "also write the tables for a page"),
    )
    add_session_arguments(parser)
