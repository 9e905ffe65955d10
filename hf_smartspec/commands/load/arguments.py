"""Arguments of `smartspec bench load`."""

import argparse
from pathlib import Path

from ..common.arguments import add_model_arguments, add_text_arguments, positive, positive_number
from ..common.names import SOURCES, source_name

NONE, AUCTION, ORACLE = "none", "auction", "oracle"
NAMES = (NONE, "k=NUMBER", "table", "random", "step", "request", "tree", "confidence", "roofline", AUCTION, ORACLE)
_POLICIES = (NONE, "k=3", AUCTION)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_arguments(parser)
    add_text_arguments(parser)
    parser.set_defaults(limit=16)
    parser.add_argument(
        "--rates", type=positive_number, nargs="+", metavar="R",
        help="requests per second (default: by --shares)",
    )  # fmt: skip
    parser.add_argument(
        "--shares", type=positive_number, nargs="+", metavar="S",
        help="rates in place of --rates, as shares of what can be served without speculation (default: 0.3 0.8)",
    )  # fmt: skip
    parser.add_argument(
        "--sources", type=source_name, nargs="+", default=["auto"], metavar="SOURCE",
        help=f"{', '.join(SOURCES)}, or the folder of a learned drafter, also as suffix+FOLDER, not in virtual time. "
        "auto: as `assistant='auto'`; hybrid: suffix trees and the draft model as a list; wrong: drafts that are never "
        "accepted, with high probabilities (default: auto)",
    )  # fmt: skip
    parser.add_argument(
        "--policies", type=policy_name, nargs="+", default=list(_POLICIES), metavar="P",
        help=f"{', '.join(NAMES)}; oracle, with --virtual, foresees acceptance: an upper bound for all sources but "
        f"hybrid (default: {' '.join(_POLICIES)}); {NONE} is always measured",
    )  # fmt: skip
    parser.add_argument(
        "--seconds", type=positive_number, default=10.0, metavar="S", help="of arrivals, per run (default: 10)"
    )
    parser.add_argument(
        "--repeats", type=positive, default=1, metavar="N",
        help="runs of every row; ratios are medians over them, each run against its neighbour (default: 1)",
    )  # fmt: skip
    parser.add_argument(
        "--simulated",
        action="store_true",
        help="also simulate the same loads in virtual time, on a machine as fast as in short rehearsals with other "
        "arrivals right before and after each",
    )
    parser.add_argument(
        "--virtual", action="store_true",
        help="everything in virtual time, on the simulated engine, with recorded responses; only the cost of steps is "
        "measured before",
    )  # fmt: skip
    parser.add_argument(
        "--profile", type=Path, metavar="FILE",
        help="with --virtual: a file of the costs of steps; sources that it lacks are measured and added",
    )  # fmt: skip
    parser.add_argument("--explain", action="store_true", help="also show where each policy's time went, and why")


def policy_name(text: str) -> str:
    """Return the name of a policy of `Policies` from the command line."""
    if (text in NAMES and text != "k=NUMBER") or (text.startswith("k=") and text[2:].isdecimal()):
        return text
    raise argparse.ArgumentTypeError(f"must be one of {', '.join(NAMES)}, got {text!r}")
