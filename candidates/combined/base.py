"""Base of sources that consist of several sources: one that fails leaves the others."""

from collections.abc import Callable, Hashable, Iterable, Sequence
from functools import partial
from typing import Any

import numpy as np

from ...drafts.merge import Draft, first_drafters
from ...drafts.price import LevelPrice
from ...drafts.tree import DraftTree, check_trees
from ...log import get_logger
from ..base import TreeCandidateGenerator, adopt, label_of, pass_on, proposals_of
from ..committed import HIDDEN_STATES, Committed
from ..request import SourceRequest

logger = get_logger(__name__)


class CombinedCandidates(TreeCandidateGenerator):
    """
    Several sources that get the same requests. One that fails is left out for the request, with one warning.

    Args:
        sources (sequence of `TreeCandidateGenerator`): At least one, each once.
        num_nodes (`int`, *optional*): Nodes per draft where the caller names no number; by default the largest number
            of its sources.
        vocab_size (`int`, *optional*): A source that proposes other tokens is left out, as one that raises.
    """

    def __init__(
        self, sources: Sequence[TreeCandidateGenerator], num_nodes: int | None = None, vocab_size: int | None = None
    ):
        for source in sources:
            if not isinstance(source, TreeCandidateGenerator):
                raise TypeError(f"Only TreeCandidateGenerators can be fused, got {type(source).__name__}.")
        if not sources:
            raise ValueError("`sources` must name at least one source.")
        if len(set(map(id, sources))) < len(sources):
            raise ValueError("A source can be fused once only: it keeps one state per request.")
        self.sources, self.vocab_size = list(sources), vocab_size
        self.label = " + ".join(map(label_of, sources))
        adopt(self, sources)
        if num_nodes is not None:
            self.default_num_nodes = self.most_nodes = num_nodes
        self._failed: set[tuple[Hashable, int]] = set()  # (request, identity of a source)

    @property
    def name(self) -> str:
        return f"{type(self).__name__}({', '.join(source.name for source in self.sources)})"

    def bytes_per_token(self) -> int:
        return sum(source.bytes_per_token() for source in self.sources)

    def bytes_per_request(self) -> int:
        return sum(source.bytes_per_request() for source in self.sources)

    def warm_up(self) -> None:
        """Let every source compile what it compiles at its first use."""
        for source in self.sources:
            if hasattr(source, "warm_up"):
                source.warm_up()

    def begin(self, request: SourceRequest) -> int:
        """Begin the request in every source, and return what all that need hidden states can do without."""
        answers = [self._call(source, request.request_id, source.begin, request) or 0 for source in self.sources]
        return min(
            [
                answer
                for source, answer in zip(self.sources, answers)
                if HIDDEN_STATES in source.needs and (request.request_id, id(source)) not in self._failed
            ],
            default=request.num_cached,
        )

    def _drafters(self, request_id: Hashable, tree: DraftTree, drafts: Iterable[Draft]) -> list[str]:
        """Return `drafted_by`, from the latest drafts of its sources in their order."""
        asked = [partial(source.drafted_by, request_id) for source in self.sources]
        return [label or self.label for label in first_drafters(tree, zip(drafts, asked))]

    def observe(self, request_id: Hashable, tokens: np.ndarray | Committed) -> None:
        step = Committed.of(tokens)
        for source in self.sources:
            self._call(source, request_id, pass_on, source, request_id, step)

    def stop(self, request_id: Hashable) -> None:
        for source in self.sources:
            self._failed.discard((request_id, id(source)))  # those that have failed hold state too
            self._call(source, request_id, source.stop, request_id)
            self._failed.discard((request_id, id(source)))

    def _call(self, source: TreeCandidateGenerator, request_id: Hashable, call: Callable, *args: Any) -> Any:
        if (request_id, id(source)) in self._failed:
            return None
        try:
            return call(*args)
        except Exception as error:
            self._drop(source, [request_id], error)
            return None

    def _drop(self, source: TreeCandidateGenerator, request_ids: Sequence[Hashable], error: Exception) -> None:
        self._failed |= {(name, id(source)) for name in request_ids}
        logger.warning_once(f"{type(source).__name__} failed and is left out for its requests: {error!r}")

    def _ask(
        self,
        source: TreeCandidateGenerator,
        request_ids: Sequence[Hashable],
        max_nodes: Sequence[int],
        price: LevelPrice | None = None,
    ) -> list[DraftTree]:
        """Return a source's trees; empty ones for requests in which it has failed."""
        rows = [row for row, name in enumerate(request_ids) if (name, id(source)) not in self._failed]
        trees = [DraftTree.empty()] * len(request_ids)
        names = [request_ids[row] for row in rows]
        try:
            found = proposals_of(source, names, [max_nodes[row] for row in rows], price) if rows else []
            check_trees(found, self.vocab_size or 2**31)
        except Exception as error:
            self._drop(source, names, error)
            return trees
        for row, tree in zip(rows, found):
            trees[row] = tree
        return trees
