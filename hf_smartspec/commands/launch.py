"""`smartspec transformers`: transformers' own command, with speculation for every model."""

import argparse
from contextlib import ExitStack

from .common.arguments import UsageError
from .common.names import parts_of

_SERVE = "serve"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--assistant", default="auto", metavar="MODEL_OR_PRESET",
        help="what drafts for every model: a folder, hub id or preset, or a list joined by plus signs "
        "(suffix+FOLDER); default: auto",
    )  # fmt: skip
    parser.add_argument(
        "arguments", nargs=argparse.REMAINDER, metavar="...",
        help="a command of transformers, such as: serve MODEL --continuous-batching --port 8000",
    )  # fmt: skip


def run(args: argparse.Namespace) -> int:
    if not args.arguments:
        raise UsageError("a command of transformers is missing, such as: serve MODEL --continuous-batching")
    from ..generate import enable
    from ..serving.transformers_batching.server import own_settings

    try:
        from transformers.cli.transformers import app
    except ImportError as error:
        raise UsageError(
            f'transformers\' command needs more than is installed ({error}): pip install "typer"'
        ) from error
    items = parts_of(args.assistant)
    with ExitStack() as stack:
        try:
            stack.enter_context(enable(assistant=items if len(items) > 1 else items[0]))
        except (TypeError, ValueError) as error:
            raise UsageError(f"--assistant: {error}") from error
        if args.arguments[0] == _SERVE:
            try:
                stack.enter_context(own_settings())
            except ImportError as error:
                raise UsageError(
                    f'the server is not installed ({error}): pip install "transformers[serving]"'
                ) from error
        try:
            app(args.arguments, prog_name="transformers")
        except SystemExit as end:
            return end.code if isinstance(end.code, int) else int(bool(end.code))
    return 0
