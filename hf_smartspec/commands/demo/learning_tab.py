"""The tab "Learning"."""

import threading
from collections.abc import Callable, Iterator

import gradio as gr

from .learning import RANDOM, TRAINED, LearningSettings, learning_html, run_learning
from .texts import notice
from .world import World

_EMPTY = notice(
    "Press Start: a draft model serves one request after the other and learns from each of the model's corrections. "
    "Its acceptance rate rises; the text never changes."
)


def learning_tab(world: World, connect: Callable[..., None]) -> None:
    drafts = world.draft_models()
    names = list(world.prompts)
    with gr.Row(equal_height=False):
        with gr.Column(min_width=300):
            draft = gr.Dropdown(
                drafts or ["none"], value=(drafts or ["none"])[0], label="Draft model", interactive=True
            )
            begins = gr.Radio([RANDOM, TRAINED], value=TRAINED, label="It begins with")
        with gr.Column(min_width=300):
            categories = gr.CheckboxGroup(names, value=names[1:2] or names, label="Stream of prompts")
            num_requests = gr.Slider(8, 128, 32, step=8, label="Requests")
    with gr.Accordion("How it learns", open=False), gr.Row():
        interval = gr.Slider(1, 16, 2, step=1, label="Requests from update to update", min_width=240)
        length = gr.Slider(16, 128, 48, step=16, label="New tokens at most", min_width=240)
        rate = gr.Dropdown([5e-4, 1e-3, 2e-3, 5e-3], value=5e-4, label="Learning rate", interactive=True, min_width=160)
    with gr.Row():
        start = gr.Button("Start", variant="primary", elem_id="ss-learning-start", min_width=140)
        stop = gr.Button("Stop", interactive=False, elem_id="ss-learning-stop", min_width=140)
    result = gr.HTML(_EMPTY, elem_id="ss-learning-result", js_on_load=None)

    def work(
        name: str, beginning: str, kinds: list[str], number: float, every: float, most: float, speed: float,
        event: threading.Event,
    ) -> Iterator[tuple]:  # fmt: skip
        settings = LearningSettings(name, beginning, kinds, int(number), int(every), int(most), float(speed))
        for doing, learnt in run_learning(world, settings, event):
            yield (learning_html(doing, learnt),)

    connect(
        "learning", (start, stop), work, [draft, begins, categories, num_requests, interval, length, rate], [result]
    )
