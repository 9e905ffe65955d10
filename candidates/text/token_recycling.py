"""Token Recycling (Luo et al., 2024): what the target lately found likely after a token, as a tree of fixed shape."""

from collections.abc import Hashable, Iterator, Sequence
from functools import lru_cache
from itertools import product
from math import prod
from typing import NamedTuple

import numpy as np

from ...drafts.tree import DraftTree
from ...validate import is_integer
from ..base import TreeCandidateGenerator
from ..committed import Committed
from ..request import SourceRequest

NUM_LIKELIEST = 8  # k of the paper: columns of the matrix
_LEVELS = (8, 21, 25, 15, 8, 3)  # nodes of the published tree, by depth
MOST_NODES = sum(_LEVELS)
_MOST_NAMESPACES = 32  # whose matrices are kept: each takes megabytes


class TokenRecyclingCandidates(TreeCandidateGenerator):
    """
    Token Recycling as a source of its own, for comparison; `SuffixTreeCandidates` has its evidence, too. For each token
    of the vocabulary, a matrix holds the eight that the target found likeliest when it last verified the token. From
    the last token on, the matrix is followed breadth first, along a tree of 80 nodes whose shape is always the same.

    It differs from the paper's as follows. Levels have the published tree's numbers of nodes; within a level, these are
    the nodes whose ranks have the least product, where the paper searched for them. Tokens without a line in the matrix
    have no children, where the paper drafts token 0. A line's shares of probability are the nodes' probabilities. The
    matrix is filled from the first 32 nodes of a step.

    Each namespace has its own matrix, which requests share and which lasts as long as the source.

    Args:
        num_nodes (`int`): Nodes per draft where the caller names no number, 80 at most. Fewer are those whose ranks
            have the least product.

    Raises:
        ValueError: if `num_nodes` is not between 1 and 80.
    """

    label = "token_recycling"
    num_likeliest = NUM_LIKELIEST

    def __init__(self, num_nodes: int = MOST_NODES):
        if not is_integer(num_nodes) or not 1 <= num_nodes <= MOST_NODES:
            raise ValueError(f"`num_nodes` must be an integer from 1 to {MOST_NODES}, got {num_nodes!r}.")
        self.default_num_nodes = num_nodes
        self._matrices: dict[Hashable, _Matrix] = {}
        self._requests: dict[Hashable, tuple[Hashable, int]] = {}  # namespace and last token

    def begin(self, request: SourceRequest) -> None:
        self._requests[request.request_id] = request.namespace, int(request.prompt[-1]) if len(request.prompt) else -1

    def propose(self, request_ids: Sequence[Hashable], max_nodes: Sequence[int]) -> list[DraftTree]:
        return [self._propose(*self._requests[name], limit) for name, limit in zip(request_ids, max_nodes)]

    def _propose(self, namespace: Hashable, last: int, limit: int) -> DraftTree:
        matrix = self._matrices.get(namespace)
        if matrix is None or not matrix.has(last):
            return DraftTree.empty()
        tokens, parents, probs = [last], list[int](), list[float]()
        nodes: list[int | None] = [-1]  # the node at each place of the shape, the root's first; None: there is none
        for above, rank in shape():
            node = nodes[above]
            if node is None or len(parents) == limit or not matrix.has(token := tokens[node + 1]):
                nodes.append(None)
                continue
            nodes.append(len(parents))
            parents.append(node)
            tokens.append(int(matrix.following[token, rank]))
            probs.append(float(matrix.shares[token, rank]))
        return DraftTree(np.array(tokens[1:], np.int64), np.array(parents, np.int64), np.array(probs, np.float32))

    def observe(self, request_id: Hashable, tokens: np.ndarray | Committed) -> None:
        step = Committed.of(tokens)
        namespace, last = self._requests[request_id]
        self._requests[request_id] = namespace, int(step.tokens[-1]) if len(step.tokens) else last
        if step.likeliest is not None:
            matrix = self._matrices.pop(namespace, None) or _Matrix.new()
            self._matrices[namespace] = matrix.written(*step.likeliest[1:])  # the last, as the latest used
            while len(self._matrices) > _MOST_NAMESPACES:
                self._matrices.pop(next(iter(self._matrices)), None)

    def stop(self, request_id: Hashable) -> None:
        self._requests.pop(request_id, None)

    def remove_namespace(self, namespace: Hashable) -> None:
        """Remove what was kept of a namespace's texts."""
        self._matrices.pop(namespace, None)


class _Matrix(NamedTuple):
    """Likeliest tokens after each token, `[tokens, 8]` int32 (-1: not known), and their shares, float32."""

    following: np.ndarray
    shares: np.ndarray

    @classmethod
    def new(cls, size: int = 1024) -> "_Matrix":
        return cls(np.full((size, NUM_LIKELIEST), -1, np.int32), np.zeros((size, NUM_LIKELIEST), np.float32))

    def has(self, token: int) -> bool:
        return 0 <= token < len(self.following) and bool(self.following[token, NUM_LIKELIEST - 1] >= 0)

    def written(self, tokens: np.ndarray, following: np.ndarray, shares: np.ndarray) -> "_Matrix":
        """Return the matrix with new lines; of two lines of a token, the last one counts."""
        matrix = self
        if following.shape[1] < NUM_LIKELIEST:  # of a smaller vocabulary
            return matrix
        if len(tokens) and (most := int(tokens.max())) >= len(self.following):
            larger = _Matrix.new(2 * most)
            for array, own in zip(larger, self):
                array[: len(own)] = own
            matrix = larger
        matrix.following[tokens] = following[:, :NUM_LIKELIEST]
        matrix.shares[tokens] = shares[:, :NUM_LIKELIEST]
        return matrix


@lru_cache
def shape() -> tuple[tuple[int, int], ...]:
    """
    Return the fixed tree: for each node, the place of its parent (0: the last committed token, 1: the first node) and
    its rank among the parent's likeliest tokens. Any first nodes are a tree, too.
    """
    paths = sorted(_paths(), key=lambda path: (_weight(path), len(path), path))
    places = {(): 0} | {path: place for place, path in enumerate(paths, start=1)}
    return tuple((places[path[:-1]], path[-1]) for path in paths)


def _paths() -> Iterator[tuple[int, ...]]:
    """Yield the ranks along the path to each node: on each level, those of the least product, counted from 1."""
    for depth, num in enumerate(_LEVELS, start=1):
        most = 9 if depth < 3 else 6  # no level has a node of a larger product
        weighed = [(_weight(path), path) for path in product(range(min(most, NUM_LIKELIEST)), repeat=depth)]
        yield from [path for _, path in sorted(weighed)[:num]]


def _weight(path: tuple[int, ...]) -> int:
    return prod(rank + 1 for rank in path)
