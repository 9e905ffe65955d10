"""Candidate sources for tests: one that listens in, some that know the answer, some that know nothing."""

from collections.abc import Hashable, Sequence
from functools import wraps

import numpy as np

from hf_smartspec import DraftTree, GenerationStatistics, TreeCandidateGenerator

from .models import VOCAB_SIZE


def remembers_errors(method):
    @wraps(method)
    def wrapper(self, *args):
        try:
            return method(self, *args)
        except Exception as error:
            self.errors.append(error)
            raise

    return wrapper


class Recording(TreeCandidateGenerator):
    """
    Passes everything on to another source, checks the engine's side of the contract, and counts.

    Attributes:
        drafted, accepted (`int`): Nodes that `source` proposed, and how many of them came true.
        num_asked, num_observed (`int`): Proposals asked for, and tokens shown.
        texts (`dict`): Every request's text as shown to the source, by its prompt.
        statistics (`GenerationStatistics`): What the engine counted, where a test has noted it here.
        errors (list): What the source raised, and what it was asked against the contract. The engine survives both.
    """

    def __init__(self, source: TreeCandidateGenerator):
        self.source, self.default_num_nodes = source, source.default_num_nodes
        self.samples = getattr(source, "samples", False)
        self.drafted = self.accepted = self.num_asked = self.num_observed = 0
        self.errors: list[Exception] = []
        self.statistics: GenerationStatistics | None = None
        self.texts: dict[tuple[int, ...], list[int]] = {}
        self._running: dict[Hashable, list[int]] = {}
        self._trees: dict[Hashable, DraftTree] = {}

    @remembers_errors
    def begin(self, request):
        request_id, prompt = request.request_id, request.prompt
        assert request_id not in self._running, "begun twice"
        assert prompt.ndim == 1 and prompt.dtype == np.int64
        self._running[request_id] = self.texts[tuple(prompt.tolist())] = prompt.tolist()
        self.source.begin(request)

    @remembers_errors
    def propose(self, request_ids, max_nodes):
        assert len(set(request_ids)) == len(request_ids) == len(max_nodes) > 0
        assert all(limit > 0 for limit in max_nodes) and set(request_ids) <= set(self._running)
        trees = self.source.propose(request_ids, max_nodes)
        self.num_asked += len(trees)
        self.drafted += sum(map(len, trees))
        self._trees |= dict(zip(request_ids, trees))
        return trees

    @remembers_errors
    def observe(self, request_id, tokens):
        assert tokens.ndim == 1 and tokens.dtype == np.int64 and len(tokens) > 0
        tree, node = self._trees.pop(request_id, DraftTree.empty()), -1
        for token in tokens.tolist():
            node = tree.child(node, token)
            if node is None:
                break
            self.accepted += 1
        self.num_observed += len(tokens)
        self._running[request_id] += tokens.tolist()
        self.source.observe(request_id, tokens)

    def stop(self, request_id):
        self._running.pop(request_id, None)
        self.source.stop(request_id)

    @property
    def is_idle(self) -> bool:
        return not self._running


class _PerRequest(TreeCandidateGenerator):
    """A source that keeps every request's text and drafts for one request at a time."""

    def __init__(self):
        self.texts: dict[Hashable, list[int]] = {}

    def start(self, request_id, prompt):
        self.texts[request_id] = prompt.tolist()

    def observe(self, request_id, tokens):
        self.texts[request_id] += tokens.tolist()

    def stop(self, request_id):
        self.texts.pop(request_id, None)

    def propose(self, request_ids, max_nodes):
        return [self.draft(self.texts[name], limit) for name, limit in zip(request_ids, max_nodes)]

    def draft(self, text: list[int], limit: int) -> DraftTree:
        raise NotImplementedError


class Empty(_PerRequest):
    """Never has an idea."""

    def draft(self, text, limit):
        return DraftTree.empty()


class Random(_PerRequest):
    """Chains or trees of random tokens, and of any length up to the limit, sometimes beyond it."""

    def __init__(self, seed: int, is_tree: bool):
        super().__init__()
        self.is_tree, self.rng = is_tree, np.random.default_rng(seed)

    def draft(self, text, limit):
        size = int(self.rng.integers(0, limit + 3))
        return random_tree(self.rng, size) if self.is_tree else DraftTree.chain(self.rng.integers(0, VOCAB_SIZE, size))


