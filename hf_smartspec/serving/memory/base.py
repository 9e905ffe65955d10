"""The interface of an engine's memory, whichever way the model is run."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence

from transformers import PreTrainedModel

from ...decoding.call import DecodingCall, Request
from ...prepare.call import PreparedCall
from ...target_model.layout.rows import CacheRow
from ..outputs import PendingRequest
from ..scheduler import Admission, Scheduler
from .weights import WeightsVersion


class RequestMemory(ABC):
    """
    Interface of memories: they admit requests, and hold the keys and values of their texts.

    Attributes:
        scheduler (`Scheduler`): The requests that wait and run.
        max_bytes (`int`): Bound on keys and values.
        shares_forward (`bool`): Whether running requests share one forward, whose cost depends on all of them.
        num_reused (`int`): Prompt tokens whose keys and values were taken from another row.
        release (`Callable`, *optional*): Takes over the rows of ended requests; if None, their rows are dropped.
    """

    scheduler: Scheduler[PendingRequest]
    max_bytes: int
    shares_forward = True
    num_reused = 0
    release: Callable[[Request], None] | None = None
    _weights: WeightsVersion
    _version: int | None

    def watch(self, model: PreTrainedModel) -> None:
        """Begin to watch the model's weights for changes."""
        self.model = model
        self._weights = WeightsVersion(model)
        self._version = self._weights.number

    @property
    def max_tokens(self) -> int | None:
        """Return the tokens that a single text may reach; None if memory is counted in bytes."""
        return None

    @property
    @abstractmethod
    def num_bytes(self) -> int:
        """Return the allocated bytes."""

    @abstractmethod
    def call_of(self, prepared: PreparedCall) -> DecodingCall:
        """
        Return a prepared request, ready for the loop.

        Raises:
            ValueError: if an engine cannot serve the request.
        """

    @abstractmethod
    def size_of(self, call: DecodingCall) -> int:
        """Return the most memory that a request may take, in the scheduler's unit."""

    @abstractmethod
    def place(self, request: Request, running: list[Request]) -> None:
        """Give a request its row before it begins or resumes."""

    def next(self, running: list[Request], suspend: Callable[[PendingRequest], None]) -> PendingRequest | None:
        """
        Return the next request that may begin or resume beside the running ones; None if there is none. It counts as
        running, and the caller places it at once. `suspend` is called for each request that gives way to it.
        """
        return self.scheduler.next(Admission(suspend, may_yield, has_had_turn))

    @abstractmethod
    def suspend(self, request: Request) -> None:
        """Free the memory of a request that gives way. Its keys and values are computed anew when it resumes."""

    def finish_placement(self, request: Request) -> None:  # noqa: B027 (optional)
        """Finish the placement of a request after it has begun or resumed."""

    def expire(self) -> None:
        """Discard everything at the next check: the model may have changed in ways that its parameters do not show."""
        self._version = None
        self._weights = WeightsVersion(self.model)

    def check_weights(self, running: Sequence[Request], may_wait: bool = False) -> None:
        """
        Discard all keys and values computed with earlier weights, if the model's weights have changed. If it
        `may_wait`, changes are looked for twenty times a second, except for optimizer steps, which are counted.
        """
        version = self._weights.look(may_wait)
        if version != self._version:
            self._version = version
            self._forget(running)

    @abstractmethod
    def _forget(self, running: Sequence[Request]) -> None:
        """Discard all keys and values; running requests compute theirs anew."""

    def keep_states(self, running: Sequence[Request]) -> None:  # noqa: B027 (optional)
        """Keep states that running requests have reached, for prompts that begin alike."""

    def reset(self) -> None:  # noqa: B027 (optional)
        """Start over after a failed forward, with no request running."""


def may_yield(pending: PendingRequest, bases: Collection[CacheRow] = ()) -> bool:
    """
    Return whether a running request can give way: it has no draft under verification, and no other running request
    shares the beginning of its row (`bases` are the rows whose beginnings are shared).
    """
    request = pending.request
    return request.row is not None and request.tree is None and request.row not in bases


def has_had_turn(pending: PendingRequest) -> bool:
    """
    Return whether a running request has read all of its text but the newest token, and, if it was resumed, generated
    enough tokens in return for those that were recomputed (`PendingRequest.spare_after`).
    """
    request = pending.request
    return request.row is not None and request.num_uncached <= 1 and request.num_generated >= pending.num_spared


def refuse(reason: str) -> ValueError:
    """Return the error for a request that an engine cannot serve."""
    return ValueError(f"An engine cannot serve this request: {reason}. Use `model.generate(assistant=...)`.")
