"""A draft model learns the target's distributions (Online Speculative Decoding, section 4: forward KL divergence)."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from .accuracy import accuracy, likeliest
from .texts import IGNORED, Text


class DraftTraining(nn.Module):
    """
    The loss of a draft model: its forward KL divergence from the target where responses are decoded, but for what the
    target alone adds to it. Only the draft is learnt: the target is frozen, and no part of what is saved.

    Args:
        target (`PreTrainedModel`): A decoder.
        draft (`PreTrainedModel`): One of the same vocabulary, in float32.
    """

    def __init__(self, target: PreTrainedModel, draft: PreTrainedModel):
        super().__init__()
        self.draft = draft.requires_grad_(True)
        self._others = (target.eval().requires_grad_(False),)

    @property
    def target(self) -> PreTrainedModel:
        return self._others[0]

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        """
        Args:
            input_ids, labels (`torch.Tensor` of shape `[rows, length]`): As `texts.collate` makes them.

        Returns:
            `loss`: the mean cross-entropy with the target's distributions.
        """
        with torch.autocast(input_ids.device.type, self.target.dtype, enabled=self.target.dtype.itemsize == 2):
            where = labels[:, 1:] != IGNORED
            logits, wanted = logits_behind(self.draft, input_ids, where), self._wanted(input_ids, where)
        if not len(logits):
            return {"loss": logits.sum()}
        return {"loss": -(wanted * logits.float().log_softmax(dim=-1)).sum(-1).mean()}

    @torch.no_grad()
    def _wanted(self, input_ids: torch.Tensor, where: torch.Tensor) -> torch.Tensor:
        return logits_behind(self.target, input_ids, where).float().softmax(dim=-1)

    def accuracy(self, texts: Sequence[Text], max_length: int, batch_size: int = 8) -> list[dict[int, float]]:
        """How often the right next token is among the 1, 3 or 8 likeliest."""
        return accuracy(self._guesses, 1, texts, max_length, batch_size, self.target.device)

    @torch.no_grad()
    def _guesses(self, ids: torch.Tensor, labels: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        following = labels[:, 1:]
        where = following != IGNORED
        yield likeliest(logits_behind(self.draft, ids, where)), following[where]


def logits_behind(model: PreTrainedModel, ids: torch.Tensor, where: torch.Tensor) -> torch.Tensor:
    """
    A decoder's logits `[n, vocab_size]` behind some tokens of texts, as its own forward makes them: scaled, capped.

    Args:
        ids (`torch.Tensor` of shape `[rows, length]`).
        where (`torch.Tensor` of shape `[rows, length - 1]`, bool): Behind which of all tokens but the last.
    """
    first = int(where.any(0).int().argmax())
    decoder: Any = model
    arguments: dict[str, Any] = {}
    if decoder._supports_logits_to_keep():  # of prompts, there is nothing to be computed
        arguments["logits_to_keep"] = ids.shape[1] - first
    logits = decoder(input_ids=ids, use_cache=False, **arguments).logits
    kept: torch.Tensor = logits[:, first - ids.shape[1] : -1][where[:, first:]]
    return kept
