"""The tab "Load"."""

import threading
from collections.abc import Callable, Iterator

import gradio as gr

from .load import LoadSettings, load_html, run_load
from .race_tab import choices, most_telling
from .texts import notice
from .world import NONE, World

_EMPTY = notice(
    "Press Start: requests arrive at random moments, first without speculation, then the same ones with it. Watch how "
    "much the engine drafts as more requests run at once."
)


def load_tab(world: World, connect: Callable[..., None]) -> None:
    with gr.Row(equal_height=False):
        with gr.Column(min_width=300):
            rate = gr.Slider(0.2, 20, 2, step=0.2, label="Requests per second")
            seconds = gr.Slider(5, 60, 10, step=5, label="Seconds of arrivals")
        with gr.Column(min_width=300):
            drafting = [item for item in choices(world) if item[1] != NONE]
            source = gr.Dropdown(drafting, value=most_telling(world), label="What drafts", interactive=True)
            categories = gr.CheckboxGroup(list(world.prompts), value=list(world.prompts), label="Mix of prompts")
    with gr.Accordion("Length and batch", open=False), gr.Row():
        length = gr.Slider(8, 128, 48, step=8, label="New tokens at most", min_width=240)
        batch = gr.Slider(1, 64, 16, step=1, label="Requests at once, at most", min_width=240)
    with gr.Row():
        start = gr.Button("Start", variant="primary", elem_id="ss-load-start", min_width=140)
        stop = gr.Button("Stop", interactive=False, elem_id="ss-load-stop", min_width=140)
    result = gr.HTML(_EMPTY, elem_id="ss-load-result", js_on_load=None)

    def work(
        per_second: float, duration: float, name: str, kinds: list[str], most: float, at_once: float,
        event: threading.Event,
    ) -> Iterator[tuple]:  # fmt: skip
        settings = LoadSettings(name, kinds, per_second, duration, int(most), int(at_once))
        for doing, runs in run_load(world, settings, event):
            yield (load_html(doing, settings, runs),)

    connect("load", (start, stop), work, [rate, seconds, source, categories, length, batch], [result])
