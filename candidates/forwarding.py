"""A source in front of another one."""

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import numpy as np

from ..drafts.price import LevelPrice
from ..drafts.tree import DraftTree
from .base import TreeCandidateGenerator
from .committed import Committed, Likeliest
from .request import SourceRequest

_ATTRIBUTES = (
    "default_num_nodes",
    "is_autoregressive",
    "width",
    "heeds_prices",
    "follows_target",
    "needs",
    "hidden_layers",
    "num_likeliest",
    "label",
)


class ForwardingSource(TreeCandidateGenerator):
    """
    Passes every call on to another source. A subclass overrides the calls that it changes.

    Args:
        source (`TreeCandidateGenerator`): The source that drafts.
    """

    def __init__(self, source: TreeCandidateGenerator):
        self.source = source
        for name in _ATTRIBUTES:
            setattr(self, name, getattr(source, name))

    @property
    def name(self) -> str:
        return self.source.name

    @property
    def most_nodes(self) -> int:
        return self.source.most_nodes

    @property
    def origin(self) -> TreeCandidateGenerator:
        return self.source.origin

    def begin(self, request: SourceRequest) -> None:
        self.source.begin(request)

    def propose(
        self, request_ids: Sequence[Hashable], max_nodes: Sequence[int], price: LevelPrice | None = None
    ) -> list[DraftTree]:
        arguments: dict[str, Any] = {"price": price} if self.heeds_prices else {}
        return self.source.propose(request_ids, max_nodes, **arguments)

    def drafted_by(self, request_id: Hashable, tree: DraftTree) -> list[str]:
        return self.source.drafted_by(request_id, tree)

    def reuse(self, request_id: Hashable, length: int, earlier: Hashable | None) -> int:
        return self.source.reuse(request_id, length, earlier)

    def observe(self, request_id: Hashable, tokens: np.ndarray | Committed) -> None:
        self.source.observe(request_id, tokens)

    def observe_likeliest(self, shown: Mapping[Hashable, Likeliest]) -> None:
        self.source.observe_likeliest(shown)

    def stop(self, request_id: Hashable) -> None:
        self.source.stop(request_id)

    def forget(self, request_id: Hashable) -> None:
        self.source.forget(request_id)

    def weights_changed(self) -> None:
        self.source.weights_changed()

    def num_bytes(self) -> int | None:
        return self.source.num_bytes()
