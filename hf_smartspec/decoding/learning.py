"""What learns from requests while they are served, as the decoding loop sees it."""

from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np
from torch import nn

from ..candidates.base import TreeCandidateGenerator
from ..candidates.committed import Committed
from ..log import get_logger

logger = get_logger(__name__)


class Recorder(ABC):
    """
    Is shown the steps of requests, whether anything is drafted for them or not.

    Attributes:
        hidden_layers (sequence of `int`): Which hidden states it is shown; see `TreeCandidateGenerator`.
    """

    hidden_layers: Sequence[int] = ()

    @abstractmethod
    def start(
        self, request_id: Hashable, prompt: np.ndarray, is_greedy: bool, encoded: np.ndarray | None = None
    ) -> None:
        """
        A request begins; `prompt` (int64 `[prompt_len]`) stays valid and unchanged, and so does `encoded`, the tokens
        that the target's encoder has read, if it has one that reads tokens.
        """

    @abstractmethod
    def show(self, request_id: Hashable, step: Committed) -> None:
        """
        One step of it, with scores of all nodes or of those on the accepted path alone. Where a prefix was reused,
        hidden states begin behind it.
        """

    @abstractmethod
    def stop(self, request_id: Hashable) -> None:
        """It has ended, in whatever way; unknown ids are ignored."""


class Learning(ABC):
    """Drafters that learn, and what they have to know of loops that use them."""

    @abstractmethod
    def check(self, source: TreeCandidateGenerator, target: nn.Module) -> None:
        """Raises `ValueError` if nothing of it can learn, or not without the target that it drafts for."""

    @abstractmethod
    def recorders(self, sources: Sequence[TreeCandidateGenerator]) -> tuple[Recorder, ...]:
        """What records the requests that these sources draft for."""

    @abstractmethod
    def between_steps(self, loop: Any, num_running: int, num_waiting: int) -> None:
        """
        A loop is between two of its steps: now its drafters may get other weights. It has so many requests to serve;
        none, when it ends.
        """


class GuardedRecorders:
    """Calls recorders so that what they do wrong costs nothing but what they would have learnt."""

    def __init__(self, recorders: Sequence[Recorder] = ()):
        self.recorders = recorders

    def start(self, *args: Any) -> None:
        self._each("start", *args)

    def show(self, *args: Any) -> None:
        self._each("show", *args)

    def stop(self, *args: Any) -> None:
        self._each("stop", *args)

    def _each(self, verb: str, *args: Any) -> None:
        for recorder in self.recorders:
            try:
                getattr(recorder, verb)(*args)
            except Exception as error:
                logger.warning_once(f"Nothing was learnt from a request: {error!r}")
