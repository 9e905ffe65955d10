"""`smartspec demo`: a page in the browser, on this machine only."""

import argparse
import importlib.util
import os

from ...target_model.cost.profiling import load_or_profile
from ..common.arguments import UsageError, listen_at, usage_errors
from ..common.console import make_console
from .world import load_world


def run(args: argparse.Namespace) -> int:
    if importlib.util.find_spec("gradio") is None:
        raise UsageError('the page is made with Gradio: pip install "hf-smartspec[demo]"')
    os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"  # before it is imported: nothing is sent anywhere
    from .app import build_app, launch_app

    listen_at(args.host, args.port or 0).close()  # Gradio would wait for ever, and only once all is loaded
    console = make_console()
    world = load_world(args)
    console.print(world.describe())
    load_or_profile(world.model)  # measured once per machine, not in the middle of a race
    app = build_app(world)
    with usage_errors(f"cannot listen on {args.host}, port {args.port or '7860 to 7959'}", OSError):
        address = launch_app(app, args.host, args.port)
    console.print(f"[bold]{address}[/bold] (Ctrl-C ends it)")
    app.block_thread()
    return 0
