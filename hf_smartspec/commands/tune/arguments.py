"""Arguments of `smartspec tune`."""

import argparse
import math
from pathlib import Path
from typing import NamedTuple

from ..common.arguments import TURNS, add_json_argument, number, positive


class Costs(NamedTuple):
    """Costs in units of a step without drafts."""

    node: float = 0.02  # of verifying a draft node
    drafter: float = 0.05  # further cost of drafting it with the draft model


TUNABLE = ("suffix", "datastore", "prompt_lookup")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help=".jsonl or .jsonl.gz; one is one data set")
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
        "--node-cost", type=_cost, default=Costs().node, metavar="C",
        help=f"cost of a draft node, as part of a step without drafts (default: {Costs().node})",
    )  # fmt: skip
    parser.add_argument("--nodes", type=positive, metavar="N", help="draft nodes per step, in place of tuning them")
    parser.add_argument(
        "--drafter", metavar="MODEL",
        help="a draft model, to tune the threshold up to which it drafts in place of the sources",
    )  # fmt: skip
    parser.add_argument(
        "--drafter-cost", type=_cost, default=Costs().drafter, metavar="C",
        help=f"cost of each of its draft tokens, as part of a step (default: {Costs().drafter})",
    )  # fmt: skip
    parser.add_argument("--prompt-field", default="prompt", metavar="NAME", help="default: prompt")
    parser.add_argument("--response-field", default="response", metavar="NAME", help="default: response")
    parser.add_argument("--turns", choices=TURNS, default="all", help="as of `smartspec replay` (default: all)")
    parser.add_argument(
        "--max-prompt", type=positive, default=2048, metavar="N", help="tokens of a prompt, its end (default: 2048)"
    )
    parser.add_argument("--tokenizer", metavar="NAME", help="folder or hub id (default: the demo's)")
    add_json_argument(parser)


def _fraction(text: str) -> float:
    value = number(text)
    if not 0 < value < 1:
        raise argparse.ArgumentTypeError(f"must lie between 0 and 1, got {text}")
    return value


def _cost(text: str) -> float:
    value = number(text)
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"must be a number of at least 0, got {text}")
    return value
