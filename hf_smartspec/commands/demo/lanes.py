"""One lane of a race: an answer, with the time and the source of each of its tokens."""

import queue
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from transformers.generation.streamers import BaseStreamer

from ...decoding.statistics import GenerationStatistics
from ...decoding.trace import TracedStep
from ...generate import enabled
from ...prepare.config import SmartSpecConfig
from ..common.runs import Decoding, synchronize
from .world import World

_SIGN_OF_LIFE = 0.5  # seconds between two looks at a computation, which slow it down
T = TypeVar("T")


class StoppedError(Exception):
    """Raised in a lane after the stop button was pressed."""


@dataclass
class Lane:
    """One answer."""

    tokens: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)  # seconds from the call to each token
    # Label of the source that drafted each token; None for the target's own.
    sources: list[str | None] = field(default_factory=list)
    steps: list[TracedStep] = field(default_factory=list)  # the steps, with their draft trees
    seconds: float = 0.0  # duration of the call
    statistics: GenerationStatistics = field(default_factory=GenerationStatistics)
    was_stopped: bool = False  # whether the call was stopped before its end

    @property
    def labels(self) -> list[str]:
        """Labels of all sources that drafted, which give each source its colour."""
        return sorted({label for step in self.steps for label in step.sources})

    @property
    def speed(self) -> float:
        """Tokens per second, prompt included."""
        return len(self.tokens) / self.seconds if self.seconds else 0.0


class _Clock(BaseStreamer):
    """Streamer that records tokens and their times."""

    def __init__(self, lane: Lane, start: float, stop: threading.Event):
        self.lane, self.start, self.stop = lane, start, stop
        self._has_prompt = False

    def put(self, value: torch.Tensor) -> None:
        if not self._has_prompt:  # comes first
            self._has_prompt = True
            return
        self.lane.tokens += value.flatten().tolist()
        self.lane.times.append(time.perf_counter() - self.start)
        if self.stop.is_set():
            raise StoppedError

    def end(self) -> None:
        pass


def run_lane(
    world: World,
    ids: list[int],
    decoding: Decoding,
    max_new_tokens: int,
    assistant: SmartSpecConfig | None,
    stop: threading.Event,
    lane: Lane,
) -> None:
    """Generate one answer and fill in the lane; without an assistant, by transformers' own `generate`."""
    model: Any = world.model
    inputs = torch.tensor([ids], device=model.device)
    arguments: dict[str, Any] = {"attention_mask": torch.ones_like(inputs), "max_new_tokens": max_new_tokens}
    if assistant is None:
        arguments |= {"do_sample": False, "logits_processor": decoding.plain_processors()}
    else:
        arguments |= decoding.own_arguments() | {"assistant": assistant}
    with enabled(model):
        synchronize(model.device)
        start = time.perf_counter()
        try:
            model.generate(inputs, streamer=_Clock(lane, start, stop), **arguments)
            lane.seconds = time.perf_counter() - start
            lane.statistics = model.smartspec_statistics.last if assistant is not None else lane.statistics
            traces = model.smartspec_statistics.last_traces if assistant is not None else None
        except StoppedError:
            lane.seconds, lane.was_stopped, traces = time.perf_counter() - start, True, None
    lane.sources = [None] * len(lane.tokens)
    if traces:
        lane.sources, lane.steps = traces[0].token_sources, traces[0].steps


def watched(world: World, work: Callable[[], T]) -> Iterator[T | None]:
    """Do `work` in the thread that computes; yield None now and then, and finally the result of `work`."""
    done: queue.SimpleQueue[None] = queue.SimpleQueue()
    future: Future[T] = world.worker.submit(work)
    future.add_done_callback(lambda _: done.put(None))
    while True:
        try:
            done.get(timeout=_SIGN_OF_LIFE)
            break
        except queue.Empty:
            yield None
    yield future.result()
