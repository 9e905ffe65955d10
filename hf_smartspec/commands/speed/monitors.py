"""Monitors of `generate` calls: times of prefill and of the whole call, and statistics."""

import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager

from transformers import PreTrainedModel

from ...decoding.statistics import GenerationStatistics
from ..common.timing import synchronize


class Monitor(ABC):
    """Monitor of one `generate` call: `seconds`, `prefill_seconds`, and statistics."""

    def __init__(self, model: PreTrainedModel):
        self.model = model
        self.seconds = self.prefill_seconds = 0.0

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Time the call within the context."""
        synchronize(self.model.device)
        self._start = time.perf_counter()
        yield
        self.seconds = self._seconds_since_start()

    def _seconds_since_start(self) -> float:
        synchronize(self.model.device)
        return time.perf_counter() - self._start

    @abstractmethod
    def statistics(self, num_tokens: int) -> GenerationStatistics:
        """Return the statistics of the call, which generated `num_tokens` tokens."""


class OwnMonitor(Monitor):
    """
    Monitor of this library's calls, by their own statistics: with a hook, the target would not be run as it is without
    one.
    """

    @contextmanager
    def watching(self) -> Iterator[None]:
        with super().watching():
            yield
        self._counts: GenerationStatistics = vars(self.model)["smartspec_statistics"].last
        outside = self.seconds - self._counts.seconds_total  # nearly all of it before the first step
        self.prefill_seconds = outside + self._counts.seconds_prefill

    def statistics(self, num_tokens: int) -> GenerationStatistics:
        return self._counts


class PlainMonitor(Monitor):
    """
    Monitor of transformers' plain decoding, by a hook on the target.

    Args:
        num_prompt_tokens (`int`): Prompt tokens of all rows, without padding.
    """

    def __init__(self, model: PreTrainedModel, num_prompt_tokens: int):
        super().__init__(model)
        self.num_prompt_tokens = num_prompt_tokens
        self.num_forwards = self.num_fed = 0

    @contextmanager
    def watching(self) -> Iterator[None]:
        def watch(module, args, kwargs, output):
            ids = kwargs["input_ids"] if "input_ids" in kwargs else args[0]
            is_prefill = self.num_fed < self.num_prompt_tokens
            self.num_forwards += 1
            self.num_fed += ids.numel()
            if is_prefill and self.num_fed >= self.num_prompt_tokens:
                self.prefill_seconds = self._seconds_since_start()

        hook = self.model.register_forward_hook(watch, with_kwargs=True)
        try:
            with super().watching():
                yield
        finally:
            hook.remove()

    def statistics(self, num_tokens: int) -> GenerationStatistics:
        return GenerationStatistics(steps=num_tokens, generated_tokens=num_tokens)


class AssistedMonitor(PlainMonitor):
    """
    Monitor of transformers' assisted decoding of one row: each forward feeds the last token and the draft, and yields
    one token that was not drafted.
    """

    def statistics(self, num_tokens: int) -> GenerationStatistics:
        num_drafted = self.num_fed - self.num_prompt_tokens - (self.num_forwards - 1)
        return GenerationStatistics(
            steps=self.num_forwards,
            forwards=self.num_forwards,
            drafted_tokens=num_drafted,
            accepted_tokens=num_tokens - self.num_forwards,
            generated_tokens=num_tokens,
        )
