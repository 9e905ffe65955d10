"""One call in the decoding loop: its rows, their sources, and the forward and the picks of the target."""

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from ..candidates.base import TreeCandidateGenerator
from ..candidates.committed import Likeliest
from ..candidates.request import EncoderInputs, SourceRequest
from ..cpu.screening import Picks
from ..drafts.tree import DraftTree
from ..sampling.processors import TokenPicker
from ..sampling.top import Top
from ..target_model.forward.hidden_states import FedStates, HiddenStateTaps
from ..target_model.layout.rows import CacheRow, RowInput
from .alarm import leaves_drafts_a_chance
from .batch import DecodingBatch
from .learning import Learning
from .source_chain import SourceChain
from .statistics import GenerationStatistics
from .text import RequestText
from .trace import RequestTrace

# Hidden states that wait for a row's next draft: of so many tokens, each of which keeps those of all rows of its step.
_MOST_UNSHOWN, _MOST_HELD = 64, 8192
DRAFT_ROOM = 16  # tokens after a request's last one that memory is reserved for; see `DecodingCall.cap`


class ModelForward(Protocol):
    """Interface of forwards to the loop: `PackedForward`, or `RowwiseForward` for models that cannot be packed."""

    trees: bool  # whether draft trees can be verified, or chains only

    @property
    def taps(self) -> HiddenStateTaps | None: ...  # None where hidden states and scores cannot be recorded

    def add(self) -> CacheRow: ...
    def forward(self, inputs: Sequence[RowInput]) -> tuple[Any, list[int]]: ...
    def argmax(self, logits: Any) -> list[int]: ...
    def top(self, logits: Any, count: int, num_lines: int, with_argmax: bool) -> Top | None: ...  # None: unknown
    def commit(self, rows: Sequence[CacheRow], paths: Sequence[Sequence[int]]) -> None: ...
    def remove(self, row: CacheRow) -> None: ...
    def compact(self, rows: Sequence[CacheRow]) -> None: ...
    def cut(self, row: CacheRow, length: int) -> None: ...
    def padded_context(self, rows: Sequence[CacheRow]) -> int: ...


class Verified(NamedTuple):
    """A verified draft. Its logits begin at line `first` of `logits`, which are logits where any source needs them."""

    tree: DraftTree
    logits: torch.Tensor | Picks
    first: int

    @property
    def scores(self) -> torch.Tensor:
        """The logits of the draft, `[1 + nodes, vocab_size]`."""
        assert isinstance(self.logits, torch.Tensor), "no source needs logits"
        return self.logits[self.first : self.first + len(self.tree) + 1]


@dataclass(eq=False)
class Request(RequestText):
    """One row of a call, with its sources and its row in the cache. Arguments are those of `RequestText`."""

    call: "DecodingCall" = field(init=False, repr=False)  # set by the call
    chain: SourceChain = field(init=False, repr=False)  # the call's, unless a source chose others for this request
    row: CacheRow | None = None
    is_resumed: bool = False  # whether it was suspended before, so that its row began anew
    is_drafting: bool = True  # False: all of its sources failed and were dropped, or none was begun
    dropped: set[int] = field(default_factory=set)  # positions of sources that have failed
    is_known_to_source: bool = False
    shares_with: Hashable | None = None  # the request whose keys and values its row began with
    # Generated tokens that the loop has observed, and those of them that were passed to its sources: to those that
    # observe tokens alone, and to those that need more.
    num_observed: int = 0
    num_passed: int = 0
    num_shown: int = 0

    # Logits of the draft under verification, [1 + nodes, vocab_size]; None where tokens are picked by their arg max.
    logits: torch.Tensor | None = None

    # For sources with needs, until these observe the step: states of the tokens that were fed, and the verified draft.
    fed: FedStates | None = None
    verified: Verified | None = None
    likeliest: Likeliest | None = None  # the target's tokens after this draft, until sources have got them

    trace: RequestTrace | None = None

    @cached_property
    def source_request(self) -> SourceRequest:
        """The value that the request's sources get at its start."""
        return self.call.source_request_of(self)

    @property
    def is_active(self) -> bool:
        """True while the request needs further tokens."""
        return self.call.batch.is_active(self)

    @property
    def wants_states(self) -> bool:
        """Return whether a source or recorder needs more of the request than its tokens."""
        return self.chain.needs_more and (self.is_drafting or bool(self.chain.recorders))

    @property
    def best_only(self) -> bool:
        """Return whether the target's best tokens are enough: nothing picks otherwise, or learns from scores."""
        return self.call.picks_greedily and not (self.chain.needs_logits and self.wants_states)

    @property
    def must_observe(self) -> bool:
        """Return whether its sources must observe what was committed before they are next asked for a draft."""
        return bool(self.path) or self.chain.observes_every_step or not self.is_active

    @property
    def must_be_shown(self) -> bool:
        """Return whether this holds of sources with needs, which are far behind or use likely tokens of this step."""
        fed = self.fed
        is_full = fed is not None and (fed.num_fed > _MOST_UNSHOWN or fed.num_held > _MOST_HELD)
        return is_full or self.must_observe or (self.chain.shows_likeliest and self.likeliest is not None)

    @property
    def may_be_shown(self) -> bool:
        """Return whether sources with needs have missed so many tokens that they get them with those of other rows."""
        return self.fed is not None and self.fed.num_fed > _MOST_UNSHOWN // 2

    @property
    def is_behind(self) -> bool:
        """Return whether some source has not been passed all that was committed, or states that it needs."""
        is_unshown = self.fed is not None or self.num_shown < self.num_observed
        return self.num_passed < self.num_observed or (self.wants_states and is_unshown)

    @property
    def cache_row(self) -> CacheRow:
        """The row in the cache, which every running request has."""
        assert self.row is not None, "the request has no row in the cache"
        return self.row

    @property
    def node_logits(self) -> torch.Tensor:
        """The logits of the draft under verification, `[1 + nodes, vocab_size]`."""
        assert self.logits is not None, "the request has no draft under verification"
        return self.logits

    def begin_verifying(self, tree: DraftTree, first: int, logits: torch.Tensor | Picks, picks: list[int]) -> None:
        """Begin to verify a draft, by its lines of a forward's logits, from `first` on, or by their arg max."""
        lines, call = slice(first, first + len(tree.tokens) + 1), self.call
        self.tree, self.cursor, self.path, self.picks = tree, -1, [], []
        if self.wants_states:
            self.verified = Verified(tree, logits, first)
        if call.picks_greedily:
            self.picks = picks[lines]
        else:
            assert isinstance(logits, torch.Tensor), "tokens are not picked by their arg max"
            self.logits = logits[lines]

    def uncached(self) -> np.ndarray:
        """Return the committed tokens whose keys and values are not in the cache yet; at least one."""
        # Without calls of other properties, as in `num_uncached`, since it runs for every row at every step.
        prompt, first = self.prompt, self.cache_row.length - len(self.prompt)
        if first >= 0:
            return self._padded[self._start + first : self._start + len(self.tokens)]
        return np.concatenate([prompt[first:], self.generated(0)]) if self.tokens else prompt[first:]

    @property
    def num_uncached(self) -> int:
        return len(self.prompt) + len(self.tokens) - self.cache_row.length


