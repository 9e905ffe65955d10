"""Logits processors of OpenAI's interface that transformers lacks."""

import torch
from transformers import LogitsProcessor


class Penalties(LogitsProcessor):
    """
    OpenAI's penalties: the score of a token that the answer contains is lowered by `presence`, and by `frequency` for
    each occurrence. Tokens of the prompt do not count.

    Args:
        presence, frequency (`float`): The penalties.
        prompt_len (`int`): Tokens before the answer.
    """

    keeps_no_state = True

    def __init__(self, presence: float, frequency: float, prompt_len: int):
        self.presence, self.frequency, self.prompt_len = presence, frequency, prompt_len

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        tokens, counts = torch.unique(input_ids[0, self.prompt_len :], return_counts=True)
        result = scores.clone()
        result[0, tokens] -= self.presence + self.frequency * counts.to(scores.dtype)
        return result  # type: ignore[return-value]
