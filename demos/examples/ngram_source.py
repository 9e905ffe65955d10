"""An n-gram model as a candidate source, in one file: `assistant=NGramCandidates()` is all that it takes to use it."""

from collections import Counter, defaultdict
from collections.abc import Hashable, Sequence

import numpy as np

from hf_smartspec import DraftTree, TreeCandidateGenerator


class NGramCandidates(TreeCandidateGenerator):
    """
    Counts what follows each `order - 1` tokens, in all texts that it has seen, and drafts the most frequent ones: two
    for the first token, so that drafts are trees, and one for each further token.

    Args:
        order (`int`): Tokens of an n-gram, at least 2.
    """

    default_num_nodes = 8

    def __init__(self, order: int = 3):
        if order < 2:
            raise ValueError(f"`order` must be at least 2, got {order!r}.")
        self.order = order
        self.counts: defaultdict[tuple[int, ...], Counter[int]] = defaultdict(Counter)
        self.texts: dict[Hashable, list[int]] = {}

    def start(self, request_id: Hashable, prompt: np.ndarray) -> None:
        self.texts[request_id] = []
        self.observe(request_id, prompt)

    def observe(self, request_id: Hashable, tokens: np.ndarray) -> None:
        text = self.texts[request_id]
        for token in tokens.tolist():
            text.append(token)
            self.counts[tuple(text[-self.order : -1])][token] += 1

    def propose(self, request_ids: Sequence[Hashable], max_nodes: Sequence[int]) -> list[DraftTree]:
        return [self._draft(self.texts[name], limit) for name, limit in zip(request_ids, max_nodes)]

    def _draft(self, text: list[int], limit: int) -> DraftTree:
        tokens, parents, probs = [], [], []
        paths = [(-1, text[1 - self.order :])]  # each with the node that it ends in
        while paths and len(tokens) < limit:
            parent, path = paths.pop(0)
            seen = self.counts.get(tuple(path), Counter())
            for token, count in seen.most_common(1 if len(tokens) else 2)[: limit - len(tokens)]:
                paths.append((len(tokens), [*path[1:], token]))
                tokens, parents, probs = [*tokens, token], [*parents, parent], [*probs, count / seen.total()]
        return DraftTree(np.array(tokens, np.int64), np.array(parents, np.int64), np.array(probs, np.float32))

    def stop(self, request_id: Hashable) -> None:
        self.texts.pop(request_id, None)
