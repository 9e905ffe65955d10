"""An n-gram model as a candidate source, in one file: `assistant=NGramCandidates()` is all that it takes to use it."""

from collections import Counter, defaultdict
from collections.abc import Hashable, Sequence

import numpy as np

from hf_smartspec import DraftTree, TreeCandidateGenerator
from hf_smartspec.candidates import SourceRequest

Counts = defaultdict[tuple[int, ...], Counter[int]]


class NGramCandidates(TreeCandidateGenerator):
    """
    Counts what follows each `order - 1` tokens, in all texts of a request's namespace that it has seen, and drafts the
    most frequent ones: two for the first token, so that drafts are trees, and one for each further token.

    Args:
        order (`int`): Tokens of an n-gram, at least 2.
    """

    default_num_nodes = 8

    def __init__(self, order: int = 3):
        if order < 2:
            raise ValueError(f"`order` must be at least 2, got {order!r}.")
        self.order = order
        self.counts: defaultdict[Hashable, Counts] = defaultdict(lambda: defaultdict(Counter))  # by namespace
        self.requests: dict[Hashable, tuple[list[int], Counts]] = {}  # the text, and the counts of its namespace

    def begin(self, request: SourceRequest) -> None:
        self.requests[request.request_id] = [], self.counts[request.namespace]
        self.observe(request.request_id, request.prompt)

    def observe(self, request_id: Hashable, tokens: np.ndarray) -> None:
        text, counts = self.requests[request_id]
        for token in tokens.tolist():
            text.append(token)
            counts[tuple(text[-self.order : -1])][token] += 1

    def propose(self, request_ids: Sequence[Hashable], max_nodes: Sequence[int]) -> list[DraftTree]:
        return [self._draft(*self.requests[name], limit) for name, limit in zip(request_ids, max_nodes)]

    def _draft(self, text: list[int], counts: Counts, limit: int) -> DraftTree:
        tokens, parents, probs = [], [], []
        paths = [(-1, text[1 - self.order :])]  # each with the node that it ends in
        while paths and len(tokens) < limit:
            parent, path = paths.pop(0)
            seen = counts.get(tuple(path), Counter())
            for token, count in seen.most_common(1 if len(tokens) else 2)[: limit - len(tokens)]:
                paths.append((len(tokens), [*path[1:], token]))
                tokens, parents, probs = [*tokens, token], [*parents, parent], [*probs, count / seen.total()]
        return DraftTree(np.array(tokens, np.int64), np.array(parents, np.int64), np.array(probs, np.float32))

    def stop(self, request_id: Hashable) -> None:
        self.requests.pop(request_id, None)
