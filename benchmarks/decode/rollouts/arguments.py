"""Arguments of `python -m benchmarks rollouts`."""

import argparse
from pathlib import Path

from hf_smartspec.commands.common.arguments import add_target_arguments, not_negative, positive, positive_number

from ...kit.arguments import add_options, add_session_arguments


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "files", nargs="*", type=Path, metavar="FILE",
        help=".jsonl with problems of arithmetic under \"prompt\" (default: the demo's, which the target has not "
        "learnt from)",
    )  # fmt: skip
    add_target_arguments(parser)
    parser.add_argument(
        "--assistants", nargs="+", metavar="MODEL_OR_PRESET",
        help="folders, hub ids or presets, lists joined by plus signs (suffix+FOLDER); after online:, draft models are "
        "distilled as the policy moves (default: suffix trees, the demo's draft, both, both online)",
    )  # fmt: skip
    add_options(
        parser,
        ("--num-prompts", positive, 3, "N", "of each epoch"),
        ("--prompts-per-step", positive, 1, "N", "of the trainer"),
        ("--generations", positive, 4, "N", "of each prompt, 2 or more"),
        ("--epochs", positive, 2, "N", "of the training"),
        ("--max-new-tokens", positive, 64, "N", "of each completion"),
        ("--temperature", positive_number, 1.0, "T", "as TRL's"),
        ("--learning-rate", positive_number, 5e-5, "LR", "of the policy"),
        ("--seed", not_negative, 0, "N", "of the training"),
    )
    add_session_arguments(parser)
    parser.set_defaults(dtype="float32")
