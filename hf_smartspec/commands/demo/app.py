"""The page: three tabs, and the actions of their buttons."""

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from html import escape
from pathlib import Path
from typing import Any

import gradio as gr
from starlette.middleware import Middleware

from ...log import get_logger
from ...serving.server.guard.hosts import HostGuard, local_hosts
from .tabs import learning_tab, load_tab, race_tab
from .texts import notice
from .world import RefusedError, World

logger = get_logger(__name__)

_FOLDER = Path(__file__).parent
_SYSTEM_FONTS = ("system-ui", "-apple-system", "Segoe UI", "Roboto", "sans-serif")
_MONOSPACED = ("ui-monospace", "SF Mono", "Consolas", "DejaVu Sans Mono", "monospace")


@dataclass
class Runs:
    """Events that stop the running work, by browser tab and tab of the page."""

    events: dict[tuple[str, str], threading.Event] = field(default_factory=dict)

    def begin(self, kind: str, request: gr.Request) -> None:
        """Stop earlier work of the tab and make an event for the next, which can so be stopped while it still waits."""
        self.stop(kind, request)
        self.events[request.session_hash or "", kind] = threading.Event()

    def event(self, kind: str, request: gr.Request) -> threading.Event:
        return self.events.setdefault((request.session_hash or "", kind), threading.Event())

    def stop(self, kind: str, request: gr.Request) -> None:
        if event := self.events.get((request.session_hash or "", kind)):
            event.set()

    def leave(self, request: gr.Request) -> None:
        """Stop the work of a browser tab that was closed."""
        for key in [key for key in self.events if key[0] == request.session_hash]:
            self.events.pop(key).set()


def build_app(world: World) -> gr.Blocks:
    """Return the page, for `launch_app`."""
    runs = Runs()
    with gr.Blocks(title="hf-smartspec", analytics_enabled=False) as app:
        gr.HTML(_title(world))
        with gr.Tab("Race", id="race"):
            race_tab(world, partial(connect, runs))
        with gr.Tab("Load", id="load"):
            load_tab(world, partial(connect, runs))
        with gr.Tab("Learning", id="learning"):
            if world.learner is not None:
                gr.HTML(
                    notice(f"This tab runs the embedded models, of which one can learn. {world.learner.describe()}")
                )
            learning_tab(world.learner or world, partial(connect, runs))
        app.unload(runs.leave)
    app.queue(default_concurrency_limit=8)
    return app


def launch_app(app: gr.Blocks, host: str = "127.0.0.1", port: int | None = None) -> str:
    """
    Serve the page in threads of its own, and return its address. The page loads nothing from other servers; where only
    this machine can reach it, requests under other host names than this machine's are refused.
    """
    hosts = local_hosts(host)
    theme = gr.themes.Base(
        primary_hue="blue",
        neutral_hue="slate",
        text_size=gr.themes.sizes.text_lg,
        radius_size=gr.themes.sizes.radius_lg,
        font=_SYSTEM_FONTS,
        font_mono=_MONOSPACED,
    )
    _, address, _ = app.launch(
        server_name=host,
        server_port=port,
        share=False,
        prevent_thread_lock=True,
        quiet=True,
        ssr_mode=False,
        footer_links=[],
        app_kwargs={} if hosts is None else {"middleware": [Middleware(HostGuard, hosts=hosts)]},
        theme=theme,
        css=(_FOLDER / "style.css").read_text(encoding="utf-8"),
        head=f"<script>{(_FOLDER / 'script.js').read_text(encoding='utf-8')}</script>",
    )
    return str(address)


def connect(
    runs: Runs,
    kind: str,
    buttons: tuple[gr.Button, gr.Button],
    work: Callable[..., Iterator[tuple]],
    inputs: list[Any],
    outputs: list[Any],
) -> None:
    """
    Connect the start and stop buttons of a tab with its work, which takes the values of `inputs` and an event that
    stops it, and yields values of `outputs`, of which the first is HTML.
    """
    start, stop = buttons
    others = [gr.skip()] * (len(outputs) - 1)

    def begin(request: gr.Request) -> tuple:
        runs.begin(kind, request)
        waiting = notice("Waiting for its turn: one thing is timed at a time on this machine.")
        return gr.update(interactive=False), gr.update(interactive=True), waiting

    def run(request: gr.Request, *values: Any) -> Iterator[tuple]:
        try:
            yield from work(*values, runs.event(kind, request))
        except RefusedError as error:
            yield notice(str(error), "wrong"), *others
        except Exception as error:
            logger.error(f"{kind} failed: {error!r}", exc_info=True)
            yield notice(f"That has failed: {error}", "wrong"), *others

    def halt(request: gr.Request) -> None:
        runs.stop(kind, request)

    def end() -> tuple:
        return gr.update(interactive=True), gr.update(interactive=False)

    shared: dict[str, Any] = {"show_progress": "hidden", "queue": False, "api_visibility": "private"}
    started = start.click(begin, None, [start, stop, outputs[0]], **shared)
    ran = started.then(
        run,
        inputs,
        outputs,
        concurrency_id="machine",
        concurrency_limit=1,
        show_progress="hidden",
        api_visibility="private",
    )
    ran.then(end, None, [start, stop], **shared)
    stop.click(halt, None, None, **shared)


def _title(world: World) -> str:
    same = "the same text" if world.is_reproducible else "the same up to rounding"
    return (
        f'<header class="ss-title"><div><h1>Faster text, {same}</h1><p>Speculative decoding: something cheap '
        "drafts several tokens, the model checks them all in one forward and keeps those that it would have written "
        "itself.</p>"
        f'<p class="ss-machine">{escape(world.describe())}</p></div><button class="ss-theme" type="button" '
        'aria-label="light or dark">◐</button></header>'
    )
