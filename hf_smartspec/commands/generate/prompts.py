"""Prompts from arguments, files and standard input."""

from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

from ..common.arguments import UsageError
from ..common.models import read_prompts as read_rows

_STDIN = "-"


def read_prompts(texts: Sequence[str], files: Sequence[Path], stdin: TextIO) -> list[str]:
    """
    Return all prompts in order, those of files last.

    Raises:
        UsageError: if there is no prompt, one is empty, or a file cannot be read.
    """
    if not texts and not files:
        if stdin.isatty():
            raise UsageError(
                "no prompt: give one, name a --file, or pipe text in; `smartspec chat` is for conversations"
            )
        texts = [_STDIN]
    prompts = [_read_stdin(stdin) if text == _STDIN else text for text in texts]
    for path in files:
        prompts += _read_file(path)
    for number, prompt in enumerate(prompts, start=1):
        if not prompt.strip():
            raise UsageError("the prompt is empty" if len(prompts) == 1 else f"prompt {number} is empty")
    return prompts


def _read_stdin(stdin: TextIO) -> str:
    try:
        return stdin.read().removesuffix("\n")
    except UnicodeDecodeError as error:
        raise UsageError(f"standard input is no text: {error}") from error


def _read_file(path: Path) -> list[str]:
    if path.suffix == ".jsonl":
        return [row["prompt"] for row in read_rows(path)]
    try:
        return [path.read_text(encoding="utf-8").removesuffix("\n")]
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read {str(path)!r}: {error}") from error
