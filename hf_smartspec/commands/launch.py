"""`smartspec transformers`: transformers' own command, with speculation for every model."""

import argparse
from contextlib import ExitStack

from .common.arguments import UsageError, usage_errors
from .common.names import parts_of


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

    with usage_errors('transformers\' command needs more packages: pip install "typer"', ImportError):
        from transformers.cli.transformers import app
    items = parts_of(args.assistant)
    with ExitStack() as stack:
        with usage_errors("--assistant"):
            stack.enter_context(enable(assistant=items if len(items) > 1 else items[0]))
        if args.arguments[0] == "serve":
            with usage_errors('the server is not installed: pip install "transformers[serving]"', ImportError):
                stack.enter_context(own_settings())
        try:
            app(args.arguments, prog_name="transformers")
        except SystemExit as end:
            return end.code if isinstance(end.code, int) else int(bool(end.code))
    return 0
