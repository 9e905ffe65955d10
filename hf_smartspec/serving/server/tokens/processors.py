"""Logits processors that OpenAI's interface has and transformers has not."""

import threading
from typing import NamedTuple

import torch
from transformers import LogitsProcessor


class Penalties(LogitsProcessor):
    """
    Lowers the scores of tokens that the answer has already, as OpenAI defines it: by `presence`, and by `frequency` for
    each time. Prompts do not count.

    Args:
        prompt_len (`int`): Where the answer begins.
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
    """Of one token: its log-probability, and the most likely tokens with theirs."""

    logprob: float
    top: list[tuple[int, float]]


class LogprobsRecorder(LogitsProcessor):
    """
    Writes down log-probabilities, and leaves scores as they are. It sees them before temperature, top-k and top-p.
    Asked from another thread.

    Args:
        num_top (`int`): Most likely tokens that are written down at every place.
        prompt_len (`int`): Where the answer begins.
    """

    def __init__(self, num_top: int, prompt_len: int):
        self._num_top, self._prompt_len = num_top, prompt_len
        self._lock = threading.Lock()
        self._known: list[TokenLogprobs] = []
        self._open: list[torch.Tensor] = []  # [vocab_size] each: of places whose token is not known yet
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
        """Of an answer's tokens from the `first` on; the answer so far is `tokens`."""
        with self._lock:
            self._settle(tokens)
            return self._known[first : len(tokens)]

    def _settle(self, tokens: list[int]) -> None:
        while self._open and len(self._known) < len(tokens):
            token = tokens[len(self._known)]
            self._known.append(TokenLogprobs(self._open.pop(0)[token].item(), self._tops.pop(0)))
