"""Sources whose acceptance is known beforehand, and the ways of drafting that `smartspec verify` checks."""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from transformers import PreTrainedModel

from ...candidates.base import NoCandidates
from ...drafts.tree import DraftTree
from ...prepare.config import SmartSpecConfig
from ..common.names import JOINT

_DEPTH = 5  # levels of replayed drafts


class ReplayCandidates(NoCandidates):
    """
    Source that drafts the known continuation of each row, with errors at a known rate: accepted, partly accepted and
    rejected drafts on any model, without a draft model. One object serves one `generate` call.

    Args:
        continuations (sequence of token sequences): Tokens that plain decoding generates, row by row of the batch.
        vocab_size (`int`): Size of the vocabulary, from which wrong tokens are drawn.
        width (`int`): Siblings at every level; 1 drafts chains.
        error_rate (`float`): Probability that a level lacks the right token.
    """

    def __init__(
        self, continuations: Sequence[Sequence[int]], vocab_size: int, width: int = 1, error_rate: float = 0.25
    ):
        self.continuations, self.vocab_size = continuations, vocab_size
        self.width, self.error_rate = width, error_rate
        self.default_num_nodes = width * _DEPTH
        self._rng = np.random.default_rng(0)
        self._row_of: dict[Hashable, int] = {}
        self._num_seen: dict[Hashable, int] = {}

    def start(self, request_id: Hashable, prompt: np.ndarray) -> None:
        self._row_of[request_id] = len(self._row_of)  # rows are started in the order of the batch
        self._num_seen[request_id] = 0

    def propose(self, request_ids: Sequence[Hashable], max_nodes: Sequence[int]) -> list[DraftTree]:
        return [self._propose(name, limit) for name, limit in zip(request_ids, max_nodes)]

    def _propose(self, request_id: Hashable, limit: int) -> DraftTree:
        text = self.continuations[self._row_of[request_id]][self._num_seen[request_id] :]
        tokens: list[int] = []
        parents: list[int] = []
        parent = -1
        for right in text[: max(limit // self.width, 1)]:
            level = self._rng.integers(0, self.vocab_size, self.width).tolist()
            place = int(self._rng.integers(self.width))
            if self._rng.random() >= self.error_rate:
                level[place] = int(right)
            first = len(tokens)
            tokens += level
            parents += [parent] * self.width
            parent = first + place
        probs = np.full(len(tokens), 0.5, np.float32)
        return DraftTree(np.array(tokens, np.int64), np.array(parents, np.int64), probs).most_likely(limit)

    def observe(self, request_id: Hashable, tokens: np.ndarray) -> None:
        self._num_seen[request_id] += len(tokens)


class SameTreeCandidates(NoCandidates):
    """Source that drafts one given tree for every row, at its first step only."""

    def __init__(self, tree: DraftTree):
        self.tree = tree
        self.default_num_nodes = len(tree)
        self._new: set[Hashable] = set()

    def start(self, request_id: Hashable, prompt: np.ndarray) -> None:
        self._new.add(request_id)

    def propose(self, request_ids: Sequence[Hashable], max_nodes: Sequence[int]) -> list[DraftTree]:
        return [self.tree if name in self._new else DraftTree.empty() for name in request_ids]

    def observe(self, request_id: Hashable, tokens: np.ndarray) -> None:
        self._new.discard(request_id)

    def stop(self, request_id: Hashable) -> None:
        self._new.discard(request_id)


@dataclass(frozen=True)
class Drafting:
    """A way of drafting; `assistant` makes the value of `assistant=` from the rows' known continuations."""

    name: str
    assistant: Callable[[Sequence[Sequence[int]]], Any]

    @classmethod
    def with_config(cls, name: str, config: SmartSpecConfig) -> "Drafting":
        """Return a way of drafting with one config for all calls."""
        return cls(name, lambda _: config)


def ways_of_drafting(assistant: Any, vocab_size: int) -> list[Drafting]:
    """Return chains and trees of a draft model, or any other assistant, and drafts of replayed text for every model."""
    if isinstance(assistant, PreTrainedModel):
        ways = [
            Drafting.with_config("draft chain", SmartSpecConfig(assistant, num_nodes=5)),
            Drafting.with_config("draft tree", SmartSpecConfig(assistant, num_nodes=10, width=3)),
        ]
    else:
        ways = [Drafting.with_config(name_of(assistant), SmartSpecConfig(assistant))]
    return [
        *ways,
        Drafting("replayed chain", lambda rows: ReplayCandidates(rows, vocab_size)),
        Drafting("replayed tree", lambda rows: ReplayCandidates(rows, vocab_size, width=3)),
    ]


def name_of(assistant: Any) -> str:
    """Return the name of an assistant in the report."""
    if isinstance(assistant, list):
        return JOINT.join(map(name_of, assistant))
    return assistant if isinstance(assistant, str) else type(assistant).__name__
