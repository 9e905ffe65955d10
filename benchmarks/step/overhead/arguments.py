"""Arguments of `python -m benchmarks overhead`."""

import argparse
from pathlib import Path

from hf_smartspec.commands.common.arguments import DTYPES, add_device_argument, number, positive

from ...kit.arguments import add_session_arguments

PARTS = ("host", "forward", "step", "none")
QUANTIZED = "quantized"  # takes minutes, and is measured where it is asked for


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model", metavar="MODEL",
        help="folder, hub id or .gguf file (default: SmolLM2, where it is in the cache, else random weights; "
        "quantized: the demo's target)",
    )  # fmt: skip
    parser.add_argument("--dtype", default="bfloat16", choices=DTYPES, help="default: bfloat16")
    add_device_argument(parser)
    parser.add_argument("--threads", type=positive, default=2, metavar="N", help="CPU threads (default: 2)")
    parser.add_argument(
        "--batch-sizes", type=positive, nargs="+", default=[1, 4, 8], metavar="B", help="default: 1 4 8"
    )
    parser.add_argument(
        "--widths", type=positive, nargs="+", default=[1, 4], metavar="N", help="tokens per row (default: 1 4)"
    )
    parser.add_argument(
        "--repeats", type=positive, metavar="N", help="measurements per setting (default: 7; 3 of what is quantized)"
    )
    parser.add_argument(
        "--layers", type=positive, metavar="N", help="random weights of N layers; 15 make 205 M parameters"
    )
    parser.add_argument(
        "--parts",
        nargs="+",
        default=PARTS,
        choices=(*PARTS, QUANTIZED),
        help="host: the host time of steps without a forward; forward: packed against plain forwards; step: the share "
        "of steps outside the forwards; none: decoding without speculation (default: all these); quantized: the "
        "embedded target, cost-matched, in --dtype and in int8",
    )
    parser.add_argument(
        "--parameters", type=number, nargs="+", default=[205e6, 1e9], metavar="N",
        help="of the targets that are quantized (default: 205e6 1e9)",
    )  # fmt: skip
    parser.add_argument("--prompts", type=Path, metavar="FILE", help="which these decode (default: the demo's)")
    parser.add_argument("--num-prompts", type=positive, default=2, metavar="N", help="of these (default: 2)")
    parser.add_argument(
        "--max-new-tokens", type=positive, default=32, metavar="N", help="for each of these (default: 32)"
    )
    parser.add_argument(
        "--host-steps", type=positive, default=100, metavar="N", help="measured steps without a forward (default: 100)"
    )
    add_session_arguments(parser)
