"""Arguments of `python -m benchmarks peers`."""

import argparse
from pathlib import Path

from hf_smartspec.commands.common.arguments import number, positive, positive_number

from ...kit.arguments import add_options, add_session_arguments
from .known import KINDS, PEERS


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--smoke", action="store_true", help="everything small, in a minute or two: figures mean nothing"
    )
    parser.add_argument(
        "--peers", nargs="+", choices=PEERS, metavar="NAME", help=f"of {', '.join(PEERS)} (default: all)"
    )
    parser.add_argument(
        "--kinds", nargs="+", default=list(KINDS), choices=KINDS, metavar="KIND",
        help="of weights: float32, bfloat16, int8, which is Q8_0 in GGUF, and int4, Q4_1 in GGUF "
        "(default: all)",
    )  # fmt: skip
    for name, kind, metavar, about in (
        ("--prompts", Path, "FILE", ".jsonl with prompts and their category, or lines of text"),
        ("--texts", str, "CATEGORY", "of the prompts (default: all of them)"),
        ("--batch-sizes", positive, "B", "rows at once, different prompts (default: 1 8 16)"),
    ):
        parser.add_argument(name, nargs="+", type=kind, metavar=metavar, help=about)
    add_options(
        parser,
        ("--model", str, None, "MODEL", "a Llama, folder or hub id (default: SmolLM2, or the embedded target)"),
        ("--draft", str, None, "MODEL", "its draft model (default: the embedded target has one)"),
        ("--parameters", number, None, "N", "of the target, enlarged without a change of its output; 0 leaves it as it "
         "is (default: 2e+08 for the embedded target, 0 for others)"),
        ("--num-prompts", positive, None, "N", "of each category, decoded one by one (default: 4)"),
        ("--max-new-tokens", positive, None, "N", "of each (default: 64)"),
        ("--repeats", positive, None, "N", "turns, of which the median (default: 3)"),
        ("--threads", positive, 2, "N", "of each engine"),
        ("--timeout", positive_number, 900.0, "S", "for one answer of a peer"),
        ("--cache", Path, None, "FOLDER", "for environments (default: ~/.cache/hf-smartspec/peers)"),
    )  # fmt: skip
    parser.add_argument(
        "--heads", nargs="+", default=[], metavar="FOLDER",
        help="learned drafters of the model, such as demos/models/smollm2-eagle3 of SmolLM2, for smartspec",
    )  # fmt: skip
    parser.add_argument(
        "--python", action="append", default=[], type=_interpreter, metavar="NAME=FILE",
        help="an interpreter that has the peer already, for example built for this CPU, in place of an environment",
    )  # fmt: skip
    add_session_arguments(parser, Path("bench-peers.json"))


def _interpreter(text: str) -> tuple[str, Path]:
    name, _, file = text.partition("=")
    if name not in PEERS or not Path(file).is_file():
        raise argparse.ArgumentTypeError(f"must be NAME=FILE with one of {', '.join(PEERS)} and a file, got {text!r}")
    return name, Path(file).absolute()
