"""Free tokens of forwards that wait for their weights (SSSD, section 3.2.1), to explain a profile."""

from typing import NamedTuple

import numpy as np

from ..cost import CostModel

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
    def of_profile(cls, cost: CostModel, num_parameters: int, bytes_per_parameter: float) -> "Roofline":
        """
        Return the speed that a model's forward reaches on its device: 2 operations per parameter in the time of a
        further token, and all parameters read in the time of a forward of one token. `flops` is infinite if further
        tokens cost nothing.
        """
        per_token = _slope(cost)
        flops = 2 * num_parameters / per_token if per_token > 0 else np.inf
        return cls(flops, num_parameters * bytes_per_parameter / float(cost.seconds(0, 1)))

    def free_tokens(self, hidden_size: int, bytes_per_parameter: float = 2.0) -> float:
        """
        Return the number of tokens in a forward (rows times tokens per row) up to which reading a square weight matrix
        takes longer than multiplying with it; infinite if reading activations always takes longer.

        Example:
            >>> round(Roofline(flops=280e12, bandwidth=0.8e12).free_tokens(hidden_size=4096))  # SSSD: about 435
            422
        """
        ratio = self.flops / self.bandwidth * bytes_per_parameter / 2
        return ratio / (1 - 2 * ratio / hidden_size) if 2 * ratio < hidden_size else float("inf")


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
