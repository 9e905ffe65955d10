"""The engine inside a manager: its outputs are delivered, and what its policy learns stays with the model."""

from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel

from ...decoding.call import DRAFT_ROOM
from ...goodput import CostModel, GoodputAuction
from ...prepare.model_state import state_of
from ..engine import Engine
from ..kv_memory import EngineMemory
from ..memory import RequestMemory
from .deliveries import DeliveredResults, Deliveries


class ManagedEngine(Engine):
    """
    Args:
        num_tokens (`int`, *optional*): Of texts, whose keys and values its memory is to hold; in place of a number of
            bytes.
        options: Of `Engine`.
    """

    def __init__(self, model: PreTrainedModel, assistant: Any, num_tokens: int | None = None, **options: Any):
        self.deliveries = Deliveries()
        self._num_tokens = num_tokens
        self._borrowed = ExitStack()
        super().__init__(model, assistant, **options)

    def _new_memory(self, max_batch_size: int, max_bytes: int | None) -> RequestMemory:
        memory = super()._new_memory(max_batch_size, max_bytes)
        if self._num_tokens is None or not isinstance(memory, EngineMemory):
            return memory
        num_tokens = self._num_tokens + max_batch_size * DRAFT_ROOM
        return super()._new_memory(max_batch_size, num_tokens * memory.bytes_per_token)

    def _new_results(self) -> DeliveredResults:
        return DeliveredResults(self.deliveries)

    def _new_auction(self, cost: CostModel) -> GoodputAuction:
        return self._borrowed.enter_context(state_of(self.model).policy(self._assistant.source.name, cost))

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

    def __contains__(self, request_id: str) -> bool:
        """Whether it waits or runs."""
        return self._results.is_open(request_id)

    def cancel_request(self, request_id: str) -> None:
        if request_id in self:
            self.deliveries.unwanted.add(request_id)
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
        return {item.output.request_id: item for item, _ in list(self.engine._memory.scheduler.waiting)}

    def has_pending_requests(self) -> bool:
        return self.engine._results.is_open()
