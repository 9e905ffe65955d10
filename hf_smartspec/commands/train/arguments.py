"""Arguments of `smartspec train`."""

import argparse
from pathlib import Path

from ..common.arguments import not_negative, positive, positive_number

KINDS = ("medusa", "eagle3", "draft", "dflash", "dspark")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="the target: folder or hub id")
    parser.add_argument(
        "files", nargs="+", type=Path, metavar="FILE", help=".jsonl or .jsonl.gz: prompts and responses"
    )
    parser.add_argument("--kind", choices=KINDS, default="medusa", help="of drafter (default: %(default)s)")
    parser.add_argument("--output", type=Path, required=True, metavar="FOLDER", help="of drafter and checkpoints")
    parser.add_argument(
        "--own-outputs", type=positive, metavar="N",
        help="learn from the target's own greedy answers of up to N tokens, in place of the responses",
    )  # fmt: skip
    parser.add_argument(
        "--answers", type=Path, metavar="FILE",
        help="file of the target's answers, read if it exists, else written (default: among the checkpoints)",
    )  # fmt: skip
    parser.add_argument("--limit", type=positive, metavar="N", help="requests per file (default: all)")
    parser.add_argument(
        "--num-heads", type=positive, default=4, metavar="K",
        help="of Medusa; for EAGLE-3, the tokens that it learns to draft one after another (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--num-layers", type=positive, metavar="N",
        help="of each Medusa head, or of DFlash and DSpark; for a draft model, the target's layers that it begins as "
        "(default: 1; 5 of DFlash and DSpark)",
    )  # fmt: skip
    parser.add_argument(
        "--block-size", type=positive, default=8, metavar="N", help="slots of DFlash and DSpark (default: %(default)s)"
    )
    parser.add_argument(
        "--num-blocks", type=positive, default=32, metavar="N",
        help="of DFlash and DSpark: blocks of each text in an update, at random places (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument("--markov-head", choices=["vanilla", "gated", "rnn"], help="of DSpark (default: vanilla)")
    parser.add_argument("--draft", metavar="MODEL", help="folder or hub id that the drafter begins as; not of Medusa")
    parser.add_argument(
        "--draft-vocab-size", type=positive, metavar="N",
        help="EAGLE-3, DFlash and DSpark draft the N most frequent tokens (default: all)",
    )  # fmt: skip
    parser.add_argument(
        "--neurons", type=positive, metavar="N", help="of the MLP of EAGLE-3, DFlash and DSpark (default: the target's)"
    )
    length = parser.add_mutually_exclusive_group()
    length.add_argument(
        "--epochs", type=positive_number, default=3.0, metavar="N", help="passes over the texts (default: %(default)s)"
    )
    length.add_argument("--steps", type=positive, metavar="N", help="updates, in place of epochs")
    length.add_argument(
        "--minutes", type=positive_number, metavar="N",
        help="time of training, in place of epochs; that before an interrupt counts",
    )  # fmt: skip
    parser.add_argument("--batch-size", type=positive, default=8, metavar="N", help="texts (default: %(default)s)")
    parser.add_argument("--max-length", type=positive, default=512, metavar="N", help="tokens (default: %(default)s)")
    parser.add_argument("--learning-rate", type=positive_number, default=1e-3, metavar="R", help="default: %(default)s")
    parser.add_argument("--seed", type=not_negative, default=0, metavar="N", help="default: %(default)s")
    parser.add_argument(
        "--dtype",
        choices=["float32", "bfloat16"],
        default="float32",
        help="of target and drafter (default: %(default)s)",
    )
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="default: %(default)s")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures to this file")
    parser.add_argument(
        "--resume",
        action="store_true",
        help="go on from the newest complete checkpoint (one is written about every minute, and at Ctrl-C)",
    )
