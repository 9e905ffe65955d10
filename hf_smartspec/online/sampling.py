"""Texts to learn from, said by the target, by the drafter, or by both in turn (section 4.1, "Sampling")."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from transformers import DynamicCache, LogitsProcessor, LogitsProcessorList, PreTrainedModel

from ..candidates.committed import LAST
from .samples import Sample


class MixedWithTarget(LogitsProcessor):
    """
    Has a drafter that generates sample every token from `share * p + (1 - share) * q`, p being the target's
    distribution and q its own.

    Args:
        target (`PreTrainedModel`): Of the same vocabulary.
        attention_mask (`torch.Tensor` of shape `[rows, length]`): Of the prompts, padded on the left.
        share (`float`): The target's.
    """

    def __init__(self, target: PreTrainedModel, attention_mask: torch.Tensor, share: float):
        self.target, self.share, self._mask = target, share, attention_mask
        self._cache, self._num_seen = DynamicCache(config=target.config), 0

    @torch.no_grad()
    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        new = input_ids.shape[1] - self._mask.shape[1]
        mask = torch.cat([self._mask, self._mask.new_ones(len(self._mask), new)], dim=1)
        positions = (mask.cumsum(1) - 1).clamp(min=0)[:, self._num_seen :]
        model: Any = self.target
        output = model(
            input_ids=input_ids[:, self._num_seen :],
            attention_mask=mask,
            position_ids=positions,
            past_key_values=self._cache,
        )
        self._num_seen = input_ids.shape[1]
        p, q = output.logits[:, -1].float().softmax(-1), scores.float().softmax(-1)
        mixed: Any = (self.share * p[:, : q.shape[1]] + (1 - self.share) * q).log()
        return mixed


@torch.no_grad()
def sampled(
    draft: PreTrainedModel, target: PreTrainedModel, prompts: Sequence[np.ndarray], share: float, max_new_tokens: int
) -> list[np.ndarray]:
    """
    Responses to prompts, each token said by the target with probability `share`, else by the draft.

    Returns:
        list of `np.ndarray` of shape `[n]`, int32: Up to their ends.
    """
    config: Any = target.generation_config
    pad, ends = config.pad_token_id or 0, config.eos_token_id
    length = max(map(len, prompts))
    ids = torch.tensor([[pad] * (length - len(item)) + [*map(int, item)] for item in prompts], device=target.device)
    mask = torch.tensor([[0] * (length - len(item)) + [1] * len(item) for item in prompts], device=target.device)
    processors = LogitsProcessorList([MixedWithTarget(target, mask, share)] if share else [])
    model: Any = draft
    output = model.generate(
        input_ids=ids,
        attention_mask=mask,
        do_sample=True,
        top_k=0,
        top_p=1.0,
        temperature=1.0,
        max_new_tokens=max_new_tokens,
        eos_token_id=ends,
        pad_token_id=pad,
        logits_processor=processors,
    )
    stops = set(ends if isinstance(ends, list) else [ends])
    return [_up_to_end(row, stops) for row in output[:, length:].tolist()]


def _up_to_end(row: list[int], ends: set[int]) -> np.ndarray:
    end = next((place + 1 for place, token in enumerate(row) if token in ends), len(row))
    return np.array(row[:end], np.int32)


@torch.no_grad()
def taught(
    target: PreTrainedModel,
    texts: Sequence[tuple[np.ndarray, np.ndarray]],
    top_k: int,
    layers: Sequence[int] = (),
    is_greedy: bool = True,
) -> list[Sample]:
    """
    Samples of texts (prompt and response), by one forward of the target over all of them: what it thinks of each token
    of the responses, whoever said it.
    """
    length = max(len(prompt) + len(response) for prompt, response in texts)
    ids = torch.zeros(len(texts), length, dtype=torch.long)
    for row, (prompt, response) in enumerate(texts):
        ids[row, : len(prompt) + len(response)] = torch.from_numpy(np.concatenate([prompt, response]).astype(np.int64))
    decoder: Any = target.get_decoder()
    output = decoder(input_ids=ids.to(target.device), use_cache=False, output_hidden_states=bool(layers))
    states = {
        layer: output.last_hidden_state if layer == LAST else output.hidden_states[layer]
        for layer in dict.fromkeys(layers)
    }
    head: Any = target.get_output_embeddings()
    samples = []
    for row, (prompt, response) in enumerate(texts):
        first, end = len(prompt), len(prompt) + len(response)
        logits = head(output.last_hidden_state[row, first - 1 : end - 1]).float()
        best = logits.softmax(-1).topk(min(top_k, logits.shape[-1]), dim=-1)
        samples.append(
            Sample(
                prompt.astype(np.int32),
                response.astype(np.int32),
                best.indices.to(torch.int32).cpu(),
                best.values.to(torch.float16).cpu(),
                np.zeros(len(response), bool),
                is_greedy,
                {layer: item[row, : end - 1].cpu() for layer, item in states.items()},
            )
        )
    return samples
