"""An engine's key/value memory: who may run, where rows lie, and which prefixes are there already."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from transformers import PreTrainedModel

from ...candidates.base import TreeCandidateGenerator
from ...decoding.call import DecodingCall, Request
from ...decoding.source_guard import forget
from ...prepare.call import PreparedCall, decoding_call
from ...target_model.cache.slot_cache import SlotCache
from ...target_model.layout.rows import CacheRow, RowInput
from ...target_model.written import packed_forward
from ..outputs import Ticket
from ..scheduler import Scheduler
from .base import RequestMemory, has_had_turn, may_yield, refuse
from .budget import Budget
from .prefix_cache import CachedText, PrefixRows, SharedPrefix
from .shared_base import SharedBase, shared_base

_FIRST_LINES = 64
_WASTE = 4  # memory of so many times what is needed is given back
_MOST_KEPT = 1024  # rows: prompts are compared with all of them


class EngineMemory(RequestMemory):
    """
    The slot cache that an engine's requests share. A request gets a slot for all that it may reach when it begins, and
    stays there. Rows of requests that have ended are kept as long as they fit beside what runs, and no other holds
    their text; those that were unused for longest go first. A prompt that begins as one of them, or as that of a
    running request, gets a copy of the beginning; one that has a long beginning in common with a running request has it
    in that one's slot (`shared_base`), where it stays until the last of those who share it is gone.

    Args:
        model (`PreTrainedModel`): The target.
        max_batch_size (`int`): Requests that run at once.
        budget (`Budget`): Bound on keys and values.
    """

    def __init__(self, model: PreTrainedModel, max_batch_size: int, budget: Budget):
        self.forward = packed_forward(model, 1, _FIRST_LINES)
        self.bytes_per_token = self._measure()
        self.max_bytes = budget.bytes_for(model, max_batch_size, self.bytes_per_token)
        self.scheduler = Scheduler(max_batch_size, self.max_bytes // self.bytes_per_token)
        self._clear()
        self.prefixes = PrefixRows()
        self.watch(model)

    @torch.no_grad()
    def _measure(self) -> int:
        """Bytes of keys and values per token, from a forward of one token."""
        row = self.forward.add()
        self.forward.forward([RowInput(row, np.zeros(1, np.int64))])
        return self.cache.bytes_per_line

    @property
    def num_bytes(self) -> int:
        return self.cache.num_lines * self.bytes_per_token

    @property
    def cache(self) -> SlotCache:
        return self.forward.cache

    def call_of(self, prepared: PreparedCall) -> DecodingCall:
        """The request as one of those that share the forward."""
        route = prepared.route
        if route.way != "packed" or route.reads_media:
            raise refuse(route.reason or "images and the like are read by `generate` only")
        return decoding_call(prepared, self.forward)

    def size_of(self, call: DecodingCall) -> int:
        """Tokens that a request may reach, the draft behind its last one included."""
        request = call.requests[0]
        assert request.max_new_tokens is not None, "generate always limits the length"
        return len(request.prompt) + request.max_new_tokens + call.draft_room

    def next(self, running: list[Request], suspend: Callable[[Ticket], None]) -> Ticket | None:
        """
        As the scheduler's, for what the request takes beside those that it shares its beginning with. If one of these
        has not read that yet, the request waits until it has.
        """
        is_reading = any([not request.tokens for request in running])

        def num_shared(ticket: Ticket) -> int | None:
            length = self._base(ticket.request, running).length
            waits = is_reading and length < self._base(ticket.request, running, is_read=False).length
            return None if waits else length

        bases = self._bases(running)
        num_held = sum(row.stride for row in bases if row in self.prefixes)
        return self.scheduler.next(num_shared, num_held, suspend, lambda ticket: may_yield(ticket, bases), has_had_turn)

    def _base(self, request: Request, running: list[Request], is_read: bool = True) -> SharedBase:
        """What the request shares with a running one; nothing where sources keep something beside, which is copied."""
        if not self.forward.shares_prefixes or _keeper(request) is not None:
            return SharedBase()
        of_whom = request.call.namespace
        others = [other for other in running if _keeper(other) is None and other.call.namespace == of_whom]
        return shared_base(request.prompt, others, is_read)

    @staticmethod
    def _bases(running: Sequence[Request]) -> set[CacheRow]:
        """Return the rows, kept or of running requests, in which texts of running requests begin."""
        return {
            request.row.prefix_row
            for request in running
            if request.row is not None and request.row.prefix_row is not None
        }

    def place(self, request: Request, running: list[Request]) -> None:
        """Gives a request its row, with as much of its text as some row there holds already."""
        self._remove(self.prefixes.covered())
        self._shrink()
        texts = [(other.cache_row, _cached(other)) for other in running]
        shared = self.prefixes.longest(request.text(), texts, _keeper(request), request.call.namespace)
        if shared is not None and not self._agrees(shared, request):
            shared = None
        if request.is_resumed and _keeper(request) is not None:  # its sources are shown the whole text again
            shared = None
        row = self._new_row(self.size_of(request.call), shared, self._base(request, running))
        shared = self._left_of(shared)
        if shared is not None:
            if shared.row is not row:
                with self._removed_on_failure(row):
                    self.cache.copy(shared.row, row, shared.length)
            row.length, request.shares_with = shared.length, shared.request_id
        request.row = row

    def _left_of(self, shared: SharedPrefix | None) -> SharedPrefix | None:
        """If the row had to give way, what is still there of the one that it began in."""
        if shared is None or shared.row in (rows := self.cache.rows):
            return shared
        base = shared.row.prefix_row
        if base is None or base not in rows:
            return None
        return SharedPrefix(base, min(shared.length, shared.row.prefix_len))

    @contextmanager
    def _removed_on_failure(self, row: CacheRow) -> Iterator[None]:
        """What fails half-way, for want of memory say, leaves no row that nobody has."""
        try:
            yield
        except BaseException:
            self.cache.remove(row)
            raise

    def settle(self, request: Request) -> None:
        """A request that was placed has begun or goes on: its source has brought back what it had kept of others."""
        if not request.is_resumed:
            self.num_reused += request.cache_row.length
        gone, self.prefixes.given_up = self.prefixes.given_up, []
        for text in gone:
            assert text.source is not None, "only these are told"
            forget(text.source, text.request_id)

    def _agrees(self, shared: SharedPrefix, request: Request) -> bool:
        """Whether rotary embeddings that depend on the length of the text are those that the request would compute."""
        longest = max(shared.length, shared.row.least_length, len(request.prompt))
        return not self.forward.rotary or longest <= self.forward.rotary.border

    def _new_row(self, num_tokens: int, shared: SharedPrefix | None, base: SharedBase) -> CacheRow:
        """
        With a slot for so many tokens, without those of its base; rows that were kept give way. Where there is no base,
        the last of them may be what is shared.
        """
        capacity = self.cache.slot_size(num_tokens - base.length)
        while (row := self._in_the_way(capacity)) is not None:
            self.prefixes.give_up([row])
            # A row that begins in another's slot says nothing of a beginning that is not this.
            if shared is not None and row is shared.row and base.row is row.prefix_row is None:
                row.length = shared.length
                with self._removed_on_failure(row):
                    self.cache.resize(row, capacity)
                return row
            self.cache.remove(row)
        try:
            return self.cache.add(num_tokens, base.row, base.length)
        except (MemoryError, RuntimeError):  # there is less memory than the bound allows
            if not (kept := self.prefixes.all_but(shared and shared.row)):
                raise
            self._remove(kept)
        return self.cache.add(num_tokens, base.row, base.length)

    def _in_the_way(self, capacity: int) -> CacheRow | None:
        """The kept row to be given up next; None if there is a place. Full memory rather forgets than moves all."""
        if not len(self.prefixes):
            return None
        # What sources keep beside is not counted as memory: no more of it is kept than if all of it ran.
        of_sources, num_running = self.prefixes.of_sources(), len(self.cache.rows) - len(self.prefixes)
        if of_sources and num_running + len(of_sources) >= self.scheduler.max_batch_size:
            return of_sources[0]
        fits = len(self.prefixes) < _MOST_KEPT and self.cache.has_room(capacity)
        return None if fits and (self.cache.may_grow or self.cache.has_gap(capacity)) else self.prefixes.oldest()

    def _shrink(self) -> None:
        """
        Gives back memory of which little is needed: for running rows, and for kept ones that are no longer than these
        or were used of late, one for each that may run. It grows as rows are added.
        """
        longest = max(self.scheduler.running.values(), default=0)
        old = self.prefixes.old(self.scheduler.max_batch_size, longest)
        enough = self.scheduler.num_taken + self.prefixes.num_taken - sum(row.stride for row in old)
        if self.cache.num_lines > _WASTE * max(enough, _FIRST_LINES):
            self._remove(old)
            self.cache.shrink(2 * enough)

    def _remove(self, kept: Sequence[CacheRow]) -> None:
        self.prefixes.give_up(kept)
        for row in kept:
            self.cache.remove(row)

    @property
    def keeper(self) -> Callable[[Request], None]:
        return self.release

    def release(self, request: Request) -> None:
        """The request has ended: its row is kept, as long as nobody needs the memory."""
        row = request.cache_row
        row.num_nodes = 0
        self.prefixes.add(row, _cached(request))

    def suspend(self, request: Request) -> None:
        """Its row is kept as those of requests that have ended, unless a source keeps something beside."""
        if _keeper(request) is None:
            self.release(request)
        else:
            self.cache.remove(request.cache_row)
        request.row = None

    def _forget(self, running: Sequence[Request]) -> None:
        bases = self._bases(running)
        for row in sorted(self.prefixes.clear(), key=lambda row: row.num_sharers > 0):  # bases behind those on them
            if row not in bases:
                self.cache.remove(row)
        self.cache.layers.clear()  # nothing in them counts any more, and dtype or device may be others now
        for request in running:
            self.forward.cut(request.cache_row, request.cache_row.prefix_len)
        self._renew_bases(running)

    def _renew_bases(self, running: Sequence[Request]) -> None:
        """What running requests share is computed anew at once: those who share it have no room for it."""
        sharers = [request for request in running if request.cache_row.prefix_row is not None]
        inputs = {}
        for request in sorted(sharers, key=lambda request: request.cache_row.prefix_len):  # the longest counts
            base, text = request.cache_row.prefix_row, request.prompt[: request.cache_row.prefix_len]
            assert base is not None
            self.forward.cut(base, 0)
            inputs[base] = RowInput(base, text)
            if all(base is not other.cache_row for other in running):
                self.prefixes.add(base, CachedText(text, namespace=request.call.namespace))
        if inputs:
            self.forward.forward(list(inputs.values()))

    def reset(self) -> None:
        self.prefixes.clear()
        self._clear()

    def _clear(self) -> None:
        most_lines = self.scheduler.max_tokens
        self.forward.cache = SlotCache(1, min(_FIRST_LINES, most_lines), most_lines)


def _cached(request: Request) -> CachedText:
    """What the request's row holds."""
    text = request.text()[: request.cache_row.length]
    return CachedText(text, request.request_id, _keeper(request), request.call.namespace)


def _keeper(request: Request) -> TreeCandidateGenerator | None:
    """The request's source if it may keep something of its own beside keys and values."""
    return request.call.source if request.call.line.hidden_layers else None
