"""Drafts from suffix trees over a request's own text and earlier outputs (SuffixDecoding, Oliaro et al., 2024)."""

import threading
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np

from ....drafts.price import LevelPrice
from ....drafts.tree import DraftTree
from ....validate import is_integer
from ...base import TYPICAL_NODES, TreeCandidateGenerator
from ...committed import Committed
from ...request import SourceRequest
from .corpus import SuffixCorpus
from .earlier_outputs import EarlierOutputs, checked
from .kernels.expand import MAX_TREES
from .kernels.insert import insert, move_tree
from .kernels.likely import NUM_LIKELY
from .kernels.store import free_tree, new_root
from .slots import MOST_NODES, SuffixSlots

LEAST_PROBABILITY = 0.1
_PRICED_NODES = 63  # of a draft that ends where nodes are not worth their price
_ROOM = 256  # tokens that a prompt's place has room for after it, at first
_PROMPT_TAIL = 8  # tokens of the prompt that an output is kept with, so that beginnings of outputs are found
MOST_BYTES = 2**36
_LEARNING = (0.0045, 255)  # rate of the weights, observations that a frequency remembers


@dataclass
class _Request:
    """
    A running request.

    Args:
        slot (`int`): Its line of all arrays.
        start, size (`int`): Place of its text.
        room (`int`): Tokens that may still be added there.
        references (list): Places and lengths of its reference texts.
    """

    slot: int
    namespace: Hashable
    start: int
    size: int
    prompt_len: int
    room: int
    references: list[tuple[int, int]] = field(default_factory=list)


