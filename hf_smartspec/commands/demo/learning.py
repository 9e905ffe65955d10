"""Online learning, live: a draft model learns from the requests that it drafts for."""

import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from html import escape
from itertools import cycle, islice
from typing import Any

import numpy as np
import torch

from ...generate import enabled
from ...online.distillation import OnlineDistillation
from ...online.learner import LearningStatistics
from ...prepare.config import SmartSpecConfig
from .charts import Series, chart_html, charts
from .lanes import watched
from .texts import card, cards, notice
from .world import RefusedError, World

RANDOM, TRAINED = "random weights", "as it was trained"
_NODES = 5  # drafted at every step: the paper's k
_MEAN_OF = 6  # requests


@dataclass(frozen=True)
class LearningSettings:
    """Settings of the tab."""

    draft: str  # A draft model, one of `World.draft_models`
    begins: str = TRAINED  # its weights at the beginning, `RANDOM` or `TRAINED`
    categories: Sequence[str] = ()  # kinds of prompts
    num_requests: int = 32
    interval: int = 2  # requests per update
    max_new_tokens: int = 48
    learning_rate: float = 5e-4


@dataclass
class Learnt:
    """Progress of learning."""

    settings: LearningSettings
    rates: list[float] = field(default_factory=list)  # the share of drafted tokens that was accepted, by request
    lengths: list[float] = field(default_factory=list)  # tokens per forward, by request
    # Number of requests before each update, and whether it was "taken" or "dropped".
    updates: list[tuple[int, str]] = field(default_factory=list)
    seconds: float = 0.0
    statistics: LearningStatistics = field(default_factory=LearningStatistics)


def run_learning(world: World, settings: LearningSettings, stop: threading.Event) -> Iterator[tuple[str, Learnt]]:
    """
    Yield the current activity and what has been learnt so far; raises `RefusedError` if there is no draft model that
    can learn.
    """
    if settings.draft not in world.draft_models():
        raise RefusedError("Only draft models learn on this page, and there is none: start it with --draft FOLDER.")
    prompts = world.encoded(settings.categories, settings.max_new_tokens)
    learnt = Learnt(settings)
    draft = world.new_draft(settings.draft, settings.begins == RANDOM)
    online = OnlineDistillation(
        every_requests=settings.interval, learning_rate=settings.learning_rate, background=False, batch_tokens=1024,
        shadow=4, replay=4.0, passes=2,  # few requests are to show something
    )  # fmt: skip
    try:
        for place, prompt in enumerate(islice(cycle(prompts), settings.num_requests)):
            if stop.is_set():
                break
            work = partial(_serve, world, prompt, SmartSpecConfig(draft, num_nodes=_NODES, online=online), learnt)
            doing = f"request {place + 1} of {settings.num_requests}"
            for _ in watched(world, work):
                yield doing, learnt
            _note_updates(learnt, online)
            yield doing, learnt
    finally:
        online.close()
    yield "", learnt


def _serve(world: World, prompt: np.ndarray, assistant: SmartSpecConfig, learnt: Learnt) -> None:
    model: Any = world.small
    ids = torch.from_numpy(prompt)[None].to(model.device)
    start = time.perf_counter()
    with enabled(model):
        model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=learnt.settings.max_new_tokens, do_sample=False,
            assistant=assistant,
        )  # fmt: skip
        counts = model.smartspec_statistics.last
    learnt.seconds += time.perf_counter() - start
    learnt.rates.append(counts.acceptance_rate)
    learnt.lengths.append(counts.mean_accepted_length)


def _note_updates(learnt: Learnt, online: OnlineDistillation) -> None:
    before = learnt.statistics
    for now in online.statistics.values():
        if now.updates > before.updates:
            learnt.updates.append((len(learnt.rates), "taken" if now.swaps > before.swaps else "dropped"))
        learnt.statistics = now


def learning_html(doing: str, learnt: Learnt) -> str:
    head = f'<p class="ss-doing" role="status">{escape(doing)} …</p>' if doing else ""
    if not learnt.rates:
        return (
            f'<div class="ss-panel">{head}</div>' if doing else notice("Stopped before the first request was served.")
        )
    num, marks = learnt.settings.num_requests, [(place + 0.5, kind) for place, kind in learnt.updates]
    pictures = [
        chart_html(
            title,
            unit,
            [
                Series("each request", "dots", list(enumerate(values, start=1)), is_dots=True),
                Series(
                    f"mean of the last {_MEAN_OF}",
                    "drafted",
                    [(end, _mean(values[max(end - _MEAN_OF, 0) : end])) for end in range(1, len(values) + 1)],
                ),
            ],
            "requests",
            num + 0.5,
            marks,
        )
        for title, unit, values in (
            ("Acceptance rate", "share of drafted tokens that were accepted", learnt.rates),
            ("Tokens per forward", f"{_NODES + 1} at most, 1 without drafts", learnt.lengths),
        )
    ]
    counts = learnt.statistics
    first, last = _mean(learnt.rates[:_MEAN_OF]), _mean(learnt.rates[-_MEAN_OF:])
    figures = cards(
        card(f"{first:.0%}", f"accepted, first {min(_MEAN_OF, len(learnt.rates))}"),
        card(f"{last:.0%}", f"accepted, last {min(_MEAN_OF, len(learnt.rates))}", True),
        card(f"{counts.updates}", f"updates, {counts.swaps} taken over"),
        card(f"{counts.seconds:.1f} s", f"of {learnt.seconds:.1f} s spent learning"),
    )
    note = (
        '<p class="ss-fine">Upright lines are updates: solid ones were taken over, broken ones given up because shadow '
        f"drafts of held-out texts got worse. At every step {_NODES} tokens are drafted, worth it or not, so that "
        "rates can be compared. Requests run one after the other and updates between them, on the target at its own "
        "size: what is learnt does not depend on its cost. Prompts come again once all have been asked.</p>"
    )
    return f'<div class="ss-panel ss-learning">{head}{figures}{charts(*pictures)}{note}</div>'


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
