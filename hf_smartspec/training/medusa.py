"""Medusa heads learn what a frozen target says so many tokens later (Medusa-1, arXiv 2401.10774, section 2.2)."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel

from ..candidates import MedusaHeads
from .accuracy import accuracy, likeliest
from .texts import IGNORED, Text

_DECAY = 0.8  # of the weight of each further head in the loss, Medusa's Eq. 1


class MedusaTraining(nn.Module):
    """
    The loss of some heads. Only these are parameters: the target is frozen, and no part of what is saved.

    Args:
        target (`PreTrainedModel`): A decoder.
        num_heads, num_layers (`int`): K, and residual layers of each. They begin as the target's own head, whose output
            weight they share.
    """

    def __init__(self, target: PreTrainedModel, num_heads: int = 4, num_layers: int = 1):
        super().__init__()
        size = target.config.get_text_config(decoder=True).hidden_size
        output: Any = target.eval().requires_grad_(False).get_output_embeddings()
        zeros = [[_zeros(size) for _ in range(num_layers)] for _ in range(num_heads)]
        heads = MedusaHeads(zeros, [output.weight.detach()], shares_output=True).to(target.device)
        self.blocks = heads.blocks.float().requires_grad_(True)  # all that is learnt, and kept in checkpoints
        self._others = target, heads

    @property
    def target(self) -> PreTrainedModel:
        return self._others[0]

    @property
    def heads(self) -> MedusaHeads:
        return self._others[1]

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        """
        Args:
            input_ids, labels (`torch.Tensor` of shape `[rows, length]`): As `texts.collate` makes them.

        Returns:
            `loss`: the heads' mean cross-entropies, weighted by 0.8 ** k.
        """
        states = last_hidden_states(self.target, input_ids)
        losses = []
        for head, (x, wanted) in enumerate(self._learnt(states, labels)):
            if len(wanted):
                losses.append(_DECAY**head * cross_entropy(self.heads.logits_of(head, x).float(), wanted))
        nothing = next(self.blocks.parameters()).sum() * 0.0  # of texts that are too short
        return {"loss": torch.stack([nothing, *losses]).sum()}

    def _learnt(self, states: torch.Tensor, labels: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """For each head, the states `[n, hidden]` that it learns from, and the tokens `[n]` that it should say."""
        for head, is_learnt in enumerate(learnt(labels, self.heads.num_heads)):
            later = labels[:, head + 2 :]
            yield states[:, : later.shape[1]][is_learnt], later[is_learnt]

    def accuracy(self, texts: Sequence[Text], max_length: int, batch_size: int = 8) -> list[dict[int, float]]:
        """For each head, how often the right token is among its 1, 3 or 8 likeliest."""
        return accuracy(self._guesses, self.heads.num_heads, texts, max_length, batch_size, self.target.device)

    @torch.no_grad()
    def _guesses(self, ids: torch.Tensor, labels: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for head, (x, wanted) in enumerate(self._learnt(last_hidden_states(self.target, ids), labels)):
            yield likeliest(self.heads.logits_of(head, x)), wanted


def learnt(labels: torch.Tensor, num_heads: int) -> Iterator[torch.Tensor]:
    """
    For each head, of which tokens it learns (bool `[rows, length - head - 2]`, without those that none comes before):
    the target itself says the next one.
    """
    for head in range(num_heads):
        later = labels[:, head + 2 :]
        # It is asked behind tokens of the response, and behind the prompt's last one.
        yield (labels[:, 1 : later.shape[1] + 1] != IGNORED) & (later != IGNORED)


def _zeros(size: int) -> tuple[torch.Tensor, torch.Tensor | None]:
    return torch.zeros(size, size), torch.zeros(size)


@torch.no_grad()
def last_hidden_states(model: PreTrainedModel, input_ids: torch.Tensor) -> torch.Tensor:
    """What the head reads: behind the final norm, `[rows, length, hidden]` float32."""
    return model.get_decoder()(input_ids=input_ids, use_cache=False).last_hidden_state.float()
