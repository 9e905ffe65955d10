"""Samples to train on: a request's tokens, the target's distributions, and the hidden states that drafters read."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence

from .drafted import Drafted, Layout


@dataclass(frozen=True, eq=False)
class Sample:
    """
    A request that has ended. All data are on the CPU, whatever the target's device.

    Args:
        prompt (`np.ndarray` of shape `[p]`, int32): The prompt, without a beginning whose hidden states were not
            computed again.
        response (`np.ndarray` of shape `[n]`, int32): Tokens that the target generated.
        top_ids (`torch.Tensor` of shape `[n, k]`, int32): The target's likeliest tokens in the place of each.
        top_probs (`torch.Tensor` of shape `[n, k]`): Their probabilities, before any processor: float16, or float32
            where all tokens are kept. The rest up to 1 belongs to all other tokens.
        errors (`np.ndarray` of shape `[n]`, bool): Tokens in whose place a draft had others only.
        is_greedy (`bool`): Whether the target picked the likeliest tokens.
        hidden (mapping of `int` to `torch.Tensor` of shape `[p + n - 1, hidden_size]`): Hidden states by layer, of all
            tokens but the last. Empty for drafters that read tokens only.
        encoded (`np.ndarray` of shape `[e]`, int32, *optional*): Tokens that the target's encoder has read.
        drafted (`Drafted`, *optional*): Rejected drafts, where these are learnt from.
    """

    prompt: np.ndarray
    response: np.ndarray
    top_ids: torch.Tensor
    top_probs: torch.Tensor
    errors: np.ndarray
    is_greedy: bool = True
    hidden: Mapping[int, torch.Tensor] = field(default_factory=dict)
    encoded: np.ndarray | None = None
    drafted: Drafted | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.prompt) + len(self.response)

    @property
    def num_read(self) -> int:
        """Number of tokens, rejected drafts included."""
        return self.num_tokens + (0 if self.drafted is None else len(self.drafted))

    @cached_property
    def num_bytes(self) -> int:
        arrays = self.prompt.nbytes + self.response.nbytes + self.errors.nbytes
        arrays += 0 if self.encoded is None else self.encoded.nbytes
        arrays += 0 if self.drafted is None else self.drafted.num_bytes
        return arrays + sum(item.nbytes for item in (self.top_ids, self.top_probs, *self.hidden.values()))

    def end(self, max_length: int) -> "Sample":
        """Return the sample cut to `max_length` tokens: at the prompt's start, and then at the response's end."""
        if self.num_tokens <= max_length:
            return self
        most = min(len(self.response), max_length - 1)  # at least one token of the prompt stays
        prompt, response = self.prompt[len(self.prompt) - (max_length - most) :], self.response[:most]
        first = len(self.prompt) - len(prompt)
        # Copies, since views would hold the memory of the whole sample.
        hidden = {layer: states[first : first + max_length - 1].clone() for layer, states in self.hidden.items()}
        return Sample(
            prompt.copy(), response.copy(), self.top_ids[:most].clone(), self.top_probs[:most].clone(),
            self.errors[:most].copy(), self.is_greedy, hidden, self.encoded,
            None if self.drafted is None else self.drafted.within(most),
        )  # fmt: skip


class Batch(NamedTuple):
    """
    Samples padded on the right. With a `layout`, rejected drafts follow each row's text; their `top_ids` and
    `top_probs` are the target's distributions after them.

    Args:
        ids (`torch.Tensor` of shape `[rows, length]`, int64): Token ids.
        is_learnt (`torch.Tensor` of shape `[rows, length]`, bool): Tokens of responses that are trained on.
        is_response (`torch.Tensor` of shape `[rows, length]`, bool): Tokens of responses.
        top_ids, top_probs (`torch.Tensor` of shape `[rows, length, k]`, int64 and float32): The target's likeliest
            tokens in the place of each token, and their probabilities.
        hidden (mapping of `int` to `torch.Tensor` of shape `[rows, length, hidden_size]`): Hidden states by layer;
            zeros after the ends.
        encoded, is_encoded (`torch.Tensor` of shape `[rows, e]`, int64 and bool, *optional*): Tokens that the encoder
            has read, and which of these are no padding.
        layout (`Layout`, *optional*): Places of rejected drafts.
    """

    ids: torch.Tensor
    is_learnt: torch.Tensor
    is_response: torch.Tensor
    top_ids: torch.Tensor
    top_probs: torch.Tensor
    hidden: Mapping[int, torch.Tensor]
    encoded: torch.Tensor | None = None
    is_encoded: torch.Tensor | None = None
    layout: Layout | None = None

    @classmethod
    def with_drafts(cls, samples: Sequence[Sample], device: torch.device, only_drafts: bool) -> "Batch":
        """
        Return a batch with rejected drafts, for drafters that read tokens only.

        Args:
            only_drafts (`bool`): Whether to train only on those tokens of texts in whose place there was a draft.
        """
        drafts = [item.drafted or _NOTHING for item in samples]
        plain = cls.of(samples, device)
        texts = [np.concatenate([item.prompt, item.response, own.tokens]) for item, own in zip(samples, drafts)]
        ids = _padded(texts).long()
        more = ids.shape[1] - plain.ids.shape[1]
        starts, ends = [len(item.prompt) for item in samples], [item.num_tokens for item in samples]
        layout = Layout.of(starts, ends, drafts, ids.shape[1])
        is_learnt, is_response = (pad(item, (0, more)) for item in (plain.is_learnt, plain.is_response))
        top_ids, top_probs = (pad(item, (0, 0, 0, more)) for item in (plain.top_ids, plain.top_probs))
        for row, (start, end, own) in enumerate(zip(starts, ends, drafts)):
            if only_drafts:
                asked = own.is_asked if own is not _NOTHING else np.zeros(end - start, bool)
                is_learnt[row, start:end] = torch.from_numpy(asked).to(device)
            if len(own):
                top_ids[row, end : end + len(own)] = own.top_ids.to(top_ids)
                top_probs[row, end : end + len(own)] = own.top_probs.to(top_probs)
        return cls(ids.to(device), is_learnt, is_response, top_ids, top_probs, plain.hidden, layout=layout.to(device))

    @property
    def chosen(self) -> torch.Tensor:
        """Tokens that each line learns, int64 `[rows, length]`: a text's own, the target's likeliest after a draft."""
        if self.layout is None:
            return self.ids
        return torch.where(self.layout.is_drafted, self.top_ids[..., 0], self.ids)

    @classmethod
    def of(cls, samples: Sequence[Sample], device: torch.device, only_errors: bool = False) -> "Batch":
        """
        Return a batch of texts without rejected drafts.

        Args:
            only_errors (`bool`): Whether to train only on tokens that drafts got wrong (algorithm 1).
        """
        texts = [np.concatenate([item.prompt, item.response]) for item in samples]
        learnt = [_whole(item, item.errors if only_errors else np.ones_like(item.errors)) for item in samples]
        responses = [_whole(item, np.ones_like(item.errors)) for item in samples]
        tops = [(_shifted(item, item.top_ids), _shifted(item, item.top_probs)) for item in samples]
        hidden = {
            layer: pad_sequence([_longer(item.hidden[layer]) for item in samples], batch_first=True).to(device)
            for layer in samples[0].hidden
        }
        read = [item.encoded for item in samples if item.encoded is not None]
        has_encoder = len(read) == len(samples)
        return cls(
            _padded(texts).long().to(device),
            _padded(learnt).to(device),
            _padded(responses).to(device),
            pad_sequence([ids for ids, _ in tops], batch_first=True).long().to(device),
            pad_sequence([probs for _, probs in tops], batch_first=True).float().to(device),
            hidden,
            _padded(read).long().to(device) if has_encoder else None,
            _padded([np.ones(len(item), bool) for item in read]).to(device) if has_encoder else None,
        )


def in_batches(samples: Sequence[Sample], max_tokens: int) -> list[list[Sample]]:
    """Group samples by length into batches of at most `max_tokens` tokens with padding, or of one sample."""
    batches: list[list[Sample]] = []
    for sample in sorted(samples, key=lambda item: item.num_read):
        if not batches or (len(batches[-1]) + 1) * sample.num_read > max_tokens:
            batches.append([])
        batches[-1].append(sample)
    return batches


def _padded(arrays: Sequence[np.ndarray]) -> torch.Tensor:
    return pad_sequence([torch.from_numpy(item) for item in arrays], batch_first=True)


def _whole(sample: Sample, marks: np.ndarray) -> np.ndarray:
    """Return marks of a response as marks of the whole text, with False for the prompt."""
    return np.concatenate([np.zeros(len(sample.prompt), bool), marks])


def _shifted(sample: Sample, of_response: torch.Tensor) -> torch.Tensor:
    return torch.cat([of_response.new_zeros(len(sample.prompt), of_response.shape[1]), of_response])


def _longer(states: torch.Tensor) -> torch.Tensor:
    """Return states with a line of zeros for the last token, whose state was not computed."""
    return torch.cat([states, states.new_zeros(1, states.shape[1])])


_NO_TOKENS = np.zeros(0, np.int64)
_NOTHING = Drafted(
    np.zeros(0, bool), _NO_TOKENS, _NO_TOKENS, _NO_TOKENS, torch.zeros(0, 1, dtype=torch.int32), torch.zeros(0, 1)
)
