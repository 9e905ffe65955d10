"""An engine's memory for models with recurrent layers: keys and values, and states, which cannot be cut."""

from collections.abc import Sequence
from contextlib import suppress

from ...decoding.call import Request
from ...target_model.layout.rows import CacheRow
from ...target_model.recurrent.cache import StateCache
from .kv_memory import EngineMemory
from .prefix_cache import SharedBase, SharedPrefix, num_shared

_LEAST = 32  # tokens for whose sake states are kept, or waited for
_EVERY = 512  # tokens of a prompt after which states are kept


class StateMemory(EngineMemory):
    """
    `EngineMemory` whose rows have states. They are kept (`StateCache.keep`) at the end of a text, at the end of its
    prompt and every 512 tokens before, and where a prompt departs from a known text. A prompt begins at the last kept
    state of its beginnings. Kept states take memory that lines leave free; the least recently used rows give way to
    them, and they to the requests that run.
    """

    @property
    def cache(self) -> StateCache:
        cache = self.forward.cache
        assert isinstance(cache, StateCache), "the model has recurrent layers"
        return cache

    def keep_states(self, running: Sequence[Request]) -> None:
        """Keep the states that prompts have reached at one of their marks, or many tokens after the last kept ones."""
        for request in running:
            row = request.row
            if row is None or row.length > len(request.prompt) or request.tree is not None:
                continue
            is_due = row.length in row.marks or row.length - self.cache.reusable(row, row.length) >= _EVERY
            if is_due or row.length < max(row.marks, default=0):  # the next step may keep some
                self._make_room()
            if is_due:
                self.cache.keep(row)

    def _make_room(self) -> None:
        """Make room for one more kept state: drop the least recently used rows only where no memory is free."""
        cache = self.cache
        while not cache.has_room(cache.lines_per_state) and (row := self.prefixes.oldest()) is not None:
            self._remove([row])
        if not cache.may_keep and cache.has_room(cache.lines_per_state):
            with suppress(MemoryError, RuntimeError):  # rows are copied for it; without room, no state is kept
                cache.shrink(cache.num_taken)

    def _num_shared(self, request: Request, running: list[Request], is_reading: bool) -> int | None:
        """
        Return 0 tokens shared in place; None while a running request is about to read a beginning that both have in
        common. It keeps its states there, with which the other one begins.
        """
        reading = [other for other in running if other.row is not None and other.row.length < len(other.prompt)]
        alike = [other for other in reading if other.call.namespace == request.call.namespace]
        shared = [(min(num_shared(other.prompt, request.prompt), len(request.prompt) - 1), other) for other in alike]
        unread = [(length, other) for length, other in shared if length > other.cache_row.length]
        if not unread:
            return 0
        length, other = max(unread, key=lambda item: item[0])
        known = self._longest(request, running)
        if length < _LEAST + (0 if known is None else known.length):
            return 0
        other.cache_row.marks = {*other.cache_row.marks, length}
        return None

    def place(self, request: Request, running: list[Request]) -> None:
        super().place(request, running)
        row = request.cache_row
        known = self.prefixes.longest(request.prompt, *self._known(request, running))
        if known is not None:
            self.prefixes.touch(known.row)  # even if its states are not kept where the prompt departs
        ends = len(request.prompt) - 1, 0 if known is None else known.length
        row.marks = [end for end in ends if end >= row.length + _LEAST]

    def _drop_covered(self) -> None:
        covered = self.prefixes.covered()
        for row, longer in covered.items():
            self.cache.kept.inherit(longer, row, row.length)
        self._remove(list(covered))

    def _longest(self, request: Request, running: list[Request]) -> SharedPrefix | None:
        if not self.cache.tells_prompts:
            return super()._longest(request, running)
        return self.prefixes.longest(request.prompt, *self._known(request, running), self.cache.reusable)

    def _new_row(self, num_tokens: int, shared: SharedPrefix | None, base: SharedBase) -> CacheRow:
        row = super()._new_row(num_tokens, shared, base)
        self._give_up_states(0)
        return row

    def _row_to_drop(self, capacity: int) -> CacheRow | None:
        if (row := super()._row_to_drop(capacity)) is None:
            self._give_up_states(capacity)
        return row

    def _give_up_states(self, capacity: int) -> None:
        """Drop the kept states of running rows, too, where there is no room for a slot otherwise."""
        if not self.cache.has_room(capacity):
            self.cache.kept.clear()

    def release(self, request: Request) -> None:
        row = request.cache_row
        # Where prompts are read in another way than what follows, no prompt has the states of generated tokens.
        if row.length and not (request.tokens and self.cache.tells_prompts):
            self._make_room()
            self.cache.keep(row)
        self.cache.rest(row)
        super().release(request)

    def _clear(self) -> None:
        lines = self.cache.lines_per_state or -(-self.cache.bytes_per_state // self._bytes_per_line)
        super()._clear()
        self.cache.most_rows, self.cache.lines_per_state = self.scheduler.max_batch_size, lines
