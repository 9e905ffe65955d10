"""Prompt lookup: the continuation of an earlier occurrence of the last few tokens (Saxena, 2023)."""

from collections.abc import Hashable, Sequence
from functools import partial
from weakref import ref

import numpy as np

from ...drafts.tree import DraftTree
from ...validate import check_positive
from ..base import TreeCandidateGenerator
from ..request import SourceRequest

_BORDER = -1  # between texts; no token
_LONGEST = 32  # tokens of a match that a draft's probability depends on: beyond `max_ngram`, all are compared
_MOST_INDEXED = 2**20  # tokens of references whose indexes are kept for further requests, about half a gigabyte


class _Index:
    """A text and, for every n-gram length, the latest (or first) end of each n-gram that is followed by a token."""

    def __init__(self, max_ngram: int, keeps_first: bool = False):
        self.max_ngram, self.keeps_first = max_ngram, keeps_first
        self.tokens: list[int] = []
        self.ends: list[dict] = [{} for _ in range(max_ngram + 1)]

    def extend(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            # The n-grams that end before this token now have a continuation: they become findable.
            end = len(self.tokens)
            if token != _BORDER:
                for length in range(1, min(self.max_ngram, end) + 1):
                    ngram = tuple(self.tokens[end - length :])
                    if not self.keeps_first or ngram not in self.ends[length]:
                        self.ends[length][ngram] = end
            self.tokens.append(token)


class _References(_Index):
    """Reference texts, which several requests may share; no n-gram and no continuation crosses a border."""

    def __init__(self, max_ngram: int, texts: tuple[np.ndarray, ...]):
        super().__init__(max_ngram)
        self.texts: list[ref[np.ndarray]] = []  # the end of one drops the index
        for text in texts:
            self.extend([*text.tolist(), _BORDER])

    def continuation(self, start: int, limit: int) -> list[int]:
        tokens = self.tokens[start : start + limit]
        return tokens[: tokens.index(_BORDER)] if _BORDER in tokens else tokens


class _Text(_Index):
    """One request's text, and the references to it."""

    def __init__(self, max_ngram: int, references: _References | None, published_size: int = 0):
        super().__init__(max_ngram, keeps_first=published_size > 0)
        self.references, self.published_size = references, published_size

    def find(self, limit: int) -> tuple[list[int], int]:
        """
        Return (continuation, match length) of the longest earlier occurrence of the text's end; an empty list and 0 if
        there is none.
        """
        for length in range(min(self.max_ngram, len(self.tokens)), 0, -1):
            end = tuple(self.tokens[-length:])
            start = self.ends[length].get(end)
            if start is not None and self._may_be(start, length):
                return self.continuation(start, limit), self._whole_match(self.tokens, start, length)
            if self.references is not None and (start := self.references.ends[length].get(end)) is not None:
                return self.references.continuation(start, limit), self._whole_match(
                    self.references.tokens, start, length
                )
        return [], 0

    def _whole_match(self, found: list[int], start: int, length: int) -> int:
        """Return how many tokens before `found[start]` are those at the text's end, as `length` are known to be."""
        most = min(start, len(self.tokens), _LONGEST)
        while length < most and found[start - 1 - length] == self.tokens[-1 - length]:
            length += 1
        return length

    def _may_be(self, start: int, length: int) -> bool:
        """Return whether the published rule takes a match: it neither overlaps the text's end nor lacks followers."""
        size, num = self.published_size, len(self.tokens)
        return not size or (start + size <= num and start < num - length)

    def continuation(self, start: int, limit: int) -> list[int]:
        tokens = self.tokens[start : start + limit]
        # The latest match may end close before the text does; what repeats itself then goes on doing so.
        period = len(tokens)
        return tokens + [tokens[position % period] for position in range(period, limit)]


class PromptLookupCandidates(TreeCandidateGenerator):
    """
    Proposes what followed the longest match of the last tokens in the request's own prompt and output, or in the
    reference texts that it was assigned. Among matches of that length, its own text comes first, then the latest
    (transformers takes the first from the left). Costs microseconds.

    Args:
        num_tokens (`int`): Tokens per draft where the caller names no number.
        max_ngram (`int`): Longest match that is looked for.
        min_ngram (`int`): Shorter matches are not worth a draft.
        first (`bool`): Take the first match from the left of the request's own text that `num_tokens` tokens follow, as
            prompt lookup decoding was published; drafts then have no more than these.
    """

    label = "prompt_lookup"

    def __init__(self, num_tokens: int = 10, max_ngram: int = 3, min_ngram: int = 1, first: bool = False):
        for name, value in (("num_tokens", num_tokens), ("max_ngram", max_ngram), ("min_ngram", min_ngram)):
            check_positive(name, value)
        if min_ngram > max_ngram:
            raise ValueError(f"`min_ngram` must not exceed `max_ngram`, got {min_ngram} > {max_ngram}.")
        self.default_num_nodes = num_tokens
        self.max_ngram, self.min_ngram, self.first = max_ngram, min_ngram, first
        self._texts: dict[Hashable, _Text] = {}
        self._references: dict[tuple[int, ...], _References] = {}  # by identities of texts

    @classmethod
    def published(cls, num_tokens: int = 10, max_ngram: int = 3) -> "PromptLookupCandidates":
        """Return prompt lookup decoding (PLD) as published (Saxena, 2023, `find_candidate_pred_tokens`)."""
        return cls(num_tokens, max_ngram, first=True)

    def begin(self, request: SourceRequest) -> None:
        published_size = self.default_num_nodes if self.first else 0
        text = _Text(self.max_ngram, self._indexed(request.references), published_size)
        self._texts[request.request_id] = text
        text.extend(request.prompt.tolist())

    def _indexed(self, references: Sequence[np.ndarray]) -> _References | None:
        if not len(references):
            return None
        texts = tuple(references)  # the caller's sequence may change, or make its items anew
        key = tuple(map(id, texts))  # the rows of a call have the same ones, which are indexed once
        known = self._references.pop(key, None)
        if known is None:
            known = _References(self.max_ngram, texts)
            drop = partial(_drop_references, ref(self), key)
            known.texts = [ref(text, drop) for text in texts]
        self._references[key] = known  # the last, as the one most recently used
        # A few texts that live long have any number of choices among them.
        while len(self._references) > 1 and self._num_indexed() > _MOST_INDEXED:
            self._references.pop(next(iter(self._references)), None)
        return known

    def _num_indexed(self) -> int:
        return sum([len(item.tokens) for item in list(self._references.values())])

    def propose(self, request_ids: Sequence[Hashable], max_nodes: Sequence[int]) -> list[DraftTree]:
        return [self._propose(self._texts[name], limit) for name, limit in zip(request_ids, max_nodes)]

    def _propose(self, text: _Text, limit: int) -> DraftTree:
        tokens, length = text.find(min(limit, self.default_num_nodes) if self.first else limit)
        if length < self.min_ngram:
            return DraftTree.empty()
        # A longer match is the better guess; the raw score is refined by calibration where there is any.
        return DraftTree.chain(tokens, np.full(len(tokens), length / (length + 1)), match_lengths=length)

    def observe(self, request_id: Hashable, tokens: np.ndarray) -> None:
        self._texts[request_id].extend(tokens.tolist())

    def stop(self, request_id: Hashable) -> None:
        self._texts.pop(request_id, None)


def _drop_references(source: ref[PromptLookupCandidates], key: tuple[int, ...], _: ref[np.ndarray]) -> None:
    """Drop the index of texts of which one is no more, before another object gets its identity."""
    if (known := source()) is not None:
        known._references.pop(key, None)
