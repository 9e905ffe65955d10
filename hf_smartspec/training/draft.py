"""Distillation of a draft model with forward KL divergence (Online Speculative Decoding, section 4)."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from .accuracy import accuracy, likeliest
from .texts import IGNORED, Text


class DraftTraining(nn.Module):
    """
    Module whose forward returns a draft model's loss: the forward KL divergence from the target on the tokens of
    responses, up to the target's entropy, which is constant. Only the draft model is trained and saved; the target is
    frozen.

    Args:
        target (`PreTrainedModel`): A decoder.
        draft (`PreTrainedModel`): A decoder with the same vocabulary, in float32.
    """

    def __init__(self, target: PreTrainedModel, draft: PreTrainedModel):
        super().__init__()
        self.draft = draft.requires_grad_(True)
        self._frozen = (target.eval().requires_grad_(False),)  # in a tuple, so that it is no submodule

    @property
    def target(self) -> PreTrainedModel:
        return self._frozen[0]

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        """
        Return the loss of a batch.

        Args:
            input_ids, labels (`torch.Tensor` of shape `[rows, length]`): As `texts.collate` makes them.

        Returns:
            `loss`: the mean cross-entropy with the target's distributions.
        """
        with torch.autocast(input_ids.device.type, self.target.dtype, enabled=self.target.dtype.itemsize == 2):
            where = labels[:, 1:] != IGNORED
            logits, wanted = logits_after(self.draft, input_ids, where), self._target_probs(input_ids, where)
        if not len(logits):
            return {"loss": logits.sum()}
        return {"loss": -(wanted * logits.float().log_softmax(dim=-1)).sum(-1).mean()}

    @torch.no_grad()
    def _target_probs(self, input_ids: torch.Tensor, where: torch.Tensor) -> torch.Tensor:
        return logits_after(self.target, input_ids, where).float().softmax(dim=-1)

    def accuracy(self, texts: Sequence[Text], max_length: int, batch_size: int = 8) -> list[dict[int, float]]:
        """Return the share of places where the right next token is among the draft model's 1, 3 or 8 likeliest."""
        return accuracy(self._guesses, 1, texts, max_length, batch_size, self.target.device)

    @torch.no_grad()
    def _guesses(self, ids: torch.Tensor, labels: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        following = labels[:, 1:]
        where = following != IGNORED
        yield likeliest(logits_after(self.draft, ids, where)), following[where]


def logits_after(model: PreTrainedModel, ids: torch.Tensor, where: torch.Tensor) -> torch.Tensor:
    """
    Return a decoder's logits `[n, vocab_size]` after some tokens, from its own forward, which may scale or cap them.

    Args:
        ids (`torch.Tensor` of shape `[rows, length]`): Token ids.
        where (`torch.Tensor` of shape `[rows, length - 1]`, bool): The n tokens whose logits are returned; never the
            last of a row.
    """
    first = int(where.any(0).int().argmax())
    decoder: Any = model
    arguments: dict[str, Any] = {}
    if decoder._supports_logits_to_keep():  # skips logits of prompts
        arguments["logits_to_keep"] = ids.shape[1] - first
    logits = decoder(input_ids=ids, use_cache=False, **arguments).logits
    kept: torch.Tensor = logits[:, first - ids.shape[1] : -1][where[:, first:]]
    return kept
