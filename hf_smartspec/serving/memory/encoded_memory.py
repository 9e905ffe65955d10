"""An engine's memory for encoder-decoder models: keys and values of decoder texts and of encoder outputs."""

from collections.abc import Sequence

import numpy as np
import torch
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput

from ...decoding.call import DecodingCall, Request
from ...prepare.call import PreparedCall, decoding_call
from ...target_model.cache.slabs import slot_size
from ...target_model.cache.slot_cache import SlotCache
from ...target_model.encoded import EncodedForward, OwnCache, encoder_size, masks_encoder
from ...target_model.layout.rows import RowInput
from ..outputs import PendingRequest
from ..scheduler import ByteScheduler
from .base import RequestMemory, refuse
from .budget import Budget

_FIRST_LINES = 64
_WASTE = 4  # allocated memory beyond this multiple of the need is returned


class EncodedMemory(RequestMemory):
    """
    Two slot caches shared by an engine's requests: for decoder tokens, and for encoder outputs. A request gets a slot
    in each when it begins; its encoder runs then. Nothing is kept of ended requests, since a decoder's keys and values
    depend on the encoder's whole text.

    Args:
        model (`PreTrainedModel`): The target, with an encoder that reads tokens.
        max_batch_size (`int`): Requests that run at once.
        budget (`Budget`): Bound on both caches together.
    """

    def __init__(self, model: PreTrainedModel, max_batch_size: int, budget: Budget):
        self.forward = EncodedForward(model, 1, _FIRST_LINES)
        self.bytes_per_token, self.bytes_per_encoded = self._measure()
        self.max_bytes = budget.bytes_for(model, max_batch_size, self.bytes_per_token + self.bytes_per_encoded)
        self.scheduler: ByteScheduler[PendingRequest] = ByteScheduler(max_batch_size, self.max_bytes)
        self._bytes_of_output = encoder_size(model) * model.dtype.itemsize
        self._drafting, self._states = budget.drafting, budget.states
        self.reset()
        self.watch(model)

    @torch.no_grad()
    def _measure(self) -> tuple[int, int]:
        """Return the bytes of keys and values per decoder token and per encoder token, from a forward of one token."""
        row = self.forward.add()
        self.forward.forward([RowInput(row, np.zeros(1, np.int64))])
        return self.forward.cache.bytes_per_line, self.forward.cross.bytes_per_line

    @property
    def num_bytes(self) -> int:
        return self._bytes(self.forward.cache.num_lines, self.forward.cross.num_lines)

    def _bytes(self, num_own: int, num_read: int) -> int:
        """Return the bytes of `num_own` lines of the decoder cache and `num_read` lines of the encoder cache."""
        return num_own * self.bytes_per_token + num_read * self.bytes_per_encoded

    def call_of(self, prepared: PreparedCall) -> DecodingCall:
        """Return the request as a user of the shared forward. Its encoder runs when it begins."""
        if prepared.route.way != "packed":
            raise refuse(prepared.route.reason or "it cannot be packed")
        call = decoding_call(prepared, self.forward)
        call.read = prepared.read
        return call

    def size_of(self, call: DecodingCall) -> int:
        """Return the bytes of a request's slots, and of its encoder's output, which is kept for drafters."""
        own, read = self._lengths(call)
        output = read * self._bytes_of_output + own * self._drafting + self._states
        slots = self._bytes(slot_size(own), slot_size(read)) + output
        return min(slots, max(self._bytes(own, read) + output, self.max_bytes))

    @staticmethod
    def _lengths(call: DecodingCall) -> tuple[int, int]:
        """Return the tokens that a request may reach, with the last draft, and the tokens that its encoder reads."""
        request = call.requests[0]
        assert request.max_new_tokens is not None, "generate always limits the length"
        return len(request.prompt) + request.max_new_tokens + call.draft_room, len(request.source_request.subject)

    def place(self, request: Request, running: list[Request]) -> None:
        """Run the encoder, and give the request its slots."""
        outputs, mask = self._read(request.call)
        own, read = self._lengths(request.call)
        self._make_room(own, read)
        (request.row,) = self.forward.encode(outputs, mask, own)

    def suspend(self, request: Request) -> None:
        self.forward.remove(request.cache_row)
        request.row = None
        request.call.forget_encoder()

    def _read(self, call: DecodingCall) -> tuple[BaseModelOutput, torch.Tensor | None]:
        inputs = call.read_encoder()
        return inputs.outputs, inputs.mask if masks_encoder(self.model) else None

    def _make_room(self, num_own: int, num_read: int) -> None:
        """Bound both caches so that a row fits into each, and both into memory. Return unused memory."""
        own, cross = self.forward.cache, self.forward.cross
        for cache in (own, cross):
            if cache.num_lines > _WASTE * max(cache.num_taken, _FIRST_LINES):
                cache.shrink(2 * cache.num_taken)
        sizes = slot_size(num_own), slot_size(num_read)
        if self._bytes(own.num_taken + sizes[0], cross.num_taken + sizes[1]) > self.max_bytes:
            sizes = num_own, num_read  # these fit, or the request would not have been admitted
        needs = own.num_taken + sizes[0], cross.num_taken + sizes[1]
        if self._bytes(max(own.num_lines, needs[0]), max(cross.num_lines, needs[1])) > self.max_bytes:
            own.shrink(max(own.num_taken, 1))
            cross.shrink(max(cross.num_taken, 1))
        lines = max(own.num_lines, needs[0]), max(cross.num_lines, needs[1])
        spare = self.max_bytes - self._bytes(*lines)
        cross.most_lines = lines[1] + min(lines[1] // 2, spare // 2 // self.bytes_per_encoded)
        own.most_lines = (self.max_bytes - cross.most_lines * self.bytes_per_encoded) // self.bytes_per_token

    def _forget(self, running: Sequence[Request]) -> None:
        for cache in (self.forward.cache, self.forward.cross):
            cache.layers.clear()  # all lines are invalid, and dtype or device may have changed
        for request in running:
            outputs, mask = self._read(request.call)
            self.forward.encode_anew(request.cache_row, outputs, mask)

    def reset(self) -> None:
        self.forward.clear(OwnCache(1, _FIRST_LINES), SlotCache(1, _FIRST_LINES))
