"""Processors of answers: OpenAI's penalties, and known texts, which are drafted and forced to score their tokens."""

from collections.abc import Hashable, Sequence

import numpy as np
import torch
from transformers import LogitsProcessor

from ....candidates import TreeCandidateGenerator
from ....drafts.tree import DraftTree

KNOWN_NODES = 16  # tokens of a known text per step


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


class ForcedText(LogitsProcessor):
    """Processor that allows only the tokens of a known text."""

    keeps_no_state = True

    def __init__(self, text: np.ndarray, prompt_len: int):
        self._text, self._prompt_len = text, prompt_len

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        result = torch.full_like(scores, -torch.inf)
        result[:, int(self._text[input_ids.shape[1] - self._prompt_len])] = 0.0
        return result  # type: ignore[return-value]


class KnownText(TreeCandidateGenerator):
    """Source that drafts a known text, int64 `[length]`, for one request."""

    default_num_nodes = KNOWN_NODES

    def __init__(self, text: np.ndarray):
        self._text, self._num_seen = text, 0

    def start(self, request_id: Hashable, prompt: np.ndarray) -> None:
        self._num_seen = 0

    def propose(self, request_ids: Sequence[Hashable], max_nodes: Sequence[int]) -> list[DraftTree]:
        return [DraftTree.chain(self._text[self._num_seen : self._num_seen + limit]) for limit in max_nodes]

    def observe(self, request_id: Hashable, tokens: np.ndarray) -> None:
        self._num_seen += len(tokens)

    def stop(self, request_id: Hashable) -> None:
        pass
