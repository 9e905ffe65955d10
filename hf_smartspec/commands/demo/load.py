"""The engine under load: the same arrivals without speculation and with it, one run after the other."""

import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from html import escape
from itertools import cycle, islice
from statistics import median
from typing import Any

import numpy as np

from ...goodput import GoodputAuction, LengthPolicy, NoSpeculation, StepOutcome, StepSeconds
from ...goodput.report import LoggedPolicy
from ...prepare.config import SmartSpecConfig
from ...serving.engine import Engine
from ...serving.outputs import EngineOutput
from ...simulator import poisson
from ...target_model.cost.profiling import load_or_profile
from .charts import Series, chart_html, charts
from .texts import TIMES, card, cards, notice
from .world import NONE, RefusedError, World

_LOOK = 0.25  # seconds between two looks at the engine
_SHOW = 1.0  # seconds between two pictures
_BUCKET = 1.0  # seconds per point of a line
_TOKENS = 3  # the column of `LoadRun.buckets`
_PATIENCE = 4.0  # a run is cut after so many times the seconds of arrivals
_MOST_REQUESTS = 400


@dataclass(frozen=True)
class LoadSettings:
    """Settings of the tab."""

    source: str  # one of `World.names`
    categories: Sequence[str]  # kinds of prompts
    rate: float = 2.0  # requests per second
    seconds: float = 10.0  # duration of arrivals
    max_new_tokens: int = 48
    max_batch_size: int = 16
    seed: int = 0  # seed of the arrivals


class WatchedPolicy(LoggedPolicy):
    """Policy that also records the time of each step, and its rows, drafted nodes and tokens."""

    def __init__(self, policy: LengthPolicy):
        super().__init__(policy, getattr(policy, "cost", None))
        self.steps: list[tuple[float, int, int, int]] = []

    def observe(self, outcome: StepOutcome) -> None:
        num_rows, tokens = len(outcome.rows), outcome.tokens
        num_tokens = outcome.num_tokens if tokens is None else sum(map(len, tokens))
        if num_rows:
            self.steps.append((time.perf_counter(), num_rows, sum(outcome.sizes), num_tokens))
        super().observe(outcome)

    def rested(self, num_rows: int, seconds: StepSeconds) -> None:
        self.steps.append((time.perf_counter(), num_rows, 0, num_rows))
        super().rested(num_rows, seconds)


@dataclass
class LoadRun:
    """One load on one engine."""

    name: str
    kind: str
    start: float = 0.0  # start, by `time.perf_counter`
    seconds: float = 0.0  # duration until the last answer
    num_sent: int = 0
    steps: list[tuple[float, int, int, int]] = field(default_factory=list)  # see `WatchedPolicy`
    outputs: list[EngineOutput] = field(default_factory=list)  # the answers
    report: str = ""
    was_cut: bool = False  # whether requests were left unanswered

    @property
    def num_tokens(self) -> int:
        return sum(step[3] for step in self.steps)

    @property
    def goodput(self) -> float:
        """Tokens per second, from the first arrival to the last step."""
        return self.num_tokens / max(self.seconds, 1e-9)

    @property
    def latencies(self) -> list[float]:
        """Seconds from arrival to the last token."""
        return [item.lifespan[1] - item.created_time for item in self.outputs if item.finish_reason != "cancelled"]

    def buckets(self) -> list[tuple[float, float, float, float]]:
        """Return time, mean batch size, drafted nodes per row and tokens per second, second by second."""
        if not self.steps:
            return []
        times = np.array([step[0] for step in self.steps]) - self.start
        counts = np.array([step[1:] for step in self.steps], np.float64)
        places = (times / _BUCKET).astype(np.int64)
        found = []
        for place in range(int(places.max()) + 1):
            own = counts[places == place]
            rows, nodes, tokens = own.sum(axis=0) if len(own) else np.zeros(3)
            batch = rows / len(own) if len(own) else 0.0
            found.append(((place + 0.5) * _BUCKET, batch, nodes / rows if rows else 0.0, tokens / _BUCKET))
        return found


def run_load(world: World, settings: LoadSettings, stop: threading.Event) -> Iterator[tuple[str, list[LoadRun]]]:
    """Yield the current activity and the runs so far; raises `RefusedError` for too many requests, or no prompts."""
    prompts = world.encoded(settings.categories, settings.max_new_tokens)
    num = max(round(settings.rate * settings.seconds), 1)
    if num > _MOST_REQUESTS:
        raise RefusedError(
            f"That would be {num} requests, and {_MOST_REQUESTS} are the most: lower the rate or the time."
        )
    times = poisson(settings.rate, num, np.random.default_rng(settings.seed)).tolist()
    runs: list[LoadRun] = []
    yield "measuring what a forward costs (once per machine)", runs
    cost = world.worker.submit(load_or_profile, world.model).result()
    for name, source, policy in (
        ("no speculation", NONE, NoSpeculation()),
        (settings.source, settings.source, GoodputAuction(cost)),
    ):
        if stop.is_set():
            break
        run = LoadRun(name, "plain" if source == NONE else "drafted")
        runs.append(run)
        watched = WatchedPolicy(policy)
        assistant = SmartSpecConfig(world.new_source(source), policy=watched)
        engine = Engine(world.model, assistant, max_batch_size=settings.max_batch_size)
        yield f"warming up: {name}", runs
        engine.generate(prompts[:2], max_new_tokens=4)
        watched.steps.clear()
        for _ in _served(engine, watched, prompts, times, settings, run, stop):
            yield f"serving: {name}", runs
    yield "", runs


