"""What learns from requests while they are served, as the decoding loop sees it."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from ..candidates.base import TreeCandidateGenerator
from ..candidates.committed import Committed
from ..log import get_logger

logger = get_logger(__name__)


class Shown(NamedTuple):
    """
    A step of one request.

    Args:
        step (`Committed`): Without scores, unless a source needs them.
        first (`int`): The line of the forward's logits behind the last token that was committed before; that behind
            node n of `step.tree` is n + 1 further.
    """

    step: Committed
    first: int


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
    def show(self, steps: Mapping[Hashable, Shown], logits: torch.Tensor | None) -> None:
        """
        One step of requests that were in one forward, whose `logits` (`[lines, vocab_size]`) are of no concern to
        anybody afterwards; None while only prompts are run. Where a prefix was reused, hidden states begin behind it.
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
        for recorder in self.recorders:
            guarded(recorder.start, *args)

    def stop(self, *args: Any) -> None:
        for recorder in self.recorders:
            guarded(recorder.stop, *args)


def guarded(call: Callable[..., None], *args: Any) -> None:
    """What a recorder does wrong is reported, and passed over."""
    try:
        call(*args)
    except Exception as error:
        logger.warning_once(f"Nothing was learnt from a request: {error!r}")
