"""Log-probabilities of generated tokens."""

import threading
from collections.abc import Sequence
from typing import NamedTuple

import torch
from transformers import LogitsProcessor


class TokenLogprobs(NamedTuple):
    """Log-probability of a token, and the likeliest tokens of its place with theirs."""

    logprob: float
    top: list[tuple[int, float]]


class LogprobsRecorder(LogitsProcessor):
    """
    Processor that records log-probabilities of one request's scores, as they are at its place among the processors, and
    returns the scores unchanged. Another thread may read them.

    Args:
        num_top (`int`): Likeliest tokens that are recorded at every place.
    """

    def __init__(self, num_top: int = 0):
        self._num_top = num_top
        self._prompt_len: int | None = None
        self._lock = threading.Lock()
        self._known: list[TokenLogprobs] = []
        self._open: list[torch.Tensor] = []  # [vocab_size] each, of places whose token is unknown so far
        self._tops: list[list[tuple[int, float]]] = []

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        if self._prompt_len is None:
            self._prompt_len = input_ids.shape[1]
        logprobs = torch.log_softmax(scores[0].float(), dim=-1)
        top = torch.topk(logprobs, self._num_top)
        with self._lock:
            self._settle(input_ids[0, self._prompt_len :].tolist())
            self._open.append(logprobs)
            self._tops.append(list(zip(top.indices.tolist(), top.values.tolist())))
        return scores

    def of(self, tokens: Sequence[int], first: int = 0) -> list[TokenLogprobs]:
        """Return the log-probabilities of an answer's tokens from `first` on; `tokens` is the answer so far."""
        with self._lock:
            self._settle(tokens)
            return self._known[first : len(tokens)]

    def _settle(self, tokens: Sequence[int]) -> None:
        while self._open and len(self._known) < len(tokens):
            token = tokens[len(self._known)]
            self._known.append(TokenLogprobs(self._open.pop(0)[token].item(), self._tops.pop(0)))