def _served(
    engine: Engine,
    policy: WatchedPolicy,
    prompts: Sequence[np.ndarray],
    times: Sequence[float],
    settings: LoadSettings,
    run: LoadRun,
    stop: threading.Event,
) -> Iterator[None]:
    """Send requests as they arrive, and fill in the run; yield now and then."""
    waiting = list(zip(times, islice(cycle(prompts), len(times))))[::-1]
    engine.start()
    run.start = shown = time.perf_counter()
    try:
        while waiting or run.num_sent > len(run.outputs):
            now = time.perf_counter()
            while waiting and waiting[-1][0] <= now - run.start:
                engine.add_request(waiting.pop()[1], max_new_tokens=settings.max_new_tokens)
                run.num_sent += 1
            output = engine.get_result(timeout=_next_look(waiting, run.start))
            if output is not None:
                run.outputs.append(output)
            elif run.num_sent == len(run.outputs):  # without open requests, `get_result` returns at once
                time.sleep(_next_look(waiting, run.start))
            run.seconds = time.perf_counter() - run.start
            if stop.is_set() or run.seconds > _PATIENCE * settings.seconds:
                run.was_cut = True
                return
            if time.perf_counter() - shown > _SHOW:
                shown, run.steps = time.perf_counter(), list(policy.steps)
                yield None
    finally:
        engine.stop(drain=False)
        run.steps = policy.steps
        run.report = str(engine.report())


def _next_look(waiting: Sequence[tuple[float, Any]], start: float) -> float:
    """Return the seconds to the next arrival, `_LOOK` at most."""
    until = waiting[-1][0] - (time.perf_counter() - start) if waiting else _LOOK
    return min(max(until, 0.001), _LOOK)


def load_html(doing: str, settings: LoadSettings, runs: Sequence[LoadRun]) -> str:
    """Return figures and charts of the runs so far."""
    head = f'<p class="ss-doing" role="status">{escape(doing)} …</p>' if doing else ""
    if not any(run.steps for run in runs):
        return f'<div class="ss-panel">{head}</div>' if doing else notice("Stopped before anything was served.")
    lines = {run.name: run.buckets() for run in runs}
    longest = max([settings.seconds, *(item[-1][0] for item in lines.values() if item)])
    pictures = [
        chart_html(title, unit, [_series(run, lines[run.name], column) for run in runs], "s", longest)
        for title, unit, column in (
            ("Tokens per second", "all requests together", _TOKENS),
            ("Requests running at once", "mean batch size", 1),
            ("Draft nodes per row", "chosen by the auction", 2),
        )
    ]
    details = ""
    if not doing and len(runs) == 2:
        details = (
            '<details class="ss-details"><summary>Report of the engine (engine.report())</summary><pre>'
            f"{escape(runs[-1].report)}</pre></details>"
        )
    body = f"{head}{_figures(runs, not doing)}{charts(*pictures)}{_note(settings, runs)}{details}"
    return f'<div class="ss-panel ss-load">{body}</div>'


def _series(run: LoadRun, points: Sequence[tuple[float, ...]], column: int) -> Series:
    # A second without a step has no batch size and no drafts to show.
    shown = [point for point in points if column == _TOKENS or point[1]]
    return Series(run.name, run.kind, [(point[0], point[column]) for point in shown])


def _figures(runs: Sequence[LoadRun], is_done: bool) -> str:
    rows = "".join(
        f'<tr><th scope="row"><i class="{run.kind}"></i>{escape(run.name)}</th><td>{run.goodput:.1f}</td>'
        f"<td>{_quantile(run.latencies, 0.5)}</td><td>{_quantile(run.latencies, 0.95)}</td>"
        f"<td>{sum(step[2] for step in run.steps) / max(sum(step[1] for step in run.steps), 1):.1f}</td>"
        f"<td>{len(run.latencies)} / {run.num_sent}</td></tr>"
        for run in runs
    )
    table = (
        '<div class="ss-scroll"><table class="ss-table"><thead><tr><th></th><th>tokens/s</th><th>median latency</th>'
        f"<th>95 % within</th><th>drafts per row</th><th>answered</th></tr></thead><tbody>{rows}</tbody></table></div>"
    )
    if not is_done or len(runs) < 2 or any(run.was_cut for run in runs):
        return table
    plain, drafted = runs
    faster = median(plain.latencies) / median(drafted.latencies) if plain.latencies and drafted.latencies else 0.0
    return (
        cards(
            card(f"{drafted.goodput / plain.goodput:.2f} {TIMES}", "tokens per second", True),
            card(f"{faster:.2f} {TIMES}", "faster answers (median)", True),
        )
        + table
    )


def _quantile(seconds: Sequence[float], share: float) -> str:
    return f"{np.quantile(seconds, share):.2f} s" if seconds else "\N{EN DASH}"


def _note(settings: LoadSettings, runs: Sequence[LoadRun]) -> str:
    cut = " A run was cut before all was answered." if any(run.was_cut for run in runs) else ""
    return (
        f'<p class="ss-fine">The same arrivals (Poisson, {settings.rate:g} a second) '
        "twice on the same engine code: first without drafts, then with them, so that neither takes time from "
        "the other; both are drawn on one clock. Where the engine keeps up with arrivals, tokens per second are those "
        f"that were asked for, and latency is what differs.{cut}</p>"
    )
