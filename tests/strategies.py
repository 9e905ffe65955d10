"""What hypothesis draws from."""

import numpy as np
from hypothesis import strategies as st

from hf_smartspec import DraftTree


@st.composite
def trees(draw, max_size: int = 8, vocab_size: int = 4) -> DraftTree:
    """Trees of any shape, chains and equal siblings included."""
    size = draw(st.integers(0, max_size))
    is_chain = draw(st.booleans())
    parents = [node - 1 if is_chain else draw(st.integers(-1, node - 1)) for node in range(size)]
    tokens = draw(st.lists(st.integers(0, vocab_size - 1), min_size=size, max_size=size))
    probs = draw(st.lists(st.floats(0, 1, width=32), min_size=size, max_size=size))
    return DraftTree(np.array(tokens, np.int64), np.array(parents, np.int64), np.array(probs, np.float32))


def path_to(tree: DraftTree, node: int) -> list[int]:
    """The nodes from the root's child down to `node`; empty for -1."""
    path: list[int] = []
    while node >= 0:
        path.append(node)
        node = int(tree.parents[node])
    return path[::-1]


def lengths_of(tree: DraftTree) -> list[int]:
    """The match length of every node."""
    return np.broadcast_to(tree.match_lengths, len(tree)).tolist()