class SuffixTreeCandidates(EarlierOutputs, TreeCandidateGenerator):
    """
    Drafts what followed the last tokens before: in the request's own prompt and output, and in earlier outputs. Costs
    microseconds and no model.

    Each request has a suffix tree of its own. Finished outputs join the tree of their *namespace*, which only requests
    of that namespace draft from, and those that name it as one they read. Followers of the last tokens, at several
    context lengths and in all of these trees, are the candidates; their acceptance probabilities are learnt while
    decoding, per namespace, and the most probable paths are proposed (see `kernels.expand`). So `probs` of its trees
    are calibrated.

    Args:
        max_bytes (`int`): Bound on the memory of all trees, at most 2**36, and of texts 2**31 tokens. Forgotten first,
            of the namespace that holds most, is the output unused for longest. What was learnt takes 1 MB per namespace
            besides.
        max_depth (`int`): Longest string whose occurrences are counted, in tokens.
        max_match (`int`): Longest context that is looked up, in tokens.
        num_nodes (`int`, *optional*): Nodes per draft where the caller names no number, at most; up to 4096. Where not
            given, 16, and where goodput decides, up to 63.
        min_probability (`float`, *optional*): Nodes whose path has a lower probability are not proposed. Where not
            given, 0.1, and where goodput decides and a node costs less than that many tokens, what it costs.
        chains (`bool`): Propose chains, not trees.
        keep_outputs (`bool`): Whether finished requests' outputs join the tree of their namespace.
        likeliest (`bool`): Whether it also proposes the tokens that the target found likely when it last verified the
            same token (Token Recycling, Luo et al., 2024), where there is a target: new text is drafted by these.
        scoring (`str`): "learned" (see above), or "counts": nodes are ranked by their numbers of occurrences after one
            context, whose length bounds the draft. `SuffixTreeCandidates.published` is SuffixDecoding's setting.
        factor, offset (`float`): With "counts", p matching tokens are continued by up to `factor * p + offset` nodes.

    Methods may be called from several threads.
    """

    label = "suffix"
    is_published = False

    def __init__(
        self,
        max_bytes: int = 2**28,
        max_depth: int = 48,
        max_match: int = 16,
        num_nodes: int | None = None,
        min_probability: float | None = None,
        chains: bool = False,
        keep_outputs: bool = True,
        likeliest: bool = True,
        scoring: str = "learned",
        factor: float = 4.0,
        offset: float = 0.0,
    ):
        if is_integer(max_bytes) and max_bytes > MOST_BYTES:
            raise ValueError(f"`max_bytes` must be at most {MOST_BYTES}, got {max_bytes}: nodes have 32-bit numbers.")
        for name, value, lowest in (
            ("max_bytes", max_bytes, 1),
            ("max_depth", max_depth, 2),
            ("max_match", max_match, 1),
            ("num_nodes", 1 if num_nodes is None else num_nodes, 1),
        ):
            if not is_integer(value) or value < lowest:
                raise ValueError(f"`{name}` must be an integer of at least {lowest}, got {value!r}.")
        if max_match >= max_depth:
            limit = max_depth - 1
            raise ValueError(f"`max_match` must be at most {limit} with `max_depth={max_depth}`, got {max_match}.")
        if num_nodes is not None and num_nodes > MOST_NODES:
            raise ValueError(f"`num_nodes` must be at most {MOST_NODES}, got {num_nodes}.")
        if scoring not in ("learned", "counts"):
            raise ValueError(f"`scoring` must be 'learned' or 'counts', got {scoring!r}.")
        if not (factor >= 0 and np.isfinite(factor) and np.isfinite(offset)):
            raise ValueError(f"`factor` and `offset` must be finite, and `factor` at least 0, got {factor}, {offset}.")
        if min_probability is not None and not 0 <= min_probability <= 1:
            raise ValueError(f"`min_probability` must lie in [0, 1], got {min_probability!r}.")
        self.default_num_nodes, self.keep_outputs = num_nodes or TYPICAL_NODES, keep_outputs
        self.heeds_prices = scoring == "learned" and min_probability is None
        self.num_likeliest = NUM_LIKELY if likeliest and scoring == "learned" else 0
        self._scoring = scoring
        self.most_nodes = num_nodes or (_PRICED_NODES if self.heeds_prices else TYPICAL_NODES)
        self._lock = threading.RLock()
        self._corpus = SuffixCorpus(max_bytes, max_depth)
        least = LEAST_PROBABILITY if min_probability is None else min_probability
        settings = [max_match, least, chains, *_LEARNING, max_depth, scoring == "counts", factor, offset]
        self._slots = SuffixSlots(self._corpus, settings)
        self._requests: dict[Hashable, _Request] = {}

    @classmethod
    def published(cls, factor: float = 4.0, max_match: int = 64, **options: Any) -> "SuffixTreeCandidates":
        """
        Return SuffixDecoding as published (Oliaro et al., 2024, algorithm 1, GENERATECANDIDATETREE). Nodes are ranked
        by C(N) = COUNT(N) / COUNT(PARENT(N)), none is too unlikely, and MAX_SPEC, alpha times p, alone bounds a draft.
        Of all trees and pattern lengths p = 1 ... P, the draft of the highest SCORE is proposed.
        A list of assistants that begins with it is the paper's hybrid (`replaces` of `StagedCandidates`).

        Args:
            factor (`float`): Alpha. The paper finds 1 to 4 good for agents.
            max_match (`int`): P, in tokens.
            options: Further arguments of the constructor. With `offset=-1`, MAX_SPEC counts the pattern's own node, as
                the pseudo-code does, and not only drafted ones, as its text does.

        Raises:
            ValueError: for arguments that the constructor refuses.
        """
        most = min(max(int(factor * max_match + options.get("offset", 0)), 1), MOST_NODES)
        own: dict[str, Any] = {"scoring": "counts", "min_probability": 0.0, "num_nodes": most}
        own["max_depth"] = max_match + most  # all that may be drafted is counted
        source = cls(max_match=max_match, factor=factor, **(own | options))
        source.is_published = True
        return source

    # The contract

    def begin(self, request: SourceRequest) -> None:
        """Begin a request, which may read two further namespaces."""
        namespace, reads, request_id = request.namespace, request.reads, request.request_id
        if len(reads) > MAX_TREES - 2:
            raise ValueError(f"A request may read {MAX_TREES - 2} further namespaces, got {len(reads)}.")
        for name in (namespace, *reads):
            hash(name)  # raises TypeError before anything is taken
        tokens, references = checked(request.prompt), [checked(text) for text in request.references]
        with self._lock:
            if request_id in self._requests:
                raise ValueError(f"Request {request_id!r} has been started already.")
            corpus, size = self._corpus, len(tokens) + _ROOM
            if not corpus.make_room(size, *map(len, references)):
                raise MemoryError(f"The prompt does not fit into `max_bytes={corpus.max_bytes}`.")
            start, root = corpus.allocate(size), new_root(corpus.store)
            try:
                slot = self._slots.take(start, [root, *map(corpus.root, (namespace, *reads))], namespace)
            except BaseException:
                free_tree(corpus.store, root)
                corpus.release(start, size)
                raise
            known = self._requests[request_id] = _Request(slot, namespace, start, size, len(tokens), size)
            corpus.reserved += size
            for text in references:
                known.references.append((corpus.allocate(len(text)), len(text)))
                insert(corpus.store, root, known.references[-1][0], text, corpus.points)
            self._use(known, len(tokens))
            self._slots.begin(slot, tokens)

    def propose(
        self, request_ids: Sequence[Hashable], max_nodes: Sequence[int], price: LevelPrice | None = None
    ) -> list[DraftTree]:
        """
        Propose drafts; where a node costs little, also unlikely nodes (SSSD, section 3.2.1: tokens that ride free).
        """
        with self._lock:
            if self.heeds_prices:
                least = LEAST_PROBABILITY if price is None else min(price.least_probability, LEAST_PROBABILITY)
                self._slots.least_probability = least
            return self._slots.draft([self._requests[name].slot for name in request_ids], max_nodes)

    def observe(self, request_id: Hashable, tokens: np.ndarray | Committed) -> None:
        step = Committed.of(tokens)
        with self._lock:
            request = self._requests[request_id]
            if step.likeliest is not None:
                self._slots.add_likeliest(request.slot, step.likeliest)
            self._use(request, len(step.tokens))
            self._slots.append(request.slot, step.tokens)

    def _use(self, request: _Request, num_tokens: int) -> None:
        """Take room for so many tokens in the request's place, or move its text to a larger one."""
        if request.room < num_tokens:
            self._enlarge(request, num_tokens)
        request.room -= num_tokens
        self._corpus.reserved -= num_tokens

    def _enlarge(self, request: _Request, num_tokens: int) -> None:
        self._slots.absorb(request.slot)
        corpus, size = self._corpus, 2 * request.size + num_tokens
        if not corpus.make_room(size):
            raise MemoryError(f"The text does not fit into `max_bytes={corpus.max_bytes}` any more.")
        start = corpus.allocate(size)
        move_tree(corpus.store, self._slots.root(request.slot), *self._slots.span(request.slot), start)
        self._slots.move(request.slot, start - request.start)
        corpus.release(request.start, request.size)
        corpus.reserved += size - request.size
        request.room += size - request.size
        request.start, request.size = start, size

    def stop(self, request_id: Hashable) -> None:
        with self._lock:
            request = self._requests.pop(request_id, None)
            if request is None:
                return
            self._slots.absorb(request.slot)
            corpus, (start, end) = self._corpus, self._slots.span(request.slot)
            answer = start + request.prompt_len
            output = corpus.store.text[max(answer - _PROMPT_TAIL, start) : end].copy()
            free_tree(corpus.store, self._slots.root(request.slot))
            self._slots.give_back(request.slot)
            for place in [(start, request.size), *request.references]:
                corpus.release(*place)
            corpus.reserved -= request.room
            if self.keep_outputs and end > answer:
                self._keep(output, request.namespace, is_served=True)

    def warm_up(self) -> None:
        """
        Compile the code that drafts with these settings, or load it from the disk, so that no request has to wait for
        that. The code that removes outputs is compiled when memory is full for the first time.
        """
        _compile(self._scoring)


@lru_cache
def _compile(scoring: str) -> None:
    source = SuffixTreeCandidates(max_bytes=2**20, max_depth=4, max_match=2, scoring=scoring)
    source.start("", np.array([1, 2, 1, 2]))
    source.propose([""], [4])
    source.observe("", np.tile([1, 2], 400))
    source.stop("")
