"""Arguments of `smartspec generate`."""

import argparse
from pathlib import Path

from ..common.answering.arguments import add_model_arguments, add_sampling_arguments, add_text_arguments
from ..common.arguments import not_empty, positive
from ..common.ray_cluster import add_cluster_arguments
from .rows import Shard

_MAX_NEW_TOKENS, _MAX_BATCH_SIZE = 256, 16


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "prompts", nargs="*", metavar="PROMPT", help="a text to answer, - for standard input (default: that, if piped)"
    )
    parser.add_argument(
        "--file", action="append", default=[], type=Path, metavar="FILE",
        help='a text file with one prompt, or .jsonl with a "prompt" in each row; may be given several times',
    )  # fmt: skip
    add_text_arguments(parser).add_argument(
        "--raw", action="store_true", help="continue the text as it is, without the chat template"
    )
    add_model_arguments(parser)
    add_sampling_arguments(parser, _MAX_NEW_TOKENS).add_argument(
        "--stop",
        action="append",
        default=[],
        type=not_empty,
        metavar="TEXT",
        help="ends an answer; may be given several times",
    )
    _add_dataset_arguments(parser)
    group = parser.add_argument_group("work and results")
    group.add_argument(
        "--max-batch-size", type=positive, default=_MAX_BATCH_SIZE, metavar="N",
        help="prompts that are answered at once (default: %(default)s)",
    )  # fmt: skip
    group.add_argument("--stats", action="store_true", help="print statistics of speculation on standard error")
    group.add_argument(
        "--compare", action="store_true", help="answer once more without speculation, and print both times"
    )
    group.add_argument(
        "--json", type=Path, metavar="FILE", help="also write the answers to this file; -: to standard output instead"
    )


def _add_dataset_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "datasets", "in place of PROMPT; a command that was interrupted goes on when it is called again"
    )
    group.add_argument("--dataset", metavar="DATASET", help=".jsonl, .csv, .parquet or .txt, a folder, or a hub id")
    group.add_argument("--config", metavar="NAME", help="of a dataset of the hub that has several")
    group.add_argument("--split", metavar="NAME", default="train", help="such as train or test[:100] (default: train)")
    group.add_argument(
        "--column", metavar="NAME", default="prompt",
        help="of texts or chats; chats are lists of messages, whose last answer is left out (default: prompt)",
    )  # fmt: skip
    group.add_argument("--output", type=Path, metavar="FILE", help=".jsonl; one line for every row, in their order")
    group.add_argument("--keep", action="append", metavar="NAME", help="a column that is written too (default: COLUMN)")
    group.add_argument("--response", metavar="NAME", default="response", help="under which answers are written")
    group.add_argument("--limit", type=positive, metavar="N", help="the first N rows only")
    group.add_argument(
        "--shard", type=Shard.of, metavar="I/N",
        help="part I of N, from 0, into FILE-0000I-of-0000N (default: a part for each process of accelerate launch)",
    )  # fmt: skip
    add_cluster_arguments(group, "answer with N engines, on Ray Data")
    group.add_argument("--overwrite", action="store_true", help="replace an earlier output")
