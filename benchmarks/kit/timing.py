"""Timing of functions side by side, and of a model's forwards."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import median
from typing import Any

import torch
from transformers import PreTrainedModel

from hf_smartspec.commands.common.runs import synchronize
from hf_smartspec.target_model.written import written_decoder
from hf_smartspec.target_model.written.decoder import WrittenDecoder


def side_by_side(
    functions: dict[str, Callable[[], object]], repeats: int, device: torch.device, warmup: int = 2
) -> dict[str, float]:
    """Return median seconds of each function. They take turns, so that changes of the machine's load meet all alike."""
    seconds: dict[str, list[float]] = {name: [] for name in functions}
    for turn in range(warmup + repeats):
        for name, function in functions.items():
            synchronize(device)
            start = time.perf_counter()
            function()
            synchronize(device)
            if turn >= warmup:
                seconds[name].append(time.perf_counter() - start)
    return {name: median(values) for name, values in seconds.items()}


class Stopwatch:
    """Seconds that a model's forwards take while the stopwatch is attached to it, written out or not."""

    def __init__(self) -> None:
        self.seconds = 0.0

    @contextmanager
    def attached_to(self, model: PreTrainedModel) -> Iterator["Stopwatch"]:
        decoder = written_decoder(model, thoroughly=True)
        with self._hooked(model) if decoder is None else self._wrapped(decoder, model.device):
            yield self

    @contextmanager
    def _wrapped(self, decoder: WrittenDecoder, device: torch.device) -> Iterator[None]:
        """Time the calls of a written-out decoder, which would not be used if its model had a hook."""
        compute = WrittenDecoder.__call__

        def timed(called: WrittenDecoder, *args: Any) -> torch.Tensor:
            if called is not decoder:
                return compute(called, *args)
            synchronize(device)
            start = time.perf_counter()
            logits = compute(called, *args)
            synchronize(device)
            self.seconds += time.perf_counter() - start
            return logits

        WrittenDecoder.__call__ = timed  # type: ignore[method-assign, assignment]
        try:
            yield
        finally:
            WrittenDecoder.__call__ = compute  # type: ignore[method-assign]

    @contextmanager
    def _hooked(self, model: PreTrainedModel) -> Iterator[None]:
        device, start = model.device, 0.0

        def before(*_):
            nonlocal start
            synchronize(device)
            start = time.perf_counter()

        def after(*_):
            synchronize(device)
            self.seconds += time.perf_counter() - start

        hooks = [model.register_forward_pre_hook(before), model.register_forward_hook(after)]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
