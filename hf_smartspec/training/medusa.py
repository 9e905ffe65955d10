"""Training of Medusa heads on a frozen target (Medusa-1, arXiv 2401.10774, section 2.2)."""

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
    Module whose forward returns the loss of Medusa heads. Only the heads are trained and saved; the target is frozen.

    Args:
        target (`PreTrainedModel`): A decoder.
        num_heads, num_layers (`int`): Number of heads (the paper's K), and of residual layers in each. Heads start as
            copies of the target's own head, and share its output weights.
    """

    def __init__(self, target: PreTrainedModel, num_heads: int = 4, num_layers: int = 1):
        super().__init__()
        size = target.config.get_text_config(decoder=True).hidden_size
        output: Any = target.eval().requires_grad_(False).get_output_embeddings()
        zeros = [[_zeros(size) for _ in range(num_layers)] for _ in range(num_heads)]
        heads = MedusaHeads(zeros, [output.weight.detach()], shares_output=True).to(target.device)
        self.blocks = heads.blocks.float().requires_grad_(True)  # the trained part, saved in checkpoints
        self._frozen = target, heads  # in a tuple, so that they are no submodules

    @property
    def target(self) -> PreTrainedModel:
        return self._frozen[0]

    @property
    def heads(self) -> MedusaHeads:
        return self._frozen[1]

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        """
        Return the loss of a batch.

        Args:
            input_ids, labels (`torch.Tensor` of shape `[rows, length]`): As `texts.collate` makes them.

        Returns:
            `loss`: the heads' mean cross-entropies, weighted by 0.8 ** k, summed.
        """
        states = last_hidden_states(self.target, input_ids)
        losses = []
        for head, (x, wanted) in enumerate(self._learnt(states, labels)):
            if len(wanted):
                losses.append(_DECAY**head * cross_entropy(self.heads.logits_of(head, x).float(), wanted))
        zero = next(self.blocks.parameters()).sum() * 0.0  # a loss with gradients where texts are too short
        return {"loss": torch.stack([zero, *losses]).sum()}

    def _learnt(self, states: torch.Tensor, labels: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield, for each head, the states `[n, hidden]` that it is trained on, and the tokens `[n]` to predict."""
        for head, is_learnt in enumerate(learnt(labels, self.heads.num_heads)):
            later = labels[:, head + 2 :]
            yield states[:, : later.shape[1]][is_learnt], later[is_learnt]

    def accuracy(self, texts: Sequence[Text], max_length: int, batch_size: int = 8) -> list[dict[int, float]]:
        """Return, for each head, the share of places where the right token is among its 1, 3 or 8 likeliest."""
        return accuracy(self._guesses, self.heads.num_heads, texts, max_length, batch_size, self.target.device)

    @torch.no_grad()
    def _guesses(self, ids: torch.Tensor, labels: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for head, (x, wanted) in enumerate(self._learnt(last_hidden_states(self.target, ids), labels)):
            yield likeliest(self.heads.logits_of(head, x)), wanted


def learnt(labels: torch.Tensor, num_heads: int) -> Iterator[torch.Tensor]:
    """
    Yield, for each head k, a mask of the positions that it is trained on, bool `[rows, length - k - 2]`. Position i
    predicts token i + k + 2, since the target itself predicts the next one.
    """
    for head in range(num_heads):
        later = labels[:, head + 2 :]
        # Heads draft after tokens of the response, and after the prompt's last one.
        yield (labels[:, 1 : later.shape[1] + 1] != IGNORED) & (later != IGNORED)


def _zeros(size: int) -> tuple[torch.Tensor, torch.Tensor | None]:
    return torch.zeros(size, size), torch.zeros(size)


@torch.no_grad()
def last_hidden_states(model: PreTrainedModel, input_ids: torch.Tensor) -> torch.Tensor:
    """Return the hidden states after the final norm, which heads read, `[rows, length, hidden]` float32."""
    return model.get_decoder()(input_ids=input_ids, use_cache=False).last_hidden_state.float()
