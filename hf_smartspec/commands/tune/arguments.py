"""Arguments of `smartspec tune`."""

import argparse
from pathlib import Path
from typing import NamedTuple

from ..common.arguments import (
    add_json_argument,
    add_recording_arguments,
    checked,
    not_negative_number,
    number,
    positive,
)


class Costs(NamedTuple):
    """Costs in units of a step without drafts."""

    node: float = 0.02  # of verifying a draft node
    drafter: float = 0.05  # further cost of drafting it with the draft model


_fraction = checked(number, lambda value: 0 < value < 1, "between 0 and 1")
TUNABLE = ("suffix", "datastore", "prompt_lookup", "sssd")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--sources", nargs="+", metavar="SPEC", default=["suffix"],
        help=f"NAME[:OPTION=VALUE,...], where NAME is one of {', '.join(TUNABLE)}; several are fused, options that are "
        "given stay (default: suffix)",
    )  # fmt: skip
    parser.add_argument("--output", type=Path, default=Path("tuned.json"), metavar="FILE", help="default: tuned.json")
    parser.add_argument("--limit", type=positive, default=200, metavar="N", help="requests per file (default: 200)")
    parser.add_argument(
        "--held-out", type=_fraction, default=0.3, metavar="PART",
        help="part of each file's requests, its last, that options are not chosen by (default: 0.3)",
    )  # fmt: skip
    parser.add_argument(
        "--node-cost", type=not_negative_number, default=Costs().node, metavar="C",
        help=f"cost of a draft node, as part of a step without drafts (default: {Costs().node})",
    )  # fmt: skip
    parser.add_argument("--nodes", type=positive, metavar="N", help="draft nodes per step, in place of tuning them")
    parser.add_argument(
        "--drafter", metavar="MODEL",
        help="a draft model, to tune the threshold up to which it drafts in place of the sources",
    )  # fmt: skip
    parser.add_argument(
        "--drafter-cost", type=not_negative_number, default=Costs().drafter, metavar="C",
        help=f"cost of each of its draft tokens, as part of a step (default: {Costs().drafter})",
    )  # fmt: skip
    add_recording_arguments(parser)
    add_json_argument(parser)
