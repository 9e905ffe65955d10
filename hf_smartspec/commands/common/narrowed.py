"""A drafter of a small target for the same target enlarged."""

from collections.abc import Hashable
from dataclasses import replace

import numpy as np

from ...candidates import TreeCandidateGenerator
from ...candidates.committed import Committed
from ...candidates.forwarding import ForwardingSource


class NarrowedCandidates(ForwardingSource):
    """
    A source of a small target that drafts for the enlarged one: it gets the first `size` numbers of each hidden state,
    which are the small target's (`cost_matched.enlarge` adds zeros after them).

    Args:
        source (`TreeCandidateGenerator`): The source of the small target.
        size (`int`): The small target's hidden size.
    """

    def __init__(self, source: TreeCandidateGenerator, size: int):
        super().__init__(source)
        self.size = size

    def observe(self, request_id: Hashable, tokens: np.ndarray | Committed) -> None:
        assert isinstance(tokens, Committed), "the source needs hidden states"
        states = {layer: item[:, : self.size] for layer, item in tokens.hidden_states.items()}
        super().observe(request_id, replace(tokens, hidden_states=states))
