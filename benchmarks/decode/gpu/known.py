"""Drafts that are accepted at a given rate."""

from collections.abc import Hashable, Sequence

import numpy as np

from hf_smartspec.candidates import TreeCandidateGenerator
from hf_smartspec.drafts.tree import DraftTree


class FixedAcceptance(TreeCandidateGenerator):
    """
    Chains each of whose tokens is right with the same probability, if those before it are; this is also the probability
    that they claim. Drafting costs nothing: the target is what is measured.

    Args:
        texts (dict): What will be said, int64 `[n]`, by the prompt's bytes.
        rate (`float`): Probability of a right token.
        vocab_size (`int`): Wrong tokens are others below it.
        seed (`int`): Of the errors.
    """

    default_num_nodes = 16

    def __init__(self, texts: dict[bytes, np.ndarray], rate: float, vocab_size: int, seed: int = 0):
        self.texts, self.rate, self.vocab_size = texts, rate, vocab_size
        self._rng = np.random.default_rng(seed)
        self._rest: dict[Hashable, np.ndarray] = {}

    def start(self, request_id: Hashable, prompt: np.ndarray) -> None:
        self._rest[request_id] = self.texts[prompt.tobytes()]

    def propose(self, request_ids: Sequence[Hashable], max_nodes: Sequence[int]) -> list[DraftTree]:
        return [self._chain(self._rest[name][:limit]) for name, limit in zip(request_ids, max_nodes)]

    def _chain(self, truth: np.ndarray) -> DraftTree:
        is_wrong = self._rng.random(len(truth)) >= self.rate
        return DraftTree.chain((truth + is_wrong) % self.vocab_size, [self.rate] * len(truth))

    def observe(self, request_id: Hashable, tokens: np.ndarray) -> None:
        self._rest[request_id] = self._rest[request_id][len(tokens) :]

    def stop(self, request_id: Hashable) -> None:
        self._rest.pop(request_id, None)
