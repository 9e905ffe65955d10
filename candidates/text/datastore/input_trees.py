"""SSSD's other source: trees of what followed the last tokens in the request's own prompt and output."""

from collections.abc import Hashable, Sequence

import numpy as np

from ....drafts.tree import DraftTree
from ....validate import check_positive
from ...base import TYPICAL_NODES, TreeCandidateGenerator
from .search import Drafts, Settings, propose_own


class InputTreeCandidates(TreeCandidateGenerator):
    """
    Proposes what followed the last `prefix` tokens earlier in the request's own prompt and output (SSSD, section
    3.1.1). The tree's weights are occurrences: a node's path probability is the number of places where the prefix and
    the path occur, over the number of places where the prefix occurs, the end of the text aside. SSSD takes one such
    source for each prefix of 1 to P tokens, and merges all their trees: see `SSSDCandidates`.

    Args:
        prefix (`int`): Tokens of the prefix.
        num_nodes (`int`): Nodes per row where the caller names no number.
        branch_len (`int`): Tokens per continuation, at most.

    Raises:
        ValueError: for numbers below 1.
    """

    label = "input"

    def __init__(self, prefix: int, num_nodes: int = TYPICAL_NODES, branch_len: int = 8):
        for name, value in (("prefix", prefix), ("num_nodes", num_nodes), ("branch_len", branch_len)):
            check_positive(name, value)
        self.prefix, self.default_num_nodes = prefix, num_nodes
        self._settings = Settings(1, 1, branch_len, 0, False, 0, usual=num_nodes, least=0.0)
        self._texts: dict[Hashable, _Text] = {}
        self.warm_up()

    def warm_up(self) -> None:
        """Compile the search, or load it from the disk where it was compiled before. Done at construction."""
        self.start("", np.zeros(self.prefix + 1, np.int64))
        self.propose([""], [1])
        self.stop("")

    @property
    def name(self) -> str:
        return f"{type(self).__name__}({self.prefix})"

    def start(self, request_id: Hashable, prompt: np.ndarray) -> None:
        self._texts[request_id] = _Text()
        self._texts[request_id].extend(prompt)

    def propose(self, request_ids: Sequence[Hashable], max_nodes: Sequence[int]) -> list[DraftTree]:
        drafts = Drafts.of(len(request_ids), max([0, *max_nodes]))
        for row, (name, limit) in enumerate(zip(request_ids, max_nodes)):
            text = self._texts[name]
            if text.size > self.prefix:
                arrays = text.tokens, text.previous
                propose_own(*arrays, text.size, self.prefix, int(limit), self._settings, drafts, row)
        return drafts.trees()

    def observe(self, request_id: Hashable, tokens: np.ndarray) -> None:
        self._texts[request_id].extend(tokens)

    def stop(self, request_id: Hashable) -> None:
        self._texts.pop(request_id, None)


class _Text:
    """A text, and the latest earlier place of each of its tokens, -1 where there is none."""

    def __init__(self) -> None:
        self.tokens, self.previous, self.size = np.empty(0, np.int32), np.empty(0, np.int32), 0
        self._latest: dict[int, int] = {}

    def extend(self, tokens: np.ndarray) -> None:
        size = self.size + len(tokens)
        if size > len(self.tokens):
            room = np.empty(2 * size - self.size, np.int32)
            self.tokens, self.previous = (np.append(array[: self.size], room) for array in (self.tokens, self.previous))
        self.tokens[self.size : size] = tokens
        latest = self._latest
        for place, token in enumerate(tokens.tolist(), start=self.size):
            self.previous[place] = latest.get(token, -1)
            latest[token] = place
        self.size = size
