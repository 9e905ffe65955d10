"""`smartspec completion`: a script that completes verbs and options in a shell."""

import argparse
from collections.abc import Mapping
from typing import Any

from .common.arguments import UsageError

SHELLS = ("bash", "zsh", "fish", "tcsh")
_HOW = """where the script goes:
  bash  smartspec completion bash > ~/.local/share/bash-completion/completions/smartspec
  zsh   smartspec completion zsh > DIRECTORY_OF_fpath/_smartspec
  fish  smartspec completion fish > ~/.config/fish/completions/smartspec.fish"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=SHELLS, metavar="SHELL", help=", ".join(SHELLS))
    parser.epilog, parser.formatter_class = _HOW, argparse.RawDescriptionHelpFormatter


def run(args: argparse.Namespace) -> int:
    print(script(args.shell, args.full_parser()))
    return 0


def script(shell: str, parser: argparse.ArgumentParser) -> str:
    """
    Return the script that completes a parser with all its commands; raises `UsageError` if shtab is not installed.
    """
    try:
        import shtab
    except ImportError as error:
        raise UsageError('shtab is missing: pip install "hf-smartspec[completion]"') from error
    _name_files(parser, {"FILE": shtab.FILE, "MODEL": shtab.DIRECTORY, "FOLDER": shtab.DIRECTORY})
    return str(shtab.complete(parser, shell))


def _name_files(parser: argparse.ArgumentParser, kinds: Mapping[str, Any]) -> None:
    """Mark the arguments that are files and folders, by their names in the help, for completion."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for child in action.choices.values():
                _name_files(child, kinds)
        elif isinstance(action.metavar, str) and action.metavar in kinds:
            action.complete = kinds[action.metavar]  # type: ignore[attr-defined]
