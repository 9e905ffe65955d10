"""Arguments of `python -m benchmarks online`."""

import argparse
from pathlib import Path

from hf_smartspec.commands.common.arguments import add_target_arguments, positive, positive_number

from ...kit.arguments import add_session_arguments

SPEED, LIVE, LOAD = LIVE_PARTS = ("speed", "live", "load")
TABLE, ONLINE, SHIFT, SEVERAL = PARTS = ("table", "online", "shift", "several")
RANDOM = ("draft", "medusa", "eagle3")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(needs_files=True)
    parser.add_argument(
        "files", nargs="*", metavar="FILE[:FIELD]",
        help="prompts, .jsonl or .jsonl.gz; one is one task. With a FIELD, such as language, each of its values is one",
    )  # fmt: skip
    add_target_arguments(parser)
    parser.add_argument("--draft", metavar="MODEL", help="the drafter that learns (default: the demo's draft model)")
    parser.add_argument(
        "--base", type=Path, metavar="FILE",
        help="begin with random weights instead, which are first distilled on answers to these prompts, other than the "
        "tasks'",
    )  # fmt: skip
    parser.add_argument(
        "--parts", nargs="+", choices=[*PARTS, *LIVE_PARTS], default=list(PARTS), help="default: all replayed ones"
    )
    parser.add_argument("--requests", type=positive, default=500, metavar="N", help="of each task (default: 500)")
    parser.add_argument("--test", type=positive, default=50, metavar="N", help="further ones, held out (default: 50)")
    parser.add_argument(
        "--interval", type=positive, default=8, metavar="I", help="requests up to an update (default: 8)"
    )
    parser.add_argument("--learning-rate", type=positive_number, default=1e-3, metavar="RATE", help="default: 1e-3")
    parser.add_argument("--max-new-tokens", type=positive, default=48, metavar="N", help="default: 48")
    parser.add_argument("--max-prompt", type=positive, default=256, metavar="N", help="its last tokens (default: 256)")
    parser.add_argument(
        "--random", choices=RANDOM, default="draft", help="what begins at random in part 'live' (default: draft)"
    )
    parser.add_argument("--live-seconds", type=positive, default=600, metavar="S", help="of part 'live' (default: 600)")
    parser.add_argument("--load-requests", type=positive, default=64, metavar="N", help="of part 'load' (default: 64)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="default: 0")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="also write the tables for a page")
    parser.add_argument("--plots", type=Path, metavar="FOLDER", help="also draw the figures into this folder")
    add_session_arguments(parser)
