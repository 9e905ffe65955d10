"""Medusa heads that know some texts, without training."""

import torch
from transformers import PreTrainedModel

from hf_smartspec import MedusaHeads

_SURE = 10.0  # the least-squares fit to 0 and 1 is no logit


@torch.no_grad()
def fitted_heads(model: PreTrainedModel, texts: torch.Tensor, num_heads: int = 3) -> MedusaHeads:
    """Heads whose outputs are the least-squares fit to what comes so many places later in texts `[n, length]`."""
    states = model.base_model(texts, attention_mask=torch.ones_like(texts)).last_hidden_state
    outputs = []
    for ahead in range(2, num_heads + 2):
        x = states[:, : texts.shape[1] - ahead].flatten(0, 1)
        wanted = torch.nn.functional.one_hot(texts[:, ahead:].flatten(), model.config.vocab_size).float()
        outputs.append(_SURE * torch.linalg.lstsq(x, wanted).solution.T)
    size = outputs[0].shape[1]
    return MedusaHeads([[(torch.zeros(size, size), None)] for _ in outputs], outputs)
