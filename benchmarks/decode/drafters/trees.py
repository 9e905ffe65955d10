"""The best fixed tree of Medusa heads, as the paper chooses it (Cai et al., arXiv 2401.10774, section 2.3.3)."""

import heapq
from collections.abc import Sequence

import numpy as np
import torch
from transformers import PreTrainedModel

from hf_smartspec.candidates import MedusaHeads
from hf_smartspec.commands.common.recordings import Recording
from hf_smartspec.training.medusa import last_hidden_states

_WIDTH = 10  # candidates of each head that may be nodes, as in Medusa's published trees

Path = tuple[int, ...]


@torch.no_grad()
def accuracies(heads: MedusaHeads, target: PreTrainedModel, texts: Sequence[Recording]) -> np.ndarray:
    """Return `[K, w]`: how often the i-th candidate of head k was the next token, in responses of the target."""
    hits, num = np.zeros((heads.num_heads, _WIDTH)), np.zeros(heads.num_heads)
    for text in texts:
        ids = torch.from_numpy(np.concatenate([text.prompt, text.response]))
        states = last_hidden_states(target, ids[None].to(target.device))[0]
        tokens, _ = heads.best(states, _WIDTH)
        first = len(text.prompt) - 1  # which the response's first token is picked by
        for head in range(heads.num_heads):
            later = ids[first + head + 2 :].to(tokens.device)
            found = tokens[first : first + len(later), head] == later[:, None]
            hits[head] += found.sum(0).cpu().numpy()
            num[head] += len(later)
    shares: np.ndarray = hits / np.maximum(num, 1)[:, None]
    return shares


def best_fixed_tree(shares: np.ndarray, num_nodes: int) -> list[Path]:
    """
    Return the paths of the nodes of highest accuracy, parents first; a path's accuracy is the product over its heads.
    """
    num_heads, width = shares.shape
    waiting: list[tuple[float, Path]] = [(-float(shares[0, rank]), (rank,)) for rank in range(width)]
    heapq.heapify(waiting)
    tree: list[Path] = []
    while waiting and len(tree) < num_nodes:
        value, path = heapq.heappop(waiting)
        tree.append(path)
        if len(path) < num_heads:
            for rank in range(width):
                heapq.heappush(waiting, (value * float(shares[len(path), rank]), (*path, rank)))
    return tree
