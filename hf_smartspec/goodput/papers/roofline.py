"""Free tokens of forwards that wait for their weights (SSSD, section 3.2.1), and the policy that drafts as many."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ...drafts.price import FREE, LevelPrice
from ...drafts.tree import DraftTree
from ..cost import CostModel
from ..policy import LengthPolicy, StepRows
from ..stage import Stage

_MOST_TOKENS = 2**16  # tokens; the search for the end of the free budget stops here


class Roofline(NamedTuple):
    """
    Speed of a device.

    Args:
        flops (`float`): Floating-point operations per second.
        bandwidth (`float`): Bytes per second from memory.
    """

    flops: float
    bandwidth: float

    @classmethod
    def of_text(cls, text: str) -> "Roofline":
        """
        Return the speed of a data sheet, "FLOPS,BANDWIDTH", such as "280e12,0.8e12".

        Raises:
            ValueError: for a text that is not two positive numbers.
        """
        flops, bandwidth = map(float, text.split(","))
        if not (0 < flops < np.inf and 0 < bandwidth < np.inf):
            raise ValueError(f"Operations and bytes per second must be positive and finite, got {text!r}.")
        return cls(flops, bandwidth)

    @classmethod
    def of_profile(cls, cost: CostModel, num_parameters: int, bytes_per_parameter: float) -> "Roofline":
        """
        Return the speed that a model's forward reaches on its device: 2 operations per parameter in the time of a
        further token, and all parameters read in the time of a forward of one token. `flops` is infinite if further
        tokens cost nothing.
        """
        per_token = _slope(cost)
        flops = 2 * num_parameters / per_token if per_token > 0 else np.inf
        return cls(flops, num_parameters * bytes_per_parameter / float(cost.seconds(0, 1)))

    def free_tokens(self, hidden_size: float, bytes_per_parameter: float = 2.0) -> float:
        """
        Return the number of tokens in a forward (rows times tokens per row) up to which reading a square weight matrix
        takes longer than multiplying with it; infinite if reading activations always takes longer.

        Example:
            >>> round(Roofline(flops=280e12, bandwidth=0.8e12).free_tokens(hidden_size=4096))  # SSSD: about 435
            422
        """
        ratio = self.flops / self.bandwidth * bytes_per_parameter / 2
        return ratio / (1 - 2 * ratio / hidden_size) if 2 * ratio < hidden_size else float("inf")


class RooflineBudget(LengthPolicy):
    """
    Policy that fills the forward with as many tokens as take no time while it waits for its weights (SSSD, section
    3.2.1): rows times speculation length, b * s_q, is a constant of the hardware, whatever is accepted. All rows get
    the same length, and a row's last committed token is one of its s_q. Tokens of prompts that share the forward use up
    the budget, too (section 3.2.2).

    Args:
        num_tokens (`float`): The budget, such as `Roofline.free_tokens`; infinite if drafts never cost anything.

    Raises:
        ValueError: for a budget below 1.
    """

    def __init__(self, num_tokens: float):
        if not num_tokens >= 1:
            raise ValueError(f"`num_tokens` must be at least 1, got {num_tokens!r}.")
        self.num_tokens = float(num_tokens)

    @classmethod
    def of_profile(cls, cost: CostModel, hidden_size: float = np.inf) -> "RooflineBudget":
        """Return the budget of a machine as fast as the profile: `Roofline.of_profile`, in which the model cancels."""
        return cls(Roofline.of_profile(cost, 1, 1.0).free_tokens(hidden_size, 1.0))

    def length(self, rows: StepRows) -> int:
        """Return the draft nodes of each row: s_q - 1."""
        most = int(np.max(rows.caps, initial=0))
        free = (self.num_tokens - rows.num_prefill_tokens) / max(len(rows), 1)
        return max(int(min(free, most + 1)) - 1, 0)

    def max_nodes(self, rows: StepRows, stage: Stage, trees: Sequence[DraftTree]) -> np.ndarray:
        return stage.limits(self.length(rows), trees)

    def most_nodes(self, usual: int, most: int) -> int:
        return most

    def price(self, rows: StepRows, stage: Stage) -> LevelPrice | None:
        return FREE if stage.cost.heeds_prices and not stage.cost.is_autoregressive else None

    def select(self, rows: StepRows, trees: Sequence[DraftTree]) -> list[DraftTree]:
        length = self.length(rows)
        return [tree.most_likely(length) for tree in trees]


def free_tokens(cost: CostModel, slack: float = 0.1) -> int:
    """
    Return the largest number of tokens whose forward, without context, takes at most (1 + `slack`) times as long as
    that of one token.

    Raises:
        ValueError: for a negative slack.
    """
    if slack < 0:
        raise ValueError(f"`slack` must be at least 0, got {slack!r}.")
    sizes = np.arange(1, _MOST_TOKENS + 1)
    seconds = cost.seconds(np.zeros(len(sizes)), sizes)
    too_slow = seconds > (1 + slack) * seconds[0]
    return int(too_slow.argmax()) if too_slow.any() else _MOST_TOKENS


def _slope(cost: CostModel) -> float:
    """Return the seconds that a further token adds to a large forward."""
    if not cost.knots:
        return cost.gamma
    return (cost.curve[-1] - cost.curve[-2]) / (cost.knots[-1] - cost.knots[-2])
