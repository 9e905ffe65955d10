"""Other papers' parameter-free sources, to compare with: REST, and the cache of PIA."""

import os
from collections import deque
from collections.abc import Hashable, Iterable, Sequence

import numpy as np

from ...candidates import Datastore, DatastoreCandidates, TreeCandidateGenerator
from ...drafts.tree import DraftTree

_OWN_FIRST = 1e-4  # weight of outputs where the request's own prompt has counts
_OFTEN = 1.0  # counts up to this one are dropped when a tree is pruned, others are halved


def rest(datastore: Datastore | str | os.PathLike[str], num_nodes: int = 64) -> DatastoreCandidates:
    """
    Return REST (He et al., 2023) on the index that SSSD shares with it: the longest end of up to 16 tokens that occurs,
    and its first 5,000 continuations.
    """
    return DatastoreCandidates(
        datastore, num_nodes, max_prefix=16, min_continuations=1, num_continuations=5000, branch_len=10, first_n=True
    )


class _Node:
    """Token of a trie: counts in the outputs of all requests, and in the prompts of those that run."""

    __slots__ = ("children", "of_outputs", "of_prompts")

    def __init__(self) -> None:
        self.children: dict[int, _Node] = {}
        self.of_outputs = 0.0
        self.of_prompts: dict[Hashable, int] = {}


class PIACandidates(TreeCandidateGenerator):
    """
    The trie cache of PIA ("Lookahead: An Inference Acceleration Framework for Large Language Model with Lossless
    Generation Accuracy", Zhao et al., KDD 2024). Every token has a trie of what followed it, `branch_len` tokens deep,
    which counts outputs of all requests, for ever, and prompts, while their requests run. The last two tokens are
    looked up, or the last one where too little followed them. Half of a draft are the nodes that outputs have most
    often, the others those that the prompt has most often. Tries are pruned when a request ends.

    Args:
        num_nodes (`int`): Nodes per row where the caller names no number.
        branch_len (`int`): Tokens per continuation.
        max_output_nodes (`int`): Nodes of one token's trie, beyond which rare ones are dropped.
    """

    label = "pia"

    def __init__(self, num_nodes: int = 64, branch_len: int = 8, max_output_nodes: int = 512):
        self.default_num_nodes, self.branch_len, self.max_output_nodes = num_nodes, branch_len, max_output_nodes
        self._roots: dict[int, _Node] = {}
        self._grown: set[int] = set()  # roots since the latest pruning
        self._prompts: dict[Hashable, list[int]] = {}
        self._ends: dict[Hashable, deque[int]] = {}  # the prompt's last token, and outputs that are not counted yet

    def add_outputs(self, outputs: Iterable[np.ndarray]) -> None:
        """Count outputs (int `[n]` each) of earlier requests."""
        for output in outputs:
            self._count(output.tolist(), len(output))
            self._prune()

    def start(self, request_id: Hashable, prompt: np.ndarray) -> None:
        tokens = self._prompts[request_id] = prompt.tolist()
        self._ends[request_id] = deque(tokens[-2:], self.branch_len + 2)
        self._count(tokens, len(tokens), request_id)

    def observe(self, request_id: Hashable, tokens: np.ndarray) -> None:
        end = self._ends[request_id]
        for token in tokens.tolist():
            end.append(token)
            if len(end) == end.maxlen:  # a whole branch after its first token
                self._count([*end][1:], 1)

    def stop(self, request_id: Hashable) -> None:
        end = self._ends.pop(request_id, None)
        if end is None:
            return
        self._count([*end][2 if len(end) == end.maxlen else 1 :], len(end))
        for node in self._branches(self._prompts.pop(request_id)):
            node.of_prompts.pop(request_id, None)
        self._prune()

    def propose(self, request_ids: Sequence[Hashable], max_nodes: Sequence[int]) -> list[DraftTree]:
        return [self._draft(name, limit) for name, limit in zip(request_ids, max_nodes)]

    def _count(self, tokens: list[int], num_starts: int, request_id: Hashable | None = None) -> None:
        for node in self._branches(tokens, num_starts, grows=True):
            if request_id is None:
                node.of_outputs += 1
            else:
                node.of_prompts[request_id] = node.of_prompts.get(request_id, 0) + 1

    def _branches(self, tokens: list[int], num_starts: int | None = None, grows: bool = False) -> Iterable[_Node]:
        """Yield the nodes of the branches after the first tokens; where it grows, new ones too."""
        for start in range(min(len(tokens) - 1, len(tokens) if num_starts is None else num_starts)):
            node = self._roots.setdefault(tokens[start], _Node())
            self._grown.add(tokens[start])
            for token in tokens[start + 1 : start + 1 + self.branch_len]:
                if token not in node.children:
                    if not grows:
                        break  # it was pruned
                    node.children[token] = _Node()
                node = node.children[token]
                yield node

    def _prune(self) -> None:
        for root in map(self._roots.__getitem__, self._grown):
            if _size(root) > self.max_output_nodes:
                _drop_rare(root)
        self._grown.clear()

    def _draft(self, request_id: Hashable, limit: int) -> DraftTree:
        ends = [*self._ends[request_id]][-2:]
        nodes: list[tuple[int, int, _Node]] = []  # token, parent, node
        for start in range(len(ends)):
            nodes = self._following(ends[start:], request_id)
            if len(nodes) + 1 >= self.branch_len:
                break
        outputs = np.array([node.of_outputs for _, _, node in nodes])
        mixed = np.array([node.of_prompts.get(request_id, 0) for _, _, node in nodes]) * (1 - _OWN_FIRST)
        mixed = mixed + _OWN_FIRST * outputs
        keep = np.zeros(len(nodes), bool)
        keep[np.argsort(-outputs, kind="stable")[: limit // 2]] = True  # parents come first, and have no lower counts
        order = np.argsort(-mixed, kind="stable")
        keep[order[~keep[order]][: limit - int(keep.sum())]] = True
        parents = np.array([parent for _, parent, _ in nodes], np.int64)
        whole = np.append(mixed, mixed[parents == -1].sum())  # the last entry serves parent -1
        probs = (mixed / np.maximum(whole[parents], 1e-30)).astype(np.float32)
        tokens = np.array([token for token, _, _ in nodes], np.int64)
        return DraftTree(tokens, parents, probs).keep(keep) if len(nodes) else DraftTree.empty()

    def _following(self, end: list[int], request_id: Hashable) -> list[tuple[int, int, _Node]]:
        """Return what followed these tokens in outputs or in the request's own prompt, parents first."""
        node = self._roots.get(end[0], _Node())
        for token in end[1:]:
            node = node.children.get(token, _Node())
        found: list[tuple[int, int, _Node]] = []
        waiting = [(-1, node)]
        while waiting:
            parent, node = waiting.pop(0)
            for token, child in node.children.items():
                if child.of_outputs or request_id in child.of_prompts:
                    waiting.append((len(found), child))
                    found.append((token, parent, child))
        return found


def _size(node: _Node) -> int:
    return sum(1 + _size(child) for child in node.children.values())


def _drop_rare(node: _Node) -> None:
    for token, child in [*node.children.items()]:
        if child.of_outputs <= _OFTEN and not child.of_prompts:
            del node.children[token]
        else:
            child.of_outputs /= 2
            _drop_rare(child)
