"""Arguments of `python -m benchmarks timeline`."""

import argparse
from pathlib import Path

from hf_smartspec.commands.common.arguments import add_model_arguments, add_text_arguments, positive, positive_number
from hf_smartspec.commands.common.names import SOURCES, source_name
from hf_smartspec.commands.load.arguments import AUCTION, NONE, policy_name

from ...kit.arguments import add_options

BUSY, QUIET = 0.8, 0.2  # of what can be served without speculation


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_arguments(parser)
    add_text_arguments(parser)
    parser.set_defaults(limit=16, resume=False, seconds=None)
    parser.add_argument(
        "--rates", type=positive_number, nargs=2, metavar=("BUSY", "QUIET"),
        help=f"requests per second (default: {BUSY} and {QUIET} of what can be served without speculation)",
    )  # fmt: skip
    parser.add_argument(
        "--trace", type=Path, metavar="CSV",
        help="arrivals of a trace of Azure's or Mooncake's in place of phases: as many, in as much time",
    )  # fmt: skip
    learned = "or the folder of a learned drafter, not in virtual time"
    add_options(
        parser,
        ("--period", positive_number, 5.0, "S", "of a phase"),
        ("--phases", positive, 4, "N", "busy and quiet in turn"),
        ("--source", source_name, "auto", "SOURCE", f"{', '.join(SOURCES)}, {learned}"),
        ("--policies", policy_name, [NONE, "k=2", "k=4", AUCTION], "P", f"{NONE} is always measured"),
        ("--repeats", positive, 1, "N", "runs of every policy, in turns, with new arrivals; ratios are their medians"),
        ("--group", positive, 10, "N", "requests per point"),
    )
    parser.add_argument("--simulated", action="store_true", help="in virtual time, after a calibration in real time")
    parser.add_argument("--explain", action="store_true", help="also say where each policy's time went, and why")