class Place(NamedTuple):
    """A place of a draft: the node (-1: the last committed token) after which a token is picked, and its position."""

    request: Request
    node: int
    position: int  # number of generated tokens before the picked one

    @classmethod
    def at_cursor(cls, request: Request) -> "Place":
        return cls(request, request.cursor, request.num_generated)

    @classmethod
    def all_of(cls, request: Request) -> "list[Place]":
        """Return the places after every node, and after the last committed token."""
        assert request.tree is not None, "the request has no draft under verification"
        depths = [0, *request.tree.depths.tolist()]
        return [cls(request, node - 1, request.num_generated + depth) for node, depth in enumerate(depths)]


@dataclass(eq=False)
class DecodingCall:
    """
    One `generate` call, or one request of an `Engine`.

    Args:
        forward (`ModelForward`): Runs the target model; calls may share one.
        batch (`DecodingBatch`): The rows and their ends.
        picker (`TokenPicker`): The target's logits processors.
        pick (`Callable`): One of `verify.METHODS`: returns tokens `[places]` for places and processed scores.
        source (`TreeCandidateGenerator`): Proposes draft trees.
        max_nodes (`int`): The largest cap, that is, number of draft nodes of a row in a step.
        keeps_cache (`bool`): Whether rows keep their keys and values after the call's end, for the caller.
        assignment (`dict`): `namespace`, `reads` and `references` of the rows' `SourceRequest`.
        encoder_inputs (`EncoderInputs`, *optional*): Inputs and outputs of the target's encoder, where it has one.
        renewal (`int`, *optional*): The model computes all keys and values anew when the padded batch outgrows this
            length.
        learning (`Learning`, *optional*): Drafters that learn from the call.
        read (`Callable`, *optional*): Runs the encoder when the call begins, where it has not run yet.
        has_own_forward (`bool`): Whether no other call runs in its forward, so that only this call fails if it fails.
    """

    forward: ModelForward
    batch: DecodingBatch[Request]
    picker: TokenPicker
    pick: Callable[[Sequence[Place], torch.Tensor], list[int]]
    source: TreeCandidateGenerator
    max_nodes: int
    keeps_cache: bool = False
    assignment: dict[str, Any] = field(default_factory=dict)
    encoder_inputs: EncoderInputs | None = None
    renewal: int | None = None
    learning: Learning | None = None
    read: Callable[[EncoderInputs], EncoderInputs] | None = None
    has_own_forward: bool = False
    statistics: GenerationStatistics = field(default_factory=GenerationStatistics)

    def __post_init__(self) -> None:
        self.chain = self.chain_of(self.source.stages)  # for requests without sources of their own
        for request in self.batch.requests:
            request.call, request.chain = self, self.chain
        self._unread = self.encoder_inputs  # without the outputs, where the encoder is run by `read`
        self._texts = None if self.encoder_inputs is None else self.encoder_inputs.texts()
        # Without processors, noise or records, tokens are picked by the arg max of all nodes at once.
        self.picks_greedily = (
            not self.picker.processors
            and not self.batch.records
            and all(request.seed is None for request in self.batch.requests)
        )
        # Drafts of sources that learn are poor at first.
        self.is_judged = self.learning is None and leaves_drafts_a_chance(self.picker)
        # Where processors read scores alone, the tokens after all nodes may be picked before the text is known.
        self.may_pick_ahead = self.picker.score_only and not self.batch.records
        # Tokens for rows of calls that pick alike are picked together.
        self.picks_like: Hashable = id(self)
        if self.picker.signature is not None and not self.batch.records:
            self.picks_like = self.pick, self.picker.signature

    @property
    def namespace(self) -> Hashable:
        """The call's tenant."""
        return self.assignment.get("namespace", "")

    def encoded_text(self, request: Request) -> np.ndarray | None:
        """Return the tokens that the target's encoder has read; None where there are none."""
        return None if self._texts is None else self._texts[request.index]

    def source_request_of(self, request: Request) -> SourceRequest:
        """
        Return the request as its sources get it, apart from its row. Answers often repeat what an encoder has read:
        these tokens are a reference.
        """
        assignment, encoded = dict(self.assignment), self.encoded_text(request)
        if encoded is not None:
            assignment["references"] = [*assignment.get("references", ()), encoded]
        return SourceRequest(
            request.request_id,
            request.prompt,
            tag=request.tag,
            processors=self.picker.processors,
            seed=request.seed,
            forward=self.forward,
            encoder_inputs=self.encoder_inputs,
            encoder_row=request.index,
            encoded_text=encoded,
            **assignment,
        )

    def chain_of(self, sources: Sequence[TreeCandidateGenerator]) -> SourceChain:
        """Return a chain of these sources, with the recorders that learn from their requests."""
        return SourceChain(sources, () if self.learning is None else self.learning.recorders(sources))

    def set_lengths(self, request: Request) -> None:
        """Store in the request's row its position in the padded batch."""
        row, prompt_len = request.cache_row, len(request.prompt)
        row.least_length = max(len(other.prompt) for other in self.requests)
        row.ahead = row.least_length - prompt_len
        row.renewal = None if self.renewal is None else self.renewal - (len(request.padded_prompt) - prompt_len)

    def read_encoder(self) -> EncoderInputs:
        """Run the target's encoder, for the first time or again."""
        assert self._unread is not None and self.read is not None, "the encoder has no inputs"
        inputs = self.read(self._unread)
        self._set_encoder_inputs(inputs)
        return inputs

    def forget_encoder(self) -> EncoderInputs | None:
        """Drop the outputs of the target's encoder until `read_encoder` computes them anew."""
        if self._unread is not None:
            self._set_encoder_inputs(self._unread)
        return self._unread

    def _set_encoder_inputs(self, inputs: EncoderInputs) -> None:
        self.encoder_inputs = inputs
        for request in self.requests:
            request.source_request.encoder_inputs = inputs

    @property
    def draft_room(self) -> int:
        """Number of draft nodes after a request's last token that memory is reserved for."""
        return min(self.max_nodes, DRAFT_ROOM)

    def cap(self, num_remaining: int | None) -> int:
        """Return the cap of a row that needs so many further tokens: few nodes where few are needed."""
        if num_remaining is None or num_remaining >= self.max_nodes:
            return self.max_nodes
        return min(self.max_nodes, num_remaining + self.draft_room)

    @property
    def requests(self) -> Sequence[Request]:
        return self.batch.requests

    def waits_for_more(self, ready: Sequence[Request]) -> bool:
        """Return whether processors need logits of further rows together with those of the ready rows."""
        return self.picker.needs_lockstep and not set(self.batch.active) <= set(ready)


class ModelLimits(NamedTuple):
    """Bounds on drafts: tokens are below `vocab_size`, and positions below `num_positions`, if that is not None."""

    vocab_size: int
    num_positions: int | None


def by_forward(requests: Iterable[Request]) -> dict[ModelForward, list[Request]]:
    """Return the requests of each forward; mostly there is one forward."""
    requests = list(requests)
    forward = requests[0].call.forward if requests else None
    if forward is not None and all([request.call.forward is forward for request in requests]):
        return {forward: requests}
    groups: dict[ModelForward, list[Request]] = {}
    for request in requests:
        groups.setdefault(request.call.forward, []).append(request)
    return groups


def padded_context(requests: Iterable[Request]) -> int:
    """Return N_context of a step in which each of these rows feeds one token."""
    groups = by_forward(requests).items()
    return sum(forward.padded_context([request.cache_row for request in group]) for forward, group in groups)


def alike(rows: Sequence[Request]) -> list[list[Request]]:
    """Return groups of rows whose tokens are picked in the same way."""
    groups: dict[Hashable, list[Request]] = {}
    for request in rows:
        groups.setdefault(request.call.picks_like, []).append(request)
    return list(groups.values())
