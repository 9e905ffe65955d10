"""The tabs of the page: race, load and learning."""

import threading
from collections.abc import Callable, Iterator
from typing import Any

import gradio as gr

from ..common.names import JOINT
from ..common.runs import Decoding
from .learning import RANDOM, TRAINED, LearningSettings, learning_html, run_learning
from .load import LoadSettings, load_html, run_load
from .race import ENGINE, GENERATE, Race, RaceSettings, progress_html, race_html, run_race, usual_baseline, why_baseline
from .texts import notice
from .trees import best_step, tree_html
from .world import AUTO, NONE, World

GREEDY, SAMPLED = "greedy", "sampled"
GOODPUT = "as many as pay"
_NO_RACE = notice("Press Start: both lanes answer the same prompt, and every token is coloured by who wrote it.")
_NO_TREE = notice("Draft trees of a race are shown here.")


def race_tab(world: World, connect: Callable[..., None]) -> None:
    examples = [(f"{name}: {_short(text)}", text) for name, texts in world.prompts.items() for text in texts]
    with gr.Row(equal_height=False):
        with gr.Column(scale=3, min_width=300):
            example = gr.Dropdown(examples, value=examples[0][1], label="Example", interactive=True)
            prompt = gr.Textbox(examples[0][1], label="Prompt", lines=4, max_lines=8, elem_id="ss-prompt")
        with gr.Column(scale=2, min_width=300):
            source = gr.Dropdown(choices(world), value=most_telling(world), label="What drafts", interactive=True)
            baseline = gr.Radio(
                [GENERATE, ENGINE], value=usual_baseline(world), label="Plain lane", info=why_baseline(world)
            )
    with gr.Accordion("Decoding and length", open=False):
        with gr.Row():
            decoding = gr.Radio([GREEDY, SAMPLED], value=GREEDY, label="Decoding", min_width=200)
            temperature = gr.Slider(0.1, 1.5, 0.8, step=0.1, label="Temperature (sampled)", min_width=200)
            seed = gr.Number(0, label="Seed (sampled)", precision=0, minimum=0, min_width=140)
        with gr.Row():
            length = gr.Slider(16, 256, 96, step=16, label="New tokens at most", min_width=240)
            nodes = gr.Dropdown(
                [GOODPUT, "2", "4", "8", "16"], value=GOODPUT, label="Draft nodes in every step", interactive=True,
                min_width=240,
            )  # fmt: skip
            remembers = gr.Checkbox(
                False, label="Remember earlier races", info="Suffix trees know earlier answers, as a service's do.",
                min_width=240,
            )  # fmt: skip
    buttons, result = _buttons("race", _NO_RACE)
    gr.HTML('<h2 class="ss-heading">Draft trees</h2>')
    step = gr.Slider(1, 2, 1, step=1, label="Step", interactive=False, elem_id="ss-step")
    tree = gr.HTML(_NO_TREE, elem_id="ss-tree", js_on_load=None)
    last = gr.State(None)

    def work(
        text: str, name: str, plain: str, kind: str, heat: float, number: float, most: float, size: str, keeps: bool,
        event: threading.Event,
    ) -> Iterator[tuple]:  # fmt: skip
        chosen = Decoding(None if kind == GREEDY else int(number or 0), heat)
        num_nodes = None if size == GOODPUT or name == NONE else int(size)
        settings = RaceSettings(text or "", name, plain, chosen, int(most), bool(keeps), num_nodes)
        for doing, race in run_race(world, settings, event):
            if race.is_done:
                yield race_html(world, race), *_tree_updates(world, race), race
            else:
                yield progress_html(doing, race), gr.skip(), gr.skip(), gr.skip()

    def show(race: Race | None, number: float) -> Any:
        if race is None or not race.drafted.steps:
            return gr.skip()
        place = min(max(int(number), 1), len(race.drafted.steps)) - 1
        return tree_html(race.drafted, place, world.tokenizer)

    hidden: dict[str, Any] = {"show_progress": "hidden", "queue": False, "api_visibility": "private"}
    example.input(lambda text: text, example, prompt, **hidden)
    step.input(show, [last, step], tree, trigger_mode="always_last", **hidden)
    inputs = [prompt, source, baseline, decoding, temperature, seed, length, nodes, remembers]
    connect("race", buttons, work, inputs, [result, step, tree, last])


def _tree_updates(world: World, race: Race) -> tuple[Any, str]:
    steps = race.drafted.steps
    if not race.is_complete:
        return gr.update(value=1, interactive=False), _NO_TREE
    if not any(step.tokens for step in steps):
        return gr.update(value=1, interactive=False), notice(
            "Nothing was drafted in this race, so that there is no tree."
        )
    place = best_step(steps)
    update = gr.update(maximum=max(len(steps), 2), value=place + 1, interactive=len(steps) > 1)
    return update, tree_html(race.drafted, place, world.tokenizer)


def choices(world: World) -> list[tuple[str, str]]:
    """Return the sources to choose among, as pairs of label and name."""
    known = {AUTO: "auto: suffix trees of the text so far", NONE: "none: no drafts"}
    return [(known.get(name, name), name) for name in world.names]


def most_telling(world: World) -> str:
    """Return the default source: one with a draft model, where there is one."""
    return next((name for name in world.names if JOINT in name), AUTO)


def _short(text: str, most: int = 56) -> str:
    line = " ".join(text.split())
    return line if len(line) <= most else line[: most - 1] + "…"


_NO_LOAD = notice(
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
    buttons, result = _buttons("load", _NO_LOAD)

    def work(
        per_second: float, duration: float, name: str, kinds: list[str], most: float, at_once: float,
        event: threading.Event,
    ) -> Iterator[tuple]:  # fmt: skip
        settings = LoadSettings(name, kinds, per_second, duration, int(most), int(at_once))
        for doing, runs in run_load(world, settings, event):
            yield (load_html(doing, settings, runs),)

    connect("load", buttons, work, [rate, seconds, source, categories, length, batch], [result])


_NO_LEARNING = notice(
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
    buttons, result = _buttons("learning", _NO_LEARNING)

    def work(
        name: str, beginning: str, kinds: list[str], number: float, every: float, most: float, speed: float,
        event: threading.Event,
    ) -> Iterator[tuple]:  # fmt: skip
        settings = LearningSettings(name, beginning, kinds, int(number), int(every), int(most), float(speed))
        for doing, learnt in run_learning(world, settings, event):
            yield (learning_html(doing, learnt),)

    connect("learning", buttons, work, [draft, begins, categories, num_requests, interval, length, rate], [result])


def _buttons(tab: str, empty: str) -> tuple[tuple[gr.Button, gr.Button], gr.HTML]:
    """Return the start and stop buttons of a tab, and the place of its result, which is `empty` at first."""
    with gr.Row():
        start = gr.Button("Start", variant="primary", elem_id=f"ss-{tab}-start", min_width=140)
        stop = gr.Button("Stop", interactive=False, elem_id=f"ss-{tab}-stop", min_width=140)
    return (start, stop), gr.HTML(empty, elem_id=f"ss-{tab}-result", js_on_load=None)
