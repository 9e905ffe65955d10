"""Arguments of `python -m benchmarks peers`."""

import argparse
from pathlib import Path

from hf_smartspec.commands.common.arguments import number, positive, positive_number

from ...kit.arguments import add_session_arguments
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
        help="of weights: float32, bfloat16, and int8, which is Q8_0 for those that read GGUF (default: all)",
    )  # fmt: skip
    parser.add_argument("--model", metavar="MODEL", help="a Llama, folder or hub id (default: the embedded target)")
    parser.add_argument("--draft", metavar="MODEL", help="its draft model (default: the embedded one)")
    parser.add_argument(
        "--parameters", type=number, metavar="N",
        help="of the target, enlarged without a change of its output; 0 leaves it as it is (default: 2e+08 for the "
        "embedded target, 0 for others)",
    )  # fmt: skip
    parser.add_argument(
        "--prompts",
        nargs="+",
        type=Path,
        metavar="FILE",
        help=".jsonl with prompts and their category, or lines of text",
    )
    parser.add_argument("--texts", nargs="+", metavar="CATEGORY", help="of the prompts (default: sql chat)")
    parser.add_argument("--num-prompts", type=positive, metavar="N", help="of each, decoded one by one (default: 4)")
    parser.add_argument(
        "--batch-sizes", type=positive, nargs="+", metavar="B", help="rows at once, different prompts (default: 1 16)"
    )
    parser.add_argument("--max-new-tokens", type=positive, metavar="N", help="of each (default: 64)")
    parser.add_argument("--repeats", type=positive, metavar="N", help="turns, of which the median (default: 3)")
    parser.add_argument("--threads", type=positive, default=2, metavar="N", help="of each engine (default: 2)")
    parser.add_argument(
        "--timeout", type=positive_number, default=900.0, metavar="S", help="for one answer of a peer (default: 900)"
    )
    parser.add_argument(
        "--cache", type=Path, metavar="FOLDER", help="for environments (default: ~/.cache/hf-smartspec/peers)"
    )
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
