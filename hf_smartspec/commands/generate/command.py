"""`smartspec generate`: text for one prompt, for several, or for every row of a dataset."""

import argparse
import sys
from pathlib import Path

from ..common.answering.arguments import (
    add_model_arguments,
    add_sampling_arguments,
    add_text_arguments,
    sampling_of,
)
from ..common.answering.prompting import Prompter
from ..common.answering.speaker import Speaker, load_speaker
from ..common.arguments import positive
from ..common.models import UsageError
from ..common.outputs import check_output
from .answers import STDOUT, Answers
from .prompts import read_prompts

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
        "--stop", action="append", default=[], metavar="TEXT", help="ends an answer; may be given several times"
    )
    group = parser.add_argument_group("work and results")
    group.add_argument(
        "--max-batch-size", type=positive, default=_MAX_BATCH_SIZE, metavar="N",
        help="prompts that are answered at once (default: %(default)s)",
    )  # fmt: skip
    group.add_argument("--stats", action="store_true", help="say what speculation did, on standard error")
    group.add_argument(
        "--json", type=Path, metavar="FILE", help="also write the answers to this file; -: to standard output instead"
    )


def run(args: argparse.Namespace) -> int:
    if args.json != STDOUT:
        check_output(args.json)
    sampling_of(args)
    prompts = read_prompts(args.prompts, args.file, sys.stdin)
    speaker = load_speaker(args)
    return Answers(args, speaker, _prompter(args, speaker)).run(prompts)


def _prompter(args: argparse.Namespace, speaker: Speaker) -> Prompter:
    is_raw = args.raw or not speaker.tokenizer.chat_template
    if args.system and is_raw:
        raise UsageError("--system: nobody reads it without a chat template")
    return Prompter(speaker.tokenizer, args.system, is_raw)
