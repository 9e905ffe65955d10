"""Arguments that benches have in common. Nothing heavy is imported."""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hf_smartspec.commands.common.arguments import positive_number

Option = tuple[str, Callable[[str], Any], Any, str, str]


def add_options(parser: argparse.ArgumentParser, *options: Option) -> None:
    """
    Add options, each with its type, its default (of options with several values, a list), its metavar, and its help,
    which gets the default appended.
    """
    for name, kind, default, metavar, about in options:
        values = default if isinstance(default, list) else [default]
        shown = " ".join(f"{value:g}" if isinstance(value, float) else str(value) for value in values)
        text = about if default is None else f"{about}{' ' * bool(about)}(default: {shown})"
        nargs = "+" if isinstance(default, list) else None
        parser.add_argument(name, type=kind, default=default, nargs=nargs, metavar=metavar, help=text)


def add_session_arguments(
    parser: argparse.ArgumentParser, path: Path | None = None, seconds: float | None = None
) -> None:
    """Add what `kit.session.new_session` takes; `path` and `seconds` are the defaults of --json and --seconds."""
    parser.add_argument(
        "--json", type=Path, default=path, metavar="FILE",
        help=f"written anew after every measurement (default: {path or 'none'})",
    )  # fmt: skip
    add_resume_arguments(parser, seconds)


def add_tokenizer_argument(parser: argparse.ArgumentParser) -> None:
    """Add what `kit.models.tokenizer_of` takes."""
    parser.add_argument(
        "--model", "--tokenizer", dest="model", metavar="MODEL",
        help="folder or hub id whose tokenizer is used (default: that of SmolLM2, where it is in the cache, else the "
        "demo's)",
    )  # fmt: skip


def add_resume_arguments(parser: argparse.ArgumentParser, seconds: float | None = None) -> None:
    """Add the same without --json."""
    parser.add_argument("--resume", action="store_true", help="leave out what the file of --json holds already")
    parser.add_argument(
        "--seconds", type=positive_number, default=seconds, metavar="S",
        help=f"for everything: what was not reached by then is named (default: {seconds or 'no limit'})",
    )  # fmt: skip
