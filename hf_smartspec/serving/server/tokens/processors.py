"""Logits processors of OpenAI's interface that transformers lacks."""

import threading
from typing import NamedTuple

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


class TokenLogprobs(NamedTuple):
    """Log-probability of a token, and the likeliest tokens of its place with theirs."""

    logprob: float
    top: list[tuple[int, float]]


class LogprobsRecorder(LogitsProcessor):
    """
    Records log-probabilities of the scores before temperature, top-k and top-p, and returns the scores unchanged. They
    may be read from another thread.

    Args:
        num_top (`int`): Likeliest tokens that are recorded at every place.
        prompt_len (`int`): Tokens before the answer.
    """

    def __init__(self, num_top: int, prompt_len: int):
        self._num_top, self._prompt_len = num_top, prompt_len
        self._lock = threading.Lock()
        self._known: list[TokenLogprobs] = []
        self._open: list[torch.Tensor] = []  # [vocab_size] each, of places whose token is unknown so far
        self._tops: list[list[tuple[int, float]]] = []

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        logprobs = torch.log_softmax(scores[0].float(), dim=-1)
        top = torch.topk(logprobs, self._num_top)
        with self._lock:
            self._settle(input_ids[0, self._prompt_len :].tolist())
            self._open.append(logprobs)
            self._tops.append(list(zip(top.indices.tolist(), top.values.tolist())))
        return scores

    def of(self, tokens: list[int], first: int) -> list[TokenLogprobs]:
        """Return the log-probabilities of an answer's tokens from `first` on; `tokens` is the answer so far."""
        with self._lock:
            self._settle(tokens)
            return self._known[first : len(tokens)]

    def _settle(self, tokens: list[int]) -> None:
        while self._open and len(self._known) < len(tokens):
            token = tokens[len(self._known)]
            self._known.append(TokenLogprobs(self._open.pop(0)[token].item(), self._tops.pop(0)))
