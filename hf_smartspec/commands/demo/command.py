"""`smartspec demo`: a page in the browser, on this machine only."""

import argparse
import importlib.util
import os
from pathlib import Path

from ...target.profiling import load_or_profile
from ..common.addresses import host, listen_at, port
from ..common.arguments import add_target_arguments
from ..common.console import make_console
from ..common.models import UsageError
from .world import load_world


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_target_arguments(parser, dtype=None)
    parser.add_argument(
        "--draft", nargs="+", metavar="MODEL",
        help="draft models and learned drafters to choose among, by folder or hub id (default: the demo's for the "
        "demo's target)",
    )  # fmt: skip
    parser.add_argument(
        "--prompts",
        type=Path,
        metavar="FILE",
        help="examples: .jsonl with `prompt` and `category` (default: the demo's)",
    )
    parser.add_argument(
        "--host", type=host, default="127.0.0.1", metavar="ADDRESS", help="to listen on (default: this machine only)"
    )
    parser.add_argument("--port", type=port, metavar="N", help="default: the first free one from 7860 on")


def run(args: argparse.Namespace) -> int:
    if importlib.util.find_spec("gradio") is None:
        raise UsageError('the page is made with Gradio: pip install "hf-smartspec[demo]"')
    os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"  # before it is imported: nothing is sent anywhere
    from .app import build_app, launch_app

    listen_at(args.host, args.port or 0).close()  # Gradio would wait for ever, and only once all is loaded
    console = make_console()
    world = load_world(args)
    console.print(world.describe(), highlight=False)
    load_or_profile(world.model)  # measured once per machine, not in the middle of a race
    app = build_app(world)
    try:
        address = launch_app(app, args.host, args.port)
    except OSError as error:
        raise UsageError(f"cannot listen on {args.host}, port {args.port or '7860 to 7959'}: {error}") from error
    console.print(f"[bold]{address}[/bold] (Ctrl-C ends it)", highlight=False)
    app.block_thread()
    return 0
