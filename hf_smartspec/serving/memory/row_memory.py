"""An engine's memory for models that cannot be packed: each request has its own forward and cache."""

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
from ..outputs import PendingRequest
from ..scheduler import ByteScheduler
from .base import RequestMemory, refuse
from .budget import Budget


class RowMemory(RequestMemory):
    """
    Memory in which every request runs by itself, with transformers' own caches. They are freed when it ends, and no
    prompt reuses another's keys and values.

    Args:
        model (`PreTrainedModel`): The target.
        max_batch_size (`int`): Requests that run at once.
        budget (`Budget`): Bound on all caches.
    """

    shares_forward = False

    def __init__(self, model: PreTrainedModel, max_batch_size: int, budget: Budget):
        self.footprint, self._drafting, self._states = Footprint.of(model), budget.drafting, budget.states
        if is_stateful(model) and not any(self.footprint):  # its forwards return no cache (RecurrentGemma)
            max_batch_size = 1
            warn_once(
                model,
                f"{type(model).__name__} keeps the state of a text in its own modules: the engine serves one request "
                "at a time, and the model must not be run elsewhere meanwhile.",
            )
        self.max_bytes = budget.bytes_for(model, max_batch_size, self.footprint.of_text(1, 1))
        self.scheduler: ByteScheduler[PendingRequest] = ByteScheduler(max_batch_size, self.max_bytes)
        self.watch(model)

    @property
    def num_bytes(self) -> int:
        rows = [pending.request.row for pending in list(self.scheduler.running)]
        kept = [row.kwargs for row in rows if isinstance(row, ModelRow)]
        return sum(num_bytes([*caches_in(kwargs), kwargs.get("encoder_outputs")]) for kwargs in kept)

    def call_of(self, prepared: PreparedCall) -> DecodingCall:
        """Return the request with its own forward; without drafts, if the model cannot roll tokens back."""
        if media_kwargs(without_empty_media(prepared.model_kwargs)):
            raise refuse("images and the like are read by `generate` only")
        if has_adapters_by_row(self.model):  # they apply during this call of `generate` only
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
        """Return the bytes of caches that a request may need, with the draft after its last token."""
        request = call.requests[0]
        assert request.max_new_tokens is not None, "generate always limits the length"
        read, num_tokens = call.encoded_text(request), len(request.prompt) + request.max_new_tokens + call.draft_room
        drafting = num_tokens * self._drafting + self._states
        return self.footprint.of_text(num_tokens, 0 if read is None else len(read)) + drafting

    def place(self, request: Request, running: list[Request]) -> None:
        """Run the request's encoder, if it has one, and empty the row of a resumed request."""
        if request.call.encoder_inputs is not None:
            forward: Any = request.call.forward
            forward.set_encoder_outputs(request.call.read_encoder().outputs)
        if request.row is not None:
            request.call.forward.cut(request.row, 0)

    def suspend(self, request: Request) -> None:
        """Empty the row of a suspended request."""
        forward: Any = request.call.forward
        forward.cut(request.cache_row, 0)
        if (unread := request.call.forget_encoder()) is not None:
            forward.set_encoder_outputs(unread.outputs)

    def _forget(self, running: Sequence[Request]) -> None:
        for request in running:
            self.place(request, [])
