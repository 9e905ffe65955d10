"""Arguments of `python -m benchmarks online`."""

import argparse
from pathlib import Path

from hf_smartspec.commands.common.arguments import add_target_arguments, positive, positive_number

from ...kit.arguments import add_options, add_session_arguments

SPEED, LIVE, LOAD = LIVE_PARTS = ("speed", "live", "load")
TABLE, ONLINE, SHIFT, MIX, SEVERAL, COSTS = PARTS = ("table", "online", "shift", "mix", "several", "costs")
RANDOM = ("draft", "medusa", "eagle3")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(needs_files=True)
    parser.add_argument(
        "files", nargs="*", metavar="FILE[:FIELD]",
        help="prompts or conversations, .jsonl or .jsonl.gz; one is one task. With a FIELD, such as language, each of "
        "its values is one",
    )  # fmt: skip
    add_target_arguments(parser)
    parser.add_argument(
        "--parts", nargs="+", choices=[*PARTS, *LIVE_PARTS], default=list(PARTS), help="default: all replayed ones"
    )
    parser.add_argument(
        "--random", choices=RANDOM, default="draft", help="drafter of random weights in part live (default: draft)"
    )
    parser.add_argument(
        "--preset", choices=["published"], help="learn as in the paper's algorithm 1 (default: as here by default)"
    )
    parser.add_argument(
        "--sampled", action="store_true", help="the target samples its answers, at temperature 1 (default: greedy ones)"
    )
    add_options(
        parser,
        ("--draft", str, None, "MODEL", "what learns, a draft model or heads (default: the demo's draft model)"),
        ("--base", Path, None, "FILE", "begin with random weights instead, which are first distilled on answers to "
         "these prompts, other than the tasks'"),
        ("--requests", positive, 500, "N", "of each task"),
        ("--test", positive, 50, "N", "further ones, held out"),
        ("--interval", positive, 8, "I", "requests up to an update"),
        ("--nodes", positive, 5, "K", "proposals of a step, by which the paper's acceptance is measured"),
        ("--learning-rate", positive_number, 1e-3, "RATE", "of the drafter"),
        ("--max-new-tokens", positive, 48, "N", "of each request"),
        ("--max-prompt", positive, 256, "N", "tokens of a prompt, its end"),
        ("--live-seconds", positive, 600, "S", "of part live"),
        ("--load-requests", positive, 64, "N", "of part load"),
        ("--seed", int, 0, "N", "of orders and random weights"),
        ("--markdown", Path, None, "FILE", "also write the tables for a page"),
        ("--plots", Path, None, "FOLDER", "also draw the figures into this folder"),
    )  # fmt: skip
    add_session_arguments(parser)
