"""
A drafter that looks at the target's hidden states, as small as it can be: where the text has come to a similar state
before, the target may go on as it did there.
"""

from collections.abc import Hashable, Sequence

import numpy as np
import torch

from hf_smartspec import Committed, DraftTree, TreeCandidateGenerator
from hf_smartspec.candidates import SourceRequest


class NearestStates(TreeCandidateGenerator):
    """
    Args:
        layers (sequence of `int`): The hidden states to keep; the first of them is searched.
        num_nodes (`int`): Tokens per branch.
        width (`int`): How many of the nearest places are drafted from, each as a branch of its own.
    """

    needs = frozenset({"hidden_states"})

    def __init__(self, layers: Sequence[int] = (-1,), num_nodes: int = 4, width: int = 1):
        self.hidden_layers, self.default_num_nodes, self.branches = tuple(layers), num_nodes * width, width
        self.texts: dict[Hashable, list[int]] = {}
        self.states: dict[Hashable, dict[int, torch.Tensor]] = {}  # [tokens, hidden_size] by layer

    def begin(self, request: SourceRequest) -> int:
        kept, length = self.states.get(request.shares_with, {}), request.num_cached
        self.texts[request.request_id] = request.prompt.tolist()
        self.states[request.request_id] = {layer: states[:length] for layer, states in kept.items()}
        request.on_release.append(lambda: self.states.pop(request.request_id, None))
        return min([length, *(len(kept.get(layer, ())) for layer in self.hidden_layers)])

    def observe(self, request_id: Hashable, step: Committed) -> None:
        known = self.states[request_id]
        for layer, states in step.hidden_states.items():
            known[layer] = torch.cat([known.get(layer, states)[: step.start], states])
        self.texts[request_id] += step.tokens.tolist()

    def stop(self, request_id: Hashable) -> None:
        self.texts.pop(request_id, None)  # the states stay: another prompt may begin like this text

    def propose(self, request_ids: Sequence[Hashable], max_nodes: Sequence[int]) -> list[DraftTree]:
        return [self._draft(name, limit) for name, limit in zip(request_ids, max_nodes)]

    def _draft(self, request_id: Hashable, limit: int) -> DraftTree:
        text, states = self.texts[request_id], self.states[request_id].get(self.hidden_layers[0])
        if states is None or len(states) < 2:
            return DraftTree.empty()  # at first, nothing has been run
        # The last state is that which the newest token was picked by.
        near = torch.nn.functional.cosine_similarity(states[:-1], states[-1:], dim=-1)
        places = near.topk(min(self.branches, len(near)))
        length = limit // self.branches
        tokens, parents, probs = [], [], []
        for similarity, place in zip(places.values.tolist(), places.indices.tolist()):
            branch = text[place + 2 : place + 2 + length]  # behind the token that this state led to
            parents += [-1, *range(len(tokens), len(tokens) + len(branch) - 1)][: len(branch)]
            tokens += branch
            probs += [max(similarity, 0.0)] * len(branch)
        return DraftTree(np.array(tokens, np.int64), np.array(parents, np.int64), np.array(probs, np.float32))
