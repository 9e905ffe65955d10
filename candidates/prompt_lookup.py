"""Prompt lookup: the continuation of an earlier occurrence of the last few tokens (Saxena, 2023)."""

from collections.abc import Hashable, Sequence

import numpy as np

from ..checks import is_integer
from ..tree import DraftTree
from .base import TreeCandidateGenerator


class _Index:
    """One request's text and, for every n-gram length, where each n-gram last ended with something behind it."""

    def __init__(self, max_ngram: int):
        self.max_ngram = max_ngram
        self.tokens: list[int] = []
        self.ends: list[dict] = [{} for _ in range(max_ngram + 1)]

    def extend(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            # The n-grams that end before this token now have a continuation: they become findable.
            end = len(self.tokens)
            for length in range(1, min(self.max_ngram, end) + 1):
                self.ends[length][tuple(self.tokens[end - length :])] = end
            self.tokens.append(token)

    def find(self) -> tuple[int, int] | None:
        """(continuation's start, match length) of the longest, then latest, earlier occurrence of the text's end."""
        for length in range(min(self.max_ngram, len(self.tokens) - 1), 0, -1):
            start = self.ends[length].get(tuple(self.tokens[-length:]))
            if start is not None:
                return start, length
        return None


class PromptLookupCandidates(TreeCandidateGenerator):
    """
    Proposes what followed the longest match of the last tokens in the request's own prompt and output, and among
    matches of that length the latest (transformers takes the first from the left). Costs microseconds.

    Args:
        num_tokens (`int`): Tokens per draft where the caller names no number.
        max_ngram (`int`): Longest match that is looked for.
        min_ngram (`int`): Shorter matches are not worth a draft.
    """

    def __init__(self, num_tokens: int = 10, max_ngram: int = 3, min_ngram: int = 1):
        for name, value in (("num_tokens", num_tokens), ("max_ngram", max_ngram), ("min_ngram", min_ngram)):
            if not is_integer(value) or value < 1:
                raise ValueError(f"`{name}` must be a positive integer, got {value!r}.")
        if min_ngram > max_ngram:
            raise ValueError(f"`min_ngram` must not exceed `max_ngram`, got {min_ngram} > {max_ngram}.")
        self.default_num_nodes = num_tokens
        self.max_ngram, self.min_ngram = max_ngram, min_ngram
        self._indices: dict[Hashable, _Index] = {}

    def start(self, request_id: Hashable, prompt: np.ndarray) -> None:
        self._indices[request_id] = _Index(self.max_ngram)
        self._indices[request_id].extend(prompt.tolist())

    def propose(self, request_ids: Sequence[Hashable], max_nodes: Sequence[int]) -> list[DraftTree]:
        return [self._propose(self._indices[name], limit) for name, limit in zip(request_ids, max_nodes)]

    def _propose(self, index: _Index, limit: int) -> DraftTree:
        found = index.find()
        if found is None or found[1] < self.min_ngram:
            return DraftTree.empty()
        start, length = found
        tokens = index.tokens[start : start + limit]
        # The latest match may end close before the text does; what repeats itself then goes on doing so.
        period = len(tokens)
        tokens += [tokens[position % period] for position in range(period, limit)]
        # A longer match is the better guess; the raw score is refined by calibration where there is any.
        return DraftTree.chain(tokens, np.full(len(tokens), length / (length + 1)))

    def observe(self, request_id: Hashable, tokens: np.ndarray) -> None:
        self._indices[request_id].extend(tokens.tolist())

    def stop(self, request_id: Hashable) -> None:
        self._indices.pop(request_id, None)
