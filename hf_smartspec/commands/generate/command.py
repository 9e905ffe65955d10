"""`smartspec generate`: text for one prompt, for several, or for every row of a dataset."""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

from ..common.answering.arguments import sampling_of
from ..common.answering.speaker import load_speaker
from ..common.arguments import UsageError, usage_errors
from ..common.models import default_device
from ..common.models import read_prompts as read_rows
from ..common.outputs import check_output, opened
from ..common.ray_cluster import check_ray
from .answering import prompter_of
from .answers import STDOUT, Answers
from .dataset import DatasetAnswers
from .rows import checked_rows, launched_device


def run(args: argparse.Namespace) -> int:
    sampling_of(args)
    if args.dataset is not None:
        return _answer_dataset(args)
    if args.output:
        raise UsageError("--output is for --dataset; other answers are written by --json")
    for option in ("config", "keep", "limit", "shard", "replicas", "overwrite"):
        if getattr(args, option):
            raise UsageError(f"--{option} is for --dataset")
    if args.json != STDOUT:
        check_output(args.json)
    prompts = read_prompts(args.prompts, args.file, sys.stdin)
    speaker = load_speaker(args)
    return Answers(args, speaker, prompter_of(args, speaker)).run(prompts)


def _answer_dataset(args: argparse.Namespace) -> int:
    if args.prompts or args.file:
        raise UsageError("--dataset takes the place of prompts")
    if args.compare:
        raise UsageError("--compare is for prompts: `smartspec bench generate` measures datasets")
    if args.output is None:
        raise UsageError("--dataset needs --output, where answers are written")
    check_output(args.output)
    check_output(args.json)
    if args.replicas:
        check_ray()
    rows = checked_rows(args)
    args.device = launched_device(args.device or default_device(), os.environ)
    speaker = load_speaker(args)
    return DatasetAnswers(args, rows, speaker, prompter_of(args, speaker)).run()


_STDIN = "-"


def read_prompts(texts: Sequence[str], files: Sequence[Path], stdin: TextIO) -> list[str]:
    """
    Return all prompts in order, those of files last; raises `UsageError` if there is no prompt, one is empty, or a file
    cannot be read.
    """
    if not texts and not files:
        if stdin.isatty():
            raise UsageError(
                "no prompt: give one, name a --file, or pipe text in; `smartspec chat` is for conversations"
            )
        texts = [_STDIN]
    with usage_errors("standard input is no text", UnicodeDecodeError):
        prompts = [stdin.read().removesuffix("\n") if text == _STDIN else text for text in texts]
    for path in files:
        if path.suffix == ".jsonl":
            prompts += [row["prompt"] for row in read_rows(path)]
        else:
            with opened(path) as file:
                prompts.append(file.read().removesuffix("\n"))
            if not prompts[-1].strip():
                raise UsageError(f"the prompt in {str(path)!r} is empty")
    for number, prompt in enumerate(prompts, start=1):
        if not prompt.strip():
            raise UsageError("the prompt is empty" if len(prompts) == 1 else f"prompt {number} is empty")
    return prompts
