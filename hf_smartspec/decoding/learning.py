"""Interface of learning from requests while they are served: hooks that the decoding loop calls."""

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
    A step of one request, for recorders.

    Args:
        step (`Committed`): The step; without scores, unless a source needs them.
        first (`int`): The line of the forward's logits after the last token committed before. The line after node n of
            `step.tree` is `first + n + 1`.
    """

    step: Committed
    first: int


class Recorder(ABC):
    """
    Gets the steps of requests, with and without drafts.

    Attributes:
        hidden_layers (sequence of `int`): Layers whose hidden states it gets; see `TreeCandidateGenerator`.
    """

    hidden_layers: Sequence[int] = ()

    @abstractmethod
    def start(
        self, request_id: Hashable, prompt: np.ndarray, is_greedy: bool, encoded: np.ndarray | None = None
    ) -> None:
        """
        Begin a request.

        Args:
            request_id (`Hashable`): Its name.
            prompt (`np.ndarray` of shape `[prompt_len]`, int64): Its prompt, an array that does not change.
            is_greedy (`bool`): Whether its tokens are picked without sampling.
            encoded (`np.ndarray`, *optional*): Tokens that the target's encoder has read; does not change either.
        """

    @abstractmethod
    def show(self, steps: Mapping[Hashable, Shown], logits: torch.Tensor | None) -> None:
        """
        Record one step of requests that shared a forward.

        Args:
            steps (mapping): The steps by request. Where a prefix was reused, hidden states begin after it.
            logits (`torch.Tensor` of shape `[lines, vocab_size]`, *optional*): Logits of the forward, which are
                not used afterwards; None if the forward ran parts of prompts only.
        """

    @abstractmethod
    def stop(self, request_id: Hashable) -> None:
        """End a request, finished or not; unknown ids are ignored."""


class Learning(ABC):
    """Drafters that learn from requests, with the hooks that loops call."""

    @abstractmethod
    def check(self, source: TreeCandidateGenerator, target: nn.Module) -> None:
        """Raise `ValueError` if no part of the source can learn for this target."""

    @abstractmethod
    def recorders(self, sources: Sequence[TreeCandidateGenerator]) -> tuple[Recorder, ...]:
        """Return the recorders of requests that these sources draft for."""

    @abstractmethod
    def between_steps(self, loop: Any, num_running: int, num_waiting: int) -> None:
        """
        Give drafters new weights, if there are any: called by a loop between two steps, with the numbers of its
        requests. None are running when the loop ends.
        """


def guarded(call: Callable[..., None], *args: Any) -> None:
    """Call a recorder's method; log an error, once per message, and go on."""
    try:
        call(*args)
    except Exception as error:
        logger.warning_once(f"Nothing was learnt from a request: {error!r}")
