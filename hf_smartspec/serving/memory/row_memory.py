"""Requests of models that cannot be packed: each has a forward and a cache of its own."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from transformers import PreTrainedModel

from ...decoding.call import DecodingCall, Request
from ...prepare.call import PreparedCall, decoding_call
from ...prepare.config import SmartSpecConfig
from ...prepare.media import media_kwargs, without_empty_media
from ...prepare.sources import resolve
from ...target_model.cache.footprint import Footprint, caches_in, num_bytes
from ...target_model.compat import is_stateful
from ...target_model.forward.rowwise import ModelRow, RowwiseForward
from ...target_model.forward.stepwise import StepwiseForward
from ...target_model.model_state import warn_once
from ...target_model.support.wrappers import has_adapters_by_row
from ..outputs import Ticket
from ..scheduler import ByteScheduler
from .base import RequestMemory, refuse
from .budget import Budget


class RowMemory(RequestMemory):
    """
    Every request runs by itself, in caches of transformers' own, which go when it ends: no prompt is spared what
    another one has computed.

    Args:
        model (`PreTrainedModel`): The target.
        max_batch_size (`int`): Requests that run at once.
        budget (`Budget`): Bound on all caches, by what short texts take of them.
    """

    shares_forward = False

    def __init__(self, model: PreTrainedModel, max_batch_size: int, budget: Budget):
        self.footprint = Footprint.of(model)
        if is_stateful(model) and not any(self.footprint):  # its forwards hand nothing out (RecurrentGemma)
            max_batch_size = 1
            warn_once(
                model,
                f"{type(model).__name__} keeps the state of a text in its own modules: the engine serves one request "
                "at a time, and nobody else must run the model meanwhile.",
            )
        self.max_bytes = budget.bytes_for(model, max_batch_size, self.footprint.of_text(1, 1))
        self.scheduler: ByteScheduler[Ticket] = ByteScheduler(max_batch_size, self.max_bytes)
        self.watch(model)

    @property
    def num_bytes(self) -> int:
        rows = [ticket.request.row for ticket in list(self.scheduler.running)]
        kept = [row.kwargs for row in rows if isinstance(row, ModelRow)]
        return sum(num_bytes([*caches_in(kwargs), kwargs.get("encoder_outputs")]) for kwargs in kept)

    def call_of(self, prepared: PreparedCall) -> DecodingCall:
        """The request with a forward of its own; without drafts, where none can be taken back."""
        if media_kwargs(without_empty_media(prepared.model_kwargs)):
            raise refuse("images and the like are read by `generate` only")
        if has_adapters_by_row(self.model):  # for the time of this call
            raise refuse("every row has an adapter of its own (`adapter_names`)")
        forward: Any
        if prepared.route.way == "plain":
            nothing = SmartSpecConfig("none", namespace=prepared.assistant.config.namespace)
            prepared = replace(prepared, assistant=resolve(nothing, self.model))
            forward = StepwiseForward
        else:
            forward = RowwiseForward
        own = forward(self.model, prepared.input_ids, prepared.model_kwargs, prepared.generation_config)
        call = decoding_call(prepared, own)
        call.has_own_forward, call.read = True, prepared.read
        return call

    def size_of(self, call: DecodingCall) -> int:
        """Bytes of caches that a request may come to take, with the draft behind its last token."""
        request = call.requests[0]
        assert request.max_new_tokens is not None, "generate always limits the length"
        read, num_tokens = call.encoded_text(request), len(request.prompt) + request.max_new_tokens + call.draft_room
        return self.footprint.of_text(num_tokens, 0 if read is None else len(read))

    def place(self, request: Request, running: list[Request]) -> None:
        """Its own forward gives it a row, or begins that anew; what it reads is read now."""
        if request.call.encoder_inputs is not None:
            forward: Any = request.call.forward
            forward.set_encoder_outputs(request.call.read_encoder().outputs)
        if request.row is not None:
            request.call.forward.cut(request.row, 0)

    def suspend(self, request: Request) -> None:
        """Its row stays, and holds nothing."""
        forward: Any = request.call.forward
        forward.cut(request.cache_row, 0)
        if (unread := request.call.forget_encoder()) is not None:
            forward.set_encoder_outputs(unread.outputs)

    def _forget(self, running: Sequence[Request]) -> None:
        for request in running:
            self.place(request, [])
