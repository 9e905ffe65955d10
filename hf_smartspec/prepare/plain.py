"""Decoding without speculation, with this library's seeds, for calls whose drafts could not be verified."""

import copy
import time
from typing import Any

import torch
from transformers import LogitsProcessorList, StoppingCriteriaList
from transformers.generation import GenerateDecoderOnlyOutput, GenerateEncoderDecoderOutput

from ..decoding.statistics import GenerationStatistics
from ..sampling.noise import SeededGumbelLogitsProcessor
from .call import PreparedCall


class _RecordingGumbel(SeededGumbelLogitsProcessor):
    """Seeded noise that keeps the scores before it is added, which `generate` returns as `scores`."""

    def __init__(self, seeds: list[int], records: bool):
        super().__init__(seeds)
        self.records = records
        self.scores: list[torch.Tensor] = []

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        if self.records:
            self.scores.append(scores)
        return super().__call__(input_ids, scores)


class _CountingCriteria(StoppingCriteriaList):
    """Stopping criteria that count steps and the tokens of rows up to their ends, and time the first step's end."""

    def __init__(self, criteria: StoppingCriteriaList):
        super().__init__(criteria)
        self.num_steps = 0
        self.first_end = 0.0
        self.num_tokens: torch.Tensor | int = 0  # stays on the device until it is read
        self._is_done: torch.Tensor | None = None

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor, **kwargs: Any) -> torch.BoolTensor:
        is_done = super().__call__(input_ids, scores, **kwargs)
        was_done = torch.zeros_like(is_done) if self._is_done is None else self._is_done
        self.num_tokens = self.num_tokens + (~was_done).sum()
        self._is_done = was_done | is_done
        self.num_steps += 1
        self.first_end = self.first_end or time.perf_counter()
        return is_done


def decode_plainly(
    prepared: PreparedCall,
) -> tuple[torch.Tensor | GenerateDecoderOnlyOutput | GenerateEncoderDecoderOutput, GenerationStatistics]:
    """Run transformers' own loop. Sampling uses seeded noise: a seed gives the same tokens as with speculation."""
    start = time.perf_counter()
    counts = _CountingCriteria(prepared.stopping_criteria)
    config = copy.copy(prepared.generation_config)
    logits_processor, noise = prepared.logits_processor, None
    if config.do_sample:
        noise = _RecordingGumbel([seed for seed in prepared.seeds if seed is not None], bool(config.output_scores))
        logits_processor = LogitsProcessorList([*logits_processor, noise])
        config.do_sample = False
    model: Any = prepared.model
    output = model._sample(
        prepared.input_ids,
        logits_processor=logits_processor,
        stopping_criteria=counts,
        generation_config=config,
        streamer=prepared.streamer,
        **prepared.model_kwargs,
    )
    if noise is not None and noise.records and not isinstance(output, torch.Tensor):
        output.scores = tuple(noise.scores)
    statistics = GenerationStatistics(
        steps=int(counts.num_tokens),
        forwards=counts.num_steps,
        generated_tokens=int(counts.num_tokens),
        seconds_prefill=counts.first_end - start,
        seconds_total=time.perf_counter() - start,
    )
    return output, statistics
