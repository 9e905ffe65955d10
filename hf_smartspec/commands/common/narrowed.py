"""A drafter of a small target for the same target enlarged."""

from collections.abc import Hashable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ...candidates import TreeCandidateGenerator
from ...candidates.committed import Committed
from ...drafts.tree import DraftTree

_SAME = (
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


class NarrowedCandidates(TreeCandidateGenerator):
    """
    Shows a source the first numbers of each hidden state: those of a target that was enlarged
    (`cost_matched.enlarge`) are the small one's, and zeros behind them.

    Args:
        source (`TreeCandidateGenerator`): Drafts for the small target.
        size (`int`): The small target's hidden size.
    """

    def __init__(self, source: TreeCandidateGenerator, size: int):
        self.source, self.size = source, size
        for name in _SAME:
            setattr(self, name, getattr(source, name))

    @property
    def name(self) -> str:
        return self.source.name

    @property
    def most_nodes(self) -> int:
        return self.source.most_nodes

    def couple(self, *args: Any) -> None:
        self.source.couple(*args)

    def start(self, request_id: Hashable, prompt: np.ndarray) -> None:
        self.source.start(request_id, prompt)

    def propose(self, request_ids: Sequence[Hashable], max_nodes: Sequence[int], *args: Any, **kwargs: Any) -> Any:
        trees: list[DraftTree] = self.source.propose(request_ids, max_nodes, *args, **kwargs)
        return trees

    def reuse(self, request_id: Hashable, length: int, earlier: Hashable | None) -> int:
        return self.source.reuse(request_id, length, earlier)

    def observe(self, request_id: Hashable, committed: Committed) -> None:
        states = {layer: item[:, : self.size] for layer, item in committed.hidden_states.items()}
        self.source.observe(request_id, replace(committed, hidden_states=states))

    def stop(self, request_id: Hashable) -> None:
        self.source.stop(request_id)

    def forget(self, request_id: Hashable) -> None:
        self.source.forget(request_id)
