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
            logits, wanted = self._logits(self.draft, input_ids, labels), self._wanted(input_ids, labels)
        if not len(logits):
            return {"loss": logits.sum()}
        return {"loss": -(wanted * logits.float().log_softmax(dim=-1)).sum(-1).mean()}

    @torch.no_grad()
    def _wanted(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return self._logits(self.target, input_ids, labels).float().softmax(dim=-1)

    @staticmethod
    def _logits(model: PreTrainedModel, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Logits `[n, vocab_size]` behind the last token of the prompt, and those of the response but for its last."""
        states = model.get_decoder()(input_ids=input_ids, use_cache=False).last_hidden_state
        output: Any = model.get_output_embeddings()
        return output(states[:, :-1][labels[:, 1:] != IGNORED])

    def accuracy(self, texts: Sequence[Text], max_length: int, batch_size: int = 8) -> list[dict[int, float]]:
        """How often the right next token is among the 1, 3 or 8 likeliest."""
        return accuracy(self._guesses, 1, texts, max_length, batch_size, self.target.device)

    @torch.no_grad()
    def _guesses(self, ids: torch.Tensor, labels: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        following = labels[:, 1:]
        yield likeliest(self._logits(self.draft, ids, labels)), following[following != IGNORED]