class Oracle(_PerRequest):
    """
    Knows what plain decoding generated and proposes just that.

    Args:
        sequences (list of list of `int`): Every row's text without padding, prompt included.
    """

    def __init__(self, sequences: Sequence[Sequence[int]]):
        super().__init__()
        self.sequences = [list(ids) for ids in sequences]

    def known(self, text: list[int], limit: int) -> list[int]:
        """The next tokens of `text`; none once it left the known way."""
        whole = next((ids for ids in self.sequences if ids[: len(text)] == text), text)
        return whole[len(text) : len(text) + limit]

    def draft(self, text, limit):
        return DraftTree.chain(self.known(text, limit))


class Wrong(Oracle):
    """Knows the answer and never starts with it; behind the wrong beginning come the right tokens, or a random tree."""

    def __init__(self, sequences: Sequence[Sequence[int]], seed: int, is_tree: bool):
        super().__init__(sequences)
        self.is_tree, self.rng = is_tree, np.random.default_rng(seed)

    def draft(self, text, limit):
        known = np.array(self.known(text, limit), np.int64)
        if len(known) == 0:
            return DraftTree.empty()
        if not self.is_tree:
            return DraftTree.chain(np.append((known[:1] + 1) % VOCAB_SIZE, known[1:]))
        tree = random_tree(self.rng, limit)
        wrong = (known[0] + self.rng.integers(1, VOCAB_SIZE, limit)) % VOCAB_SIZE
        return DraftTree(np.where(tree.parents < 0, wrong, tree.tokens), tree.parents, tree.probs)


class Flaky(Random):
    """Breaks: after some proposals it raises, or returns what is no tree."""

    def draft(self, text, limit):
        outcome = self.rng.integers(8)
        if outcome == 0:
            raise RuntimeError("the source has broken")
        if outcome == 1:
            return DraftTree.chain([VOCAB_SIZE])  # no such token
        if outcome == 2:
            return DraftTree(np.array([3, 4]), np.array([1, -1]), np.ones(2, np.float32))  # child before parent
        return super().draft(text, limit)


class WithDecoys(TreeCandidateGenerator):
    """
    Grows a tree around another source's chains: every node, and the root, gets wrong siblings with children of their
    own. Nodes come in a random order that keeps parents before children, so that the true path lies scattered.
    """

    def __init__(self, source: TreeCandidateGenerator, seed: int, num_decoys: int = 2):
        self.source, self.rng, self.num_decoys = source, np.random.default_rng(seed), num_decoys
        self.default_num_nodes = source.default_num_nodes

    def begin(self, request):
        self.source.begin(request)

    def observe(self, request_id, tokens):
        self.source.observe(request_id, tokens)

    def stop(self, request_id):
        self.source.stop(request_id)

    def propose(self, request_ids, max_nodes):
        chains = self.source.propose(request_ids, max_nodes)
        return [self._decorated(chain, limit) for chain, limit in zip(chains, max_nodes)]

    def _decorated(self, chain: DraftTree, limit: int) -> DraftTree:
        length = min(len(chain), -(-limit // 2))  # at least half of the nodes are decoys where there is room
        if length == 0:
            return chain
        tokens, parents, probs = chain.tokens[:length].tolist(), list(range(-1, length - 1)), [0.9] * length
        for node in range(-1, length - 1):
            for _ in range(int(self.rng.integers(0, self.num_decoys + 1))):
                wrong = (tokens[node + 1] + int(self.rng.integers(1, VOCAB_SIZE))) % VOCAB_SIZE
                parents += [node, len(tokens)]
                tokens += [wrong, int(self.rng.integers(VOCAB_SIZE))]
                probs += [0.1, 0.5]
        tree = DraftTree(np.array(tokens), np.array(parents), np.array(probs, np.float32))
        return shuffled(tree.most_likely(max(limit, length)), self.rng)


def random_tree(rng: np.random.Generator, size: int, vocab_size: int = VOCAB_SIZE) -> DraftTree:
    """A tree of any shape; siblings may hold equal tokens."""
    parents = np.array([rng.integers(-1, node) for node in range(size)], np.int64)
    return DraftTree(rng.integers(0, vocab_size, size), parents, rng.random(size, np.float32))


def shuffled(tree: DraftTree, rng: np.random.Generator) -> DraftTree:
    """The same tree with its nodes in another order, parents still before their children."""
    order: list[int] = []
    ready = np.flatnonzero(tree.parents == -1).tolist()
    while ready:
        node = ready.pop(int(rng.integers(len(ready))))
        order.append(node)
        ready += np.flatnonzero(tree.parents == node).tolist()
    index = {node: position for position, node in enumerate(order)} | {-1: -1}
    parents = np.array([index[int(tree.parents[node])] for node in order], np.int64)
    return DraftTree(tree.tokens[order], parents, tree.probs[order])
