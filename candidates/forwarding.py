"""A source in front of another one."""

from collections.abc import Hashable, Sequence

import numpy as np

from ..drafts.price import LevelPrice
from ..drafts.tree import DraftTree
from .base import TreeCandidateGenerator, proposals_of
from .committed import Committed
from .request import SourceRequest

_ATTRIBUTES = (
    "default_num_nodes",
    "most_nodes",
    "is_autoregressive",
    "width",
    "heeds_prices",
    "heeds_shapes",
    "follows_target",
    "needs",
    "hidden_layers",
    "num_likeliest",
    "observes_every_step",
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

    def begin(self, request: SourceRequest) -> int | None:
        return self.source.begin(request)

    def propose(
        self, request_ids: Sequence[Hashable], max_nodes: Sequence[int], price: LevelPrice | None = None
    ) -> list[DraftTree]:
        return proposals_of(self.source, request_ids, max_nodes, price)

    def observe(self, request_id: Hashable, tokens: np.ndarray | Committed) -> None:
        self.source.observe(request_id, tokens)

    def stop(self, request_id: Hashable) -> None:
        self.source.stop(request_id)

    def drafted_by(self, request_id: Hashable, tree: DraftTree) -> list[str]:
        return self.source.drafted_by(request_id, tree)

    def bytes_per_token(self) -> int:
        return self.source.bytes_per_token()

    def bytes_per_request(self) -> int:
        return self.source.bytes_per_request()


def unwrapped(source: TreeCandidateGenerator) -> TreeCandidateGenerator:
    """Return the source that drafts, without the forwarding sources in front of it."""
    while isinstance(source, ForwardingSource):
        source = source.source
    return source
