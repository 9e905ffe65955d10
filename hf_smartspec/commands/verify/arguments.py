"""Arguments of `smartspec verify`."""

import argparse
from pathlib import Path

from ..common.arguments import DTYPES, QUANTIZATIONS, add_machine_arguments, not_negative, positive, positive_list


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="target model: a local folder or a hub id")
    parser.add_argument(
        "--assistant",
        default="auto",
        metavar="NAME",
        help="what drafts, as in `assistant=`: a preset, the folder or hub id of a draft model or of heads, or some of "
        "these joined by plus signs (default: auto)",
    )
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="default: float32, where equality is exact")
    parser.add_argument("--quantize", choices=QUANTIZATIONS, help="run the target's linear maps in it, on the CPU")
    parser.add_argument(
        "--against",
        choices=("plain", "alone"),
        default="plain",
        help="compare tokens with those of plain generate, in half precision also with the next; or alone: with those "
        "that this library decodes of each prompt alone and without drafts, which takes less time (default: plain)",
    )
    parser.add_argument("--num-prompts", type=positive, default=8, metavar="N", help="default: 8")
    parser.add_argument("--max-new-tokens", type=positive, default=32, metavar="N", help="default: 32")
    parser.add_argument(
        "--prompts", type=Path, metavar="FILE", help='.jsonl with "prompt" in every row, or .txt with one per line'
    )
    parser.add_argument(
        "--batch-sizes", type=positive_list, default=[1, 2, 5], metavar="B,B,...", help="default: 1,2,5"
    )
    parser.add_argument(
        "--samples", type=not_negative, default=1000, metavar="N",
        help="samples whose frequencies are compared with exact probabilities; 0: none (default: 1000)",
    )  # fmt: skip
    parser.add_argument("--seed", type=not_negative, default=0, metavar="N", help="of sampling (default: 0)")
    add_machine_arguments(parser)
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write everything that was found to this file")
