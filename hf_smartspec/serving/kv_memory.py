"""An engine's key/value memory: who may run, where rows lie, and which prefixes are there already."""

import os
from collections.abc import Sequence

import numpy as np
import torch
from transformers import PreTrainedModel

from ..candidates.base import TreeCandidateGenerator
from ..decoding.call import DecodingCall
from ..decoding.request import Request
from ..decoding.source_guard import forget
from ..target.layout import CacheRow, RowInput
from ..target.slot_cache import SlotCache
from ..target.written import packed_forward
from .outputs import Ticket
from .prefix_cache import CachedText, PrefixRows, SharedPrefix
from .scheduler import MemoryShape, Scheduler

_FIRST_SLOTS, _FIRST_CAPACITY = 1, 64
_FALLBACK_BYTES = 2**32  # where the machine does not say how much memory it has


class EngineMemory:
    """
    The slot cache that an engine's requests share.

    Args:
        model (`PreTrainedModel`): The target.
        max_batch_size (`int`): Requests that run at once.
        max_bytes (`int`, *optional*): Bound on keys and values. Default: half of a GPU's free memory, a quarter of a
            CPU's.

    Attributes:
        num_reused (`int`): Prompt tokens whose keys and values were copied from another row.
    """

    def __init__(self, model: PreTrainedModel, max_batch_size: int, max_bytes: int | None):
        self.forward = packed_forward(model, _FIRST_SLOTS, _FIRST_CAPACITY)
        self.bytes_per_token = self._measure()
        max_bytes = _default_bytes(model.device) if max_bytes is None else max_bytes
        self.scheduler: Scheduler[Ticket] = Scheduler(max_batch_size, max_bytes // self.bytes_per_token)
        self.prefixes = PrefixRows()
        self.num_reused = 0
        self._parameters = list(model.parameters())  # walking the modules takes ten times as long as what follows
        self._version: int | None = weights_version(self._parameters)

    @torch.no_grad()
    def _measure(self) -> int:
        """Bytes of keys and values per token, from a forward of one token."""
        row = self.forward.add()
        self.forward.forward([RowInput(row, np.zeros(1, np.int64))])
        layers = self.forward.cache.layers
        memories = [memory for layer in layers for memory in (layer.keys, layer.values)]
        self._clear()
        return sum(memory.element_size() * memory[0, 0].numel() for memory in memories)

    @property
    def num_bytes(self) -> int:
        """What is allocated."""
        return self.cache.num_slots * self.cache.capacity * self.bytes_per_token

    @property
    def cache(self) -> SlotCache:
        return self.forward.cache

    @staticmethod
    def num_tokens(call: DecodingCall) -> int:
        """Tokens that a request may reach, the draft behind its last one included."""
        request = call.requests[0]
        assert request.max_new_tokens is not None, "generate always limits the length"
        return len(request.prompt) + request.max_new_tokens + call.draft_room

    def place(self, request: Request, running: list[Request]) -> None:
        """Gives a request its row, with as much of its prompt as some row there holds already."""
        self._fit()
        texts = [(other.cache_row, _cached(other)) for other in running]
        shared = self.prefixes.longest(request.prompt, texts, _keeper(request))
        if shared is not None and not self._agrees(shared, request):
            shared = None
        request.row = self._new_row(shared)
        if shared is not None:
            if shared.row is not request.row:
                self.cache.copy(shared.row, request.row, shared.length)
            request.row.length, request.shares_with = shared.length, shared.request_id

    def settle(self, request: Request) -> None:
        """A request that was placed has begun: its source has brought back what it had kept of others."""
        self.num_reused += request.cache_row.length
        gone, self.prefixes.given_up = self.prefixes.given_up, []
        for text in gone:
            assert text.source is not None, "only these are told"
            forget(text.source, text.request_id)

    def _agrees(self, shared: SharedPrefix, request: Request) -> bool:
        """Whether rotary embeddings that depend on the length of the text are those that the request would compute."""
        longest = max(shared.length, shared.row.least_length, len(request.prompt))
        return not self.forward.rotary or longest <= self.forward.rotary.border

    def _new_row(self, shared: SharedPrefix | None) -> CacheRow:
        if len(self.cache.rows) == self.cache.num_slots and len(self.prefixes):
            row = self.prefixes.pop()
            if shared is not None and row is shared.row:
                return row
            self.cache.remove(row)
        return self.cache.add()

    def _fit(self) -> None:
        """Brings the memory into the shape that the running requests need; kept rows have what is left."""
        current = MemoryShape(self.cache.num_slots, self.cache.capacity)
        shape = self.scheduler.shape(current, len(self.prefixes))
        if shape == current:
            return
        while len(self.cache.rows) > shape.num_slots and len(self.prefixes):
            self.cache.remove(self.prefixes.pop())
        for row in self.prefixes.longer_than(shape.capacity):
            self.cache.remove(row)
        self.cache.resize(shape.num_slots, shape.capacity)

    def release(self, request: Request) -> None:
        """The request has ended: its row is kept, as long as nobody needs the memory."""
        row = request.cache_row
        row.num_nodes = 0
        self.prefixes.add(row, _cached(request))

    def expire(self) -> None:
        """The model may have changed in ways that its parameters do not show."""
        self._version, self._parameters = None, list(self.forward.model.parameters())

    def check_weights(self, running: list[Request]) -> None:
        """After a change of the model's weights, whatever was computed with the old ones is computed anew."""
        version = weights_version(self._parameters)
        if version == self._version:
            return
        self._version = version
        for row in self.prefixes.clear():
            self.cache.remove(row)
        for request in running:
            self.forward.cut(request.cache_row, 0)
        self.cache.layers.clear()  # nothing in them counts any more, and dtype or device may be others now

    def reset(self) -> None:
        """Begins anew after a forward has failed; nothing may be running."""
        self.prefixes.clear()
        self._clear()

    def _clear(self) -> None:
        self.forward.cache = SlotCache(_FIRST_SLOTS, _FIRST_CAPACITY)


def _cached(request: Request) -> CachedText:
    """What the request's row holds."""
    return CachedText(request.text()[: request.cache_row.length], request.request_id, _keeper(request))


def _keeper(request: Request) -> TreeCandidateGenerator | None:
    """The request's source if it may keep something of its own beside keys and values."""
    return request.call.source if request.call.hidden_layers else None


def weights_version(parameters: Sequence[torch.Tensor]) -> int:
    """A number that changes with the weights: by optimiser steps, loading, moving, or changes in place."""
    return hash(tuple((item.data_ptr(), 0 if item.is_inference() else item._version) for item in parameters))


def _default_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0] // 2
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES") // 4
    except (AttributeError, ValueError):  # Windows, macOS
        return _FALLBACK_BYTES
