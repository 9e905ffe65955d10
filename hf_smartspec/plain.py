"""Plain decoding with this library's seeds, for calls in which nothing can be verified ahead."""

import copy
from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.generation import BaseStreamer, GenerateDecoderOnlyOutput, GenerateEncoderDecoderOutput

from .processors import SeededGumbelLogitsProcessor


class _RecordingGumbel(SeededGumbelLogitsProcessor):
    """Remembers the scores before the noise, which are what `generate` returns as `scores`."""

    def __init__(self, seeds: list[int], records: bool):
        super().__init__(seeds)
        self.records = records
        self.scores: list[torch.Tensor] = []

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        if self.records:
            self.scores.append(scores)
        return super().__call__(input_ids, scores)


def decode_plainly(
    model: PreTrainedModel,
    input_ids: torch.LongTensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    seeds: list[int | None],
    streamer: BaseStreamer | None,
    model_kwargs: dict[str, Any],
) -> torch.Tensor | GenerateDecoderOnlyOutput | GenerateEncoderDecoderOutput:
    """transformers' own loop. Sampling goes through seeded noise: the same seed gives the same tokens here too."""
    config = copy.copy(generation_config)
    noise = None
    if config.do_sample:
        noise = _RecordingGumbel([seed for seed in seeds if seed is not None], bool(config.output_scores))
        logits_processor = LogitsProcessorList([*logits_processor, noise])
        config.do_sample = False
    output = model._sample(  # type: ignore[operator]
        input_ids,
        logits_processor=logits_processor,
        stopping_criteria=stopping_criteria,
        generation_config=config,
        streamer=streamer,
        **model_kwargs,
    )
    if noise is not None and noise.records and not isinstance(output, torch.Tensor):
        output.scores = tuple(noise.scores)
    return output
