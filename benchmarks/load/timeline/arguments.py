"""Arguments of `python -m benchmarks timeline`."""

import argparse

from hf_smartspec.commands.common.arguments import add_model_arguments, add_text_arguments, positive, positive_number
from hf_smartspec.commands.common.names import SOURCES, source_name
from hf_smartspec.commands.load.arguments import AUCTION, NONE, policy_name

_POLICIES = (NONE, "k=2", "k=4", AUCTION)
BUSY, QUIET = 0.8, 0.2  # of what can be served without speculation


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_arguments(parser)
    add_text_arguments(parser)
    parser.set_defaults(limit=16, resume=False, seconds=None)
    parser.add_argument(
        "--rates", type=positive_number, nargs=2, metavar=("BUSY", "QUIET"),
        help=f"requests per second (default: {BUSY} and {QUIET} of what can be served without speculation)",
    )  # fmt: skip
    parser.add_argument("--period", type=positive_number, default=5.0, metavar="S", help="of a phase (default: 5)")
    parser.add_argument("--phases", type=positive, default=4, metavar="N", help="busy and quiet in turn (default: 4)")
    parser.add_argument(
        "--source", type=source_name, default="auto", metavar="SOURCE",
        help=f"{', '.join(SOURCES)}, or the folder of a learned drafter, not in virtual time (default: auto)",
    )  # fmt: skip
    parser.add_argument(
        "--policies", type=policy_name, nargs="+", default=list(_POLICIES), metavar="P",
        help=f"{NONE} is always measured (default: {' '.join(_POLICIES)})",
    )  # fmt: skip
    parser.add_argument(
        "--repeats", type=positive, default=1, metavar="N",
        help="runs of every policy, in turns, with new arrivals; ratios are medians over them (default: 1)",
    )  # fmt: skip
    parser.add_argument("--group", type=positive, default=10, metavar="N", help="requests per point (default: 10)")
    parser.add_argument("--simulated", action="store_true", help="in virtual time, after a calibration in real time")
    parser.add_argument("--explain", action="store_true", help="also say where each policy's time went, and why")
