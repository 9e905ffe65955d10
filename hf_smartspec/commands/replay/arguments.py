"""Arguments of `smartspec replay`."""

import argparse

from ..common.arguments import add_output_arguments, add_recording_arguments, positive

SOURCES = tuple(
    "prompt_lookup pld suffix suffix_decoding datastore hf_prompt_lookup fused tuned arctic pia rest sssd".split()
)

_DEFAULT_SOURCES = ["prompt_lookup", "hf_prompt_lookup"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--sources", nargs="+", metavar="SPEC",
        help=f"NAME[:OPTION=VALUE,...][@NODES,NODES,...], where NAME is one of {', '.join(SOURCES)}, or "
        f"MODULE:CLASS(OPTION=VALUE, ...); default: {' '.join(_DEFAULT_SOURCES)}",
    )  # fmt: skip
    parser.add_argument("--limit", type=positive, default=300, metavar="N", help="requests per file (default: 300)")
    parser.add_argument("--batch-size", type=positive, default=1, metavar="B", help="requests at once (default: 1)")
    parser.add_argument(
        "--max-nodes", type=positive, metavar="N", help="draft nodes per request and step (default: the source's own)"
    )
    add_recording_arguments(parser)
    parser.add_argument("--carry-over", action="store_true", help="sources keep what they learnt from file to file")
    parser.add_argument(
        "--against", metavar="NAME", help="also compare at equal numbers of drafted tokens with this one of the sources"
    )
    parser.add_argument(
        "--entropy", type=positive, nargs="?", const=100, metavar="N",
        help="print the empirical entropy of N responses (default: 100), by which suffix decoding can be judged; "
        "without --sources, print it alone",
    )  # fmt: skip
    add_output_arguments(parser)
