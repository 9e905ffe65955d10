"""What an engine asks of the memory of its requests, whichever way the model is run."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence

from transformers import PreTrainedModel

from ...decoding.call import DecodingCall, Request
from ...prepare.call import PreparedCall
from ...target_model.layout.rows import CacheRow
from ..outputs import Ticket
from ..scheduler import Scheduler
from .weights import WeightsVersion


class RequestMemory(ABC):
    """
    Who may run, and what their forwards keep of texts.

    Attributes:
        scheduler (`Scheduler`): Who waits and who runs.
        max_bytes (`int`): Bound on keys and values.
        shares_forward (`bool`): Whether requests that run share one, whose cost depends on all of them.
        num_reused (`int`): Prompt tokens whose keys and values another row had already.
    """

    scheduler: Scheduler[Ticket]
    max_bytes: int
    shares_forward = True
    num_reused = 0
    _weights: WeightsVersion
    _version: int | None

    def watch(self, model: PreTrainedModel) -> None:
        """Begins to look whether its weights change."""
        self.model = model
        self._weights = WeightsVersion(model)
        self._version = self._weights.number

    @property
    @abstractmethod
    def num_bytes(self) -> int:
        """What is allocated."""

    @abstractmethod
    def call_of(self, prepared: PreparedCall) -> DecodingCall:
        """
        A request, ready for the loop.

        Raises:
            ValueError: if an engine cannot serve it.
        """

    @abstractmethod
    def size_of(self, call: DecodingCall) -> int:
        """What a request may come to take, in the scheduler's unit."""

    @abstractmethod
    def place(self, request: Request, running: list[Request]) -> None:
        """A request is about to begin, or to go on."""

    def next(self, running: list[Request], suspend: Callable[[Ticket], None]) -> Ticket | None:
        """
        The next request that may begin or go on beside these; it then counts as running, and is to be placed at once.
        `suspend` gets those that give way to it.
        """
        return self.scheduler.next(suspend=suspend, may_yield=may_yield, has_had_turn=has_had_turn)

    @abstractmethod
    def suspend(self, request: Request) -> None:
        """A request gives way: its memory is free for others, and what it held is computed anew when it goes on."""

    def settle(self, request: Request) -> None:  # noqa: B027 (mostly nothing)
        """A request that was placed has begun, or goes on."""

    @property
    def keeper(self) -> Callable[[Request], None] | None:
        """What gets requests that have ended, with their rows; None where these go."""
        return None

    def expire(self) -> None:
        """The model may have changed in ways that its parameters do not show."""
        self._version = None
        self._weights = WeightsVersion(self.model)

    def check_weights(self, running: Sequence[Request]) -> None:
        """After a change of the model's weights, whatever was computed with the old ones is computed anew."""
        version = self._weights.number
        if version != self._version:
            self._version = version
            self._forget(running)

    @abstractmethod
    def _forget(self, running: Sequence[Request]) -> None:
        """What was computed counts no more, for running requests and for others."""

    def reset(self) -> None:  # noqa: B027 (nor here)
        """Begins anew after a forward has failed; nothing may be running."""


def may_yield(ticket: Ticket, bases: Collection[CacheRow] = ()) -> bool:
    """
    Return whether a running request can give way: no draft of it is under verification, and its row is none of the
    `bases` in which texts of other running requests begin.
    """
    request = ticket.request
    return request.row is not None and request.tree is None and request.row not in bases


def has_had_turn(ticket: Ticket) -> bool:
    """
    Return whether a running request has read all of its text but the newest token, and generated enough tokens for
    what was computed anew (`Ticket.spare_after`), since it runs.
    """
    request = ticket.request
    return request.row is not None and request.num_uncached <= 1 and request.num_generated >= ticket.num_spared


def refuse(reason: str) -> ValueError:
    """The error for what an engine cannot serve."""
    return ValueError(f"An engine cannot serve this: {reason}. Use `model.generate(assistant=...)`.")
