"""An engine's key/value memory: slots of running requests, and kept rows whose prefixes new prompts reuse."""

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

from transformers import PreTrainedModel

from ...candidates.base import TreeCandidateGenerator
from ...decoding.call import DecodingCall, Request
from ...decoding.source_guard import release
from ...prepare.call import PreparedCall, decoding_call
from ...target_model.cache.slot_cache import SlotCache
from ...target_model.layout.rows import CacheRow, RowInput
from ...target_model.written import packed_forward, written_decoder
from ..outputs import PendingRequest
from ..scheduler import Admission, Scheduler
from .base import RequestMemory, has_had_turn, may_yield, refuse
from .budget import Budget
from .prefix_cache import CachedText, PrefixRows, SharedBase, SharedPrefix, shared_base

_FIRST_LINES = 64
_WASTE = 4  # allocated memory beyond this multiple of the need is returned
_MOST_KEPT = 1024  # rows; every prompt is compared with all of them
_RECENT = 128  # rows that are kept, however little runs: between two turns of a chat, many other requests come


class EngineMemory(RequestMemory):
    """
    The slot cache shared by an engine's requests. A request gets a slot for the length that it may reach when it
    begins, and stays there. Rows of ended requests are kept as long as they fit beside the running ones and no other
    row contains their text; the least recently used go first. A prompt with the same beginning as a kept or running row
    gets a copy of it. A long beginning in common with a running request is shared in place (`shared_base`): it stays
    in that request's slot until the last row that shares it is gone.

    Args:
        model (`PreTrainedModel`): The target.
        max_batch_size (`int`): Requests that run at once.
        budget (`Budget`): Bound on keys and values, drafters' included.

    Raises:
        ValueError: if a bound in bytes is below the states of one row.
    """

    def __init__(self, model: PreTrainedModel, max_batch_size: int, budget: Budget):
        self.forward = packed_forward(model, 1, _FIRST_LINES)
        per_row, per_token = self.forward.footprint()[:2]
        self.bytes_per_token = max(per_token, 1)
        self.max_bytes = budget.bytes_for(model, max_batch_size, self.bytes_per_token)
        max_batch_size, states = self._states_of(max_batch_size, budget, per_row + budget.states)
        self._bytes_per_line = self.bytes_per_token + budget.drafting
        max_tokens = (self.max_bytes - states) // self._bytes_per_line
        self.scheduler = Scheduler(max_batch_size, max_tokens)
        self._clear()
        self.prefixes = PrefixRows()
        self.watch(model)

    def _states_of(self, max_batch_size: int, budget: Budget, per_request: int) -> tuple[int, int]:
        """
        Return the requests that may run at once, and the bytes of their states, the drafters' included: at most half of
        the bound. A bound in tokens is raised by the states.
        """
        if not per_request:
            return max_batch_size, 0
        if budget.max_tokens is None:
            if self.max_bytes < per_request:
                raise ValueError(
                    f"One request's states take {per_request} bytes, but the engine's `max_kv_bytes` allows "
                    f"{self.max_bytes}: raise it to more than {per_request}."
                )
            max_batch_size = min(max_batch_size, max(self.max_bytes // (2 * per_request), 1))
        else:
            self.max_bytes += max_batch_size * per_request
        return max_batch_size, max_batch_size * per_request

    @property
    def max_tokens(self) -> int:
        return self.scheduler.max_tokens

    @property
    def num_bytes(self) -> int:
        return self.cache.num_lines * self.bytes_per_token + self.cache.num_state_bytes

    @property
    def cache(self) -> SlotCache:
        return self.forward.cache

    def call_of(self, prepared: PreparedCall) -> DecodingCall:
        """Return the request as a user of the shared forward."""
        route = prepared.route
        if route.way != "packed" or route.reads_media:
            raise refuse(route.reason or "images and the like are read by `generate` only")
        return decoding_call(prepared, self.forward)

    def size_of(self, call: DecodingCall) -> int:
        """Return the tokens that a request may reach, with the draft after its last one."""
        request = call.requests[0]
        assert request.max_new_tokens is not None, "generate always limits the length"
        return len(request.prompt) + request.max_new_tokens + call.draft_room

    def next(self, running: list[Request], suspend: Callable[[PendingRequest], None]) -> PendingRequest | None:
        """
        Return the scheduler's next request, where tokens shared in place with a running request take no memory. A
        request waits while a running one has not yet read a beginning that both could share.
        """
        is_reading = any([not request.tokens for request in running])

        def num_shared(pending: PendingRequest) -> int | None:
            return self._num_shared(pending.request, running, is_reading)

        bases = self._bases(running)
        num_held = sum(row.stride for row in bases if row in self.prefixes)
        can_yield = partial(may_yield, bases=bases)
        return self.scheduler.next(Admission(suspend, can_yield, has_had_turn, num_shared, num_held))

    def _num_shared(self, request: Request, running: list[Request], is_reading: bool) -> int | None:
        """Return the tokens that a request shares in place with a running one; None if it waits for some to be read."""
        length = self._base(request, running).length
        waits = is_reading and length < self._base(request, running, is_read=False).length
        return None if waits else length

    def _base(self, request: Request, running: list[Request], is_read: bool = True) -> SharedBase:
        """Return the beginning to share in place with a running request; none if a source keeps states."""
        if not self.forward.shares_prefixes or _stateful_source(request) is not None:
            return SharedBase()
        namespace = request.call.namespace
        others = [other for other in running if _stateful_source(other) is None and other.call.namespace == namespace]
        return shared_base(request.prompt, others, is_read)

    @staticmethod
    def _bases(running: Sequence[Request]) -> set[CacheRow]:
        """Return the rows, kept or running, whose beginnings running requests share."""
        return {
            request.row.prefix_row
            for request in running
            if request.row is not None and request.row.prefix_row is not None
        }

    def place(self, request: Request, running: list[Request]) -> None:
        """Give a request its row, with the longest beginning of its text that another row holds."""
        self._drop_covered()
        self._shrink()
        shared = self._longest(request, running)
        if shared is not None and not self._same_rotary(shared, request):
            shared = None
        is_known = shared is not None and shared.request_id is not None and not request.is_resumed
        if not is_known and _stateful_source(request) is not None:  # it needs all states anew
            shared = None
        if shared is not None:
            self.prefixes.touch(shared.row)
        row = self._new_row(self.size_of(request.call), shared, self._base(request, running))
        if shared is not None and shared.row is not row and (shared := self._still_cached(shared)) is not None:
            with self._removed_on_failure(row):
                self.cache.copy(shared.row, row, shared.length)
        if shared is not None:
            row.length, request.shares_with = shared.length, shared.request_id
        request.row = row

    def _drop_covered(self) -> None:
        """Drop rows whose texts are beginnings of other rows' texts."""
        self._remove(list(self.prefixes.covered()))

    def _longest(self, request: Request, running: list[Request]) -> SharedPrefix | None:
        """Return the longest beginning of a request's text with which another row can let it begin."""
        return self.prefixes.longest(request.text(), *self._known(request, running), self.cache.reusable)

    @staticmethod
    def _known(
        request: Request, running: list[Request]
    ) -> tuple[list[tuple[CacheRow, CachedText]], TreeCandidateGenerator | None, Hashable]:
        """Return the running texts, the request's source that keeps states, and its namespace."""
        texts = [(other.cache_row, _cached(other)) for other in running]
        return texts, _stateful_source(request), request.call.namespace

    def _still_cached(self, shared: SharedPrefix | None) -> SharedPrefix | None:
        """
        Return the shared prefix; if its row or its states have been dropped, the part in another row's slot, if any.
        """
        rows = self.cache.rows
        if shared is None or (shared.row in rows and self.cache.reusable(shared.row, shared.length) == shared.length):
            return shared
        base = shared.row.prefix_row
        if base is None or base not in rows:
            return None
        return shared._replace(row=base, length=min(shared.length, shared.row.prefix_len))

    @contextmanager
    def _removed_on_failure(self, row: CacheRow) -> Iterator[None]:
        """Remove the new row if the block fails, for example for lack of memory: no request would own it."""
        try:
            yield
        except BaseException:
            self.cache.remove(row)
            raise

    def finish_placement(self, request: Request) -> None:
        """Let sources release dropped texts, now that the request has begun and copied the states that it needs."""
        if not request.is_resumed:
            self.num_reused += request.cache_row.length
        gone, self.prefixes.dropped = self.prefixes.dropped, []
        for text in gone:
            release(text.on_release)

    def _same_rotary(self, shared: SharedPrefix, request: Request) -> bool:
        """Return whether the row's rotary embeddings, where they depend on the text's length, suit the request."""
        longest = max(shared.length, shared.row.least_length, len(request.prompt))
        return not self.forward.rotary or longest <= self.forward.rotary.border

    def _new_row(self, num_tokens: int, shared: SharedPrefix | None, base: SharedBase) -> CacheRow:
        """
        Return a row with a slot for `num_tokens`, less those shared in place in `base`. Kept rows are dropped to make
        room. Without a base, the row that holds the shared prefix may itself become the new row.
        """
        capacity = self.cache.slot_size(num_tokens - base.length)
        while (row := self._row_to_drop(capacity)) is not None:
            self.prefixes.drop([row])
            # A row whose beginning lies in another's slot cannot be reused, since its own slot lacks these tokens.
            if shared is not None and row is shared.row and base.row is row.prefix_row is None:
                with self._removed_on_failure(row):
                    self.forward.cut(row, shared.length)
                    self.cache.resize(row, capacity)
                self.cache.has_new_rows = True
                return row
            self.cache.remove(row)
        try:
            return self.cache.add(num_tokens, base.row, base.length)
        except (MemoryError, RuntimeError):  # less memory is free than the bound allows
            if not (kept := self.prefixes.droppable_except(shared and shared.row)):
                raise
            self._remove(kept)
        return self.cache.add(num_tokens, base.row, base.length)

    def _row_to_drop(self, capacity: int) -> CacheRow | None:
        """Return the kept row to drop next; None if there is room. Full memory drops rows rather than move them."""
        if not len(self.prefixes):
            return None
        # States kept by sources are not counted as memory: no more of them are kept than a full batch would have.
        with_states, num_running = self.prefixes.with_source_states(), len(self.cache.rows) - len(self.prefixes)
        if with_states and num_running + len(with_states) >= self.scheduler.max_batch_size:
            return with_states[0]
        fits = len(self.prefixes) < _MOST_KEPT and self.cache.has_room(capacity)
        return None if fits and (self.cache.may_grow or self.cache.has_gap(capacity)) else self.prefixes.oldest()

    def _shrink(self) -> None:
        """
        Return memory if little of it is needed. Needed are running rows, and kept rows that are no longer than these or
        are among the `_RECENT` used last. The cache grows again as rows are added.
        """
        longest = max(self.scheduler.running.values(), default=0)
        old = self.prefixes.long_unused(_RECENT, longest)
        enough = self.scheduler.num_taken + self.prefixes.num_taken - sum(row.stride for row in old)
        if self.cache.num_lines > _WASTE * max(enough, _FIRST_LINES):
            self._remove(old)
            self.cache.shrink(2 * enough)

    def _remove(self, kept: Sequence[CacheRow]) -> None:
        self.prefixes.drop(kept)
        for row in kept:
            self.cache.remove(row)

    def release(self, request: Request) -> None:
        """Keep the row of an ended request until its memory is needed."""
        row = request.cache_row
        self.forward.commit([row], [()])  # without a draft that was under verification
        if self.cache.reusable(row, row.length):
            self.prefixes.add(row, _cached(request))
        else:
            self.cache.remove(row)

    def suspend(self, request: Request) -> None:
        """Keep the row of a suspended request like that of an ended one, unless a source keeps states for it."""
        if _stateful_source(request) is None:
            self.release(request)
        else:
            self.cache.remove(request.cache_row)
        request.row = None

    def _forget(self, running: Sequence[Request]) -> None:
        written_decoder(self.model, thoroughly=True)  # which forgets copies of weights, too
        bases = self._bases(running)
        for row in sorted(self.prefixes.clear(), key=lambda row: row.num_sharers > 0):  # bases last
            if row not in bases:
                self.cache.remove(row)
        self.cache.forget()  # all lines are invalid, and dtype or device may have changed
        for request in running:
            self.forward.cut(request.cache_row, request.cache_row.prefix_len)
        self._renew_bases(running)

    def _renew_bases(self, running: Sequence[Request]) -> None:
        """Recompute beginnings that running requests share in place, since their own slots have no room for them."""
        sharers = [request for request in running if request.cache_row.prefix_row is not None]
        inputs = {}
        for request in sorted(sharers, key=lambda request: request.cache_row.prefix_len):  # the longest replaces others
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
        self.forward.cache = self.forward.new_cache(1, min(_FIRST_LINES, most_lines), most_lines)


def _cached(request: Request) -> CachedText:
    """Return the text in the request's row."""
    text = request.text()[: request.cache_row.length]
    callbacks = request.source_request.on_release
    return CachedText(text, request.request_id, _stateful_source(request), request.call.namespace, callbacks)


def _stateful_source(request: Request) -> TreeCandidateGenerator | None:
    """Return the request's source if it keeps states of its own beside keys and values; else None."""
    return request.call.source if request.call.chain.hidden_layers else None
