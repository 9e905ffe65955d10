"""A draft model learns the target's distributions (Online Speculative Decoding, section 4: forward KL divergence)."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from .texts import IGNORED, Text, collate

_TOP = (1, 3, 8)


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

    @torch.no_grad()
    def accuracy(self, texts: Sequence[Text], max_length: int, batch_size: int = 8) -> list[dict[int, float]]:
        """How often the right next token is among the 1, 3 or 8 likeliest."""
        hits, count = torch.zeros(len(_TOP)), 0
        for start in range(0, len(texts), batch_size):
            batch = collate([item.example(max_length) for item in texts[start : start + batch_size]])
            ids, labels = (batch[name].to(self.target.device) for name in ("input_ids", "labels"))
            logits, wanted = self._logits(self.draft, ids, labels), labels[:, 1:][labels[:, 1:] != IGNORED]
            right = logits.topk(min(max(_TOP), logits.shape[-1]), dim=-1).indices == wanted[:, None]
            hits += torch.stack([right[:, :num].any(1).sum() for num in _TOP]).cpu()
            count += len(wanted)
        return [dict(zip(_TOP, (hits / max(count, 1)).tolist()))]
