"""Arguments of `python -m benchmarks rollouts`."""

import argparse
from pathlib import Path

from hf_smartspec.commands.common.arguments import add_target_arguments, not_negative, positive, positive_number

from ...kit.arguments import add_session_arguments


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "files", nargs="*", type=Path, metavar="FILE",
        help=".jsonl with problems of arithmetic under \"prompt\" (default: the demo's, which the target has not "
        "learnt from)",
    )  # fmt: skip
    add_target_arguments(parser)
    parser.add_argument(
        "--assistants", nargs="+", metavar="MODEL_OR_PRESET",
        help="folders, hub ids or presets, lists joined by plus signs (suffix+FOLDER); with online: before, draft "
        "models are distilled as the policy moves (default: suffix trees, the demo's draft, both, both online)",
    )  # fmt: skip
    parser.add_argument("--num-prompts", type=positive, default=3, metavar="N", help="of each epoch (default: 3)")
    parser.add_argument("--prompts-per-step", type=positive, default=1, metavar="N", help="default: 1")
    parser.add_argument(
        "--generations", type=positive, default=4, metavar="N", help="of each prompt, 2 or more (default: 4)"
    )
    parser.add_argument("--epochs", type=positive, default=2, metavar="N", help="default: 2")
    parser.add_argument("--max-new-tokens", type=positive, default=64, metavar="N", help="default: 64")
    parser.add_argument("--temperature", type=positive_number, default=1.0, metavar="T", help="default: 1, as TRL's")
    parser.add_argument("--learning-rate", type=positive_number, default=5e-5, metavar="LR", help="default: 5e-5")
    parser.add_argument("--seed", type=not_negative, default=0, metavar="N", help="default: 0")
    add_session_arguments(parser)
    parser.set_defaults(dtype="float32")
