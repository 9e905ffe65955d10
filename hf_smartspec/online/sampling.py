"""Texts to learn from, said by the target, by the drafter, or by both in turn (section 4.1, "Sampling")."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import DynamicCache, EncoderDecoderCache, LogitsProcessor, LogitsProcessorList, PreTrainedModel

from ..candidates.committed import LAST
from ..sampling.top import likeliest_tokens
from ..target_model.compat import cache_name
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
        self._cache_name = cache_name(target.forward)

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        p, q = self._logits(input_ids).float().softmax(-1), scores.float().softmax(-1)
        mixed: Any = (self.share * p[:, : q.shape[1]] + (1 - self.share) * q).log()
        return mixed

    @torch.no_grad()
    def _logits(self, input_ids: torch.LongTensor) -> torch.Tensor:
        """The target's scores of the next token `[rows, vocabulary]`."""
        new = input_ids.shape[1] - self._mask.shape[1]
        mask = torch.cat([self._mask, self._mask.new_ones(len(self._mask), new)], dim=1)
        positions = (mask.cumsum(1) - 1).clamp(min=0)[:, self._num_seen :]
        model: Any = self.target
        output = model(
            input_ids=input_ids[:, self._num_seen :],
            attention_mask=mask,
            position_ids=positions,
            **{self._cache_name: self._cache},
        )
        self._num_seen = input_ids.shape[1]
        logits: torch.Tensor = output.logits[:, -1]
        return logits


class MixedWithEncodedTarget(MixedWithTarget):
    """
    The same behind a target's encoder.

    Args:
        input_ids, attention_mask (`torch.Tensor` of shape `[rows, length]`): What the encoder reads.
    """

    def __init__(self, target: PreTrainedModel, input_ids: torch.Tensor, attention_mask: torch.Tensor, share: float):
        super().__init__(target, attention_mask, share)
        encoder: Any = target.get_encoder()
        with torch.no_grad():
            self._read = encoder(input_ids=input_ids, attention_mask=attention_mask)
        self._both = EncoderDecoderCache(DynamicCache(config=target.config), DynamicCache(config=target.config))

    @torch.no_grad()
    def _logits(self, input_ids: torch.LongTensor) -> torch.Tensor:
        model: Any = self.target
        output = model(
            encoder_outputs=self._read,
            attention_mask=self._mask,
            decoder_input_ids=input_ids[:, self._num_seen :],
            **{self._cache_name: self._both},
        )
        self._num_seen = input_ids.shape[1]
        logits: torch.Tensor = output.logits[:, -1]
        return logits


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
    has_encoder = target.config.is_encoder_decoder
    processors = LogitsProcessorList()
    if share:
        mixed = MixedWithEncodedTarget(target, ids, mask, share) if has_encoder else None
        processors.append(mixed or MixedWithTarget(target, mask, share))
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
    return [_up_to_end(row, stops) for row in output[:, 1 if has_encoder else length :].tolist()]


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
    of the responses, whoever said it. Prompts are what its encoder reads, where it has one.
    """
    if target.config.is_encoder_decoder:
        return _taught_behind_encoder(target, texts, top_k, is_greedy)
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
        ids, probs = _top(head(output.last_hidden_state[row, first - 1 : end - 1]), top_k)
        hidden = {layer: item[row, : end - 1].cpu() for layer, item in states.items()}
        right = np.zeros(len(response), bool)
        samples.append(Sample(prompt.astype(np.int32), response.astype(np.int32), ids, probs, right, is_greedy, hidden))
    return samples


def _top(logits: torch.Tensor, top_k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The likeliest tokens of each line and their probabilities, as samples keep them."""
    ids, probs = likeliest_tokens(logits.float(), top_k)
    return ids.to(torch.int32).cpu(), probs.to(torch.float16).cpu()


def _taught_behind_encoder(
    target: PreTrainedModel, texts: Sequence[tuple[np.ndarray, np.ndarray]], top_k: int, is_greedy: bool
) -> list[Sample]:
    config: Any = target.config.get_text_config(decoder=True)
    start = target.generation_config.decoder_start_token_id
    start = config.decoder_start_token_id if start is None else start
    read = [torch.from_numpy(prompt.astype(np.int64)) for prompt, _ in texts]
    said = [torch.from_numpy(np.array([start, *response[:-1]], np.int64)) for _, response in texts]
    model: Any = target
    output = model(
        input_ids=pad_sequence(read, batch_first=True).to(target.device),
        attention_mask=pad_sequence([torch.ones_like(item) for item in read], batch_first=True).to(target.device),
        decoder_input_ids=pad_sequence(said, batch_first=True).to(target.device),
        use_cache=False,
    )
    begin, samples = np.array([start], np.int32), []
    for row, (prompt, response) in enumerate(texts):
        ids, probs = _top(output.logits[row, : len(response)], top_k)
        right = np.zeros(len(response), bool)
        read_ids = prompt.astype(np.int32)
        samples.append(Sample(begin, response.astype(np.int32), ids, probs, right, is_greedy, {}, read_ids))
    return samples
