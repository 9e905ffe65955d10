"""Log-probabilities of the tokens that were chosen, as transformers' continuous batching returns them."""

from collections.abc import Sequence

import torch
from transformers import LogitsProcessor


class ChosenLogprobs(LogitsProcessor):
    """
    Stands behind all other processors of a request and leaves scores as they are: what it remembers of them is the
    log-probability of the token that was then chosen, temperature and the like included.

    Args:
        prompt_len (`int`): Where the answer begins.
    """

    def __init__(self, prompt_len: int):
        self._prompt_len = prompt_len
        self._known: list[float] = []
        self._last: torch.Tensor | None = None  # [vocab_size], until its token is known

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        self._settle(input_ids[0, self._prompt_len :].tolist())
        self._last = torch.log_softmax(scores[0].float(), dim=-1)
        return scores

    def of(self, tokens: Sequence[int]) -> list[float]:
        """Of the answer so far."""
        self._settle(tokens)
        return self._known[: len(tokens)]

    def _settle(self, tokens: Sequence[int]) -> None:
        if self._last is not None and len(self._known) < len(tokens):
            self._known.append(float(self._last[tokens[len(self._known)]]))
            self._last = None
