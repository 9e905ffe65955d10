"""Monitors of `generate` calls: times of prefill and of the whole call, and statistics."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from transformers import PreTrainedModel

from ...decoding.statistics import GenerationStatistics
from ..common.runs import synchronize


class Monitor:
    """
    Monitor of a call of this library, by its own statistics: with a hook, the target would not be run as it is without
    one.
    """

    def __init__(self, model: PreTrainedModel):
        self.model = model
        self.seconds = self.prefill_seconds = 0.0

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Time the call within the context."""
        self._begin()
        yield
        self.seconds = self._seconds()
        self._counts: GenerationStatistics = vars(self.model)["smartspec_statistics"].last
        outside = self.seconds - self._counts.seconds_total  # nearly all of it before the first step
        self.prefill_seconds = outside + self._counts.seconds_prefill

    def _begin(self) -> None:
        synchronize(self.model.device)
        self._start = time.perf_counter()

    def _seconds(self) -> float:
        synchronize(self.model.device)
        return time.perf_counter() - self._start

    def statistics(self, num_tokens: int) -> GenerationStatistics:
        """Return the statistics of the call, which generated `num_tokens` tokens."""
        return self._counts


class HookMonitor(Monitor):
    """
    Monitor of a call of transformers, by a hook on the target.

    Args:
        num_prompt_tokens (`int`): Prompt tokens of all rows, without padding.
        is_assisted (`bool`): Whether each forward feeds the last token and a draft of one row, and yields one token
            that was not drafted.
    """

    def __init__(self, model: PreTrainedModel, num_prompt_tokens: int, is_assisted: bool):
        super().__init__(model)
        self.num_prompt_tokens, self.is_assisted = num_prompt_tokens, is_assisted
        self.num_forwards = self.num_fed = 0

    @contextmanager
    def watching(self) -> Iterator[None]:
        hook = self.model.register_forward_hook(self._watch, with_kwargs=True)
        self._begin()
        try:
            yield
            self.seconds = self._seconds()
        finally:
            hook.remove()

    def _watch(self, module: Any, args: Any, kwargs: Any, output: Any) -> None:
        is_prefill = self.num_fed < self.num_prompt_tokens
        self.num_forwards += 1
        self.num_fed += (kwargs["input_ids"] if "input_ids" in kwargs else args[0]).numel()
        if is_prefill and self.num_fed >= self.num_prompt_tokens:
            self.prefill_seconds = self._seconds()

    def statistics(self, num_tokens: int) -> GenerationStatistics:
        if not self.is_assisted:
            return GenerationStatistics(steps=num_tokens, generated_tokens=num_tokens)
        return GenerationStatistics(
            steps=self.num_forwards,
            forwards=self.num_forwards,
            drafted_tokens=self.num_fed - self.num_prompt_tokens - (self.num_forwards - 1),
            accepted_tokens=num_tokens - self.num_forwards,
            generated_tokens=num_tokens,
        )
