"""The engine inside a manager: its outputs are delivered, and what its policy learns stays with the model."""

import threading
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from transformers import LogitsProcessorList, PreTrainedModel

from ...decoding.call import DRAFT_ROOM, DecodingCall
from ...goodput import CostModel, GoodputAuction
from ...prepare.call import PreparedCall, borrow_policy
from ..engine import Engine
from ..memory.base import RequestMemory
from ..memory.kv_memory import EngineMemory
from .deliveries import DeliveredResults, Deliveries
from .logprobs import ChosenLogprobs


class ManagedEngine(Engine):
    """
    Args:
        num_tokens (`int`, *optional*): Of texts, whose keys and values its memory is to hold; in place of a number of
            bytes.
        returns_logprobs (`bool`): Whether outputs hold the log-probabilities of their tokens.
        options: Of `Engine`.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        assistant: Any,
        num_tokens: int | None = None,
        returns_logprobs: bool = False,
        **options: Any,
    ):
        self.deliveries = Deliveries()
        self._returns_logprobs, self._adding = returns_logprobs, threading.local()
        self._num_tokens = num_tokens
        self._borrowed = ExitStack()
        super().__init__(model, assistant, **options)

    def _new_memory(self, max_batch_size: int, max_bytes: int | None) -> RequestMemory:
        memory = super()._new_memory(max_batch_size, max_bytes)
        if self._num_tokens is None or not isinstance(memory, EngineMemory):
            return memory
        num_tokens = self._num_tokens + max_batch_size * DRAFT_ROOM
        return super()._new_memory(max_batch_size, num_tokens * memory.bytes_per_token)

    _results: DeliveredResults

    def _new_results(self) -> DeliveredResults:
        return DeliveredResults(self.deliveries)

    def _new_auction(self, cost: CostModel) -> GoodputAuction:
        return self._borrowed.enter_context(borrow_policy(self.model, self._assistant.source.name, cost))

    @property
    def max_tokens(self) -> int | None:
        """Of all texts together; None where memory is counted otherwise."""
        return self._memory.scheduler.max_tokens if isinstance(self._memory, EngineMemory) else None

    @property
    def fatal_error(self) -> BaseException | None:
        """What has ended the engine's thread, if it was no request's own failure and nobody has started it since."""
        return self._runner.fatal_error

    def check(self, arguments: dict[str, Any]) -> None:
        """Raises `ValueError` or `TypeError` if no request can be served with these arguments of `add_request`."""
        kept = {name: value for name, value in arguments.items() if name not in ("assistant", "streamer", "tag")}
        # With a seed, no random number is drawn for it.
        self._prepare(torch.zeros(1, 1, dtype=torch.long), arguments.get("assistant"), 0, kept)

    def add_request(self, input_ids: Any, request_id: str | None = None, *args: Any, **kwargs: Any) -> str:
        self._adding.request_id = request_id
        try:
            return super().add_request(input_ids, request_id, *args, **kwargs)
        finally:
            self._adding.request_id = None

    def _captured(self, prepared: PreparedCall) -> DecodingCall:
        name = getattr(self._adding, "request_id", None)
        if self._returns_logprobs and name is not None:
            recorder = ChosenLogprobs(prepared.input_ids.shape[1])
            processors = LogitsProcessorList([*prepared.logits_processor, recorder])
            prepared = replace(prepared, logits_processor=processors)
            self.deliveries.logprobs[name] = recorder
        return super()._captured(prepared)

    def __contains__(self, request_id: str) -> bool:
        """Whether it waits or runs."""
        return self._results.is_open(request_id)

    def cancel_request(self, request_id: str) -> None:
        self._results.unwant(request_id)
        super().cancel_request(request_id)

    def free(self) -> None:
        """Gives back its memory; not while it runs."""
        self._memory.reset()
        self._borrowed.close()


class Processor(NamedTuple):
    """What transformers' tests and monitors look at in a manager's `batch_processor`."""

    engine: ManagedEngine

    @property
    def scheduler(self) -> "Processor":
        return self

    @property
    def active_requests(self) -> dict[str, Any]:
        return {item.output.request_id: item for item in list(self.engine._memory.scheduler.running)}

    @property
    def waiting_requests(self) -> dict[str, Any]:
        return {item.output.request_id: item for item in self.engine._memory.scheduler.waiting}

    def has_pending_requests(self) -> bool:
        return self.engine._results.is_open()
