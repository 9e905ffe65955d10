"""Means and rates in which old observations count less than new ones."""

from typing import Any


class DecayedMean:
    """
    Running mean: the plain mean of the first 1 / `weight` values; later, the newest value has this weight.

    Args:
        weight (`float`): Least weight of the newest value, in (0, 1].
        mean, num (`float`): Initial mean, and the number of values that it stands for, 0 by default. With `math.inf`,
            the newest value has `weight` from the first value on.
    """

    def __init__(self, weight: float, mean: float = 0.0, num: float = 0):
        self.weight, self.mean, self.num = weight, mean, num

    def add(self, value: float) -> None:
        self.num += 1
        self.mean += max(self.weight, 1 / self.num) * (value - self.mean)


class DecayedRate:
    """
    Ratio of hits to tries, shrunk towards a prior rate. Both counts decay whenever further ones are added. They are
    numbers, or arrays with one entry per cell.

    Args:
        prior (`float`): Rate before the first try.
        strength (`float`): Number of tries that the prior counts as; they do not decay.
        tries, hits (`float` or `np.ndarray`): Initial counts.
    """

    def __init__(self, prior: float = 1.0, strength: float = 0.0, tries: Any = 0.0, hits: Any = 0.0):
        self.prior, self.strength, self.tries, self.hits = prior, strength, tries, hits

    def add(self, tries: Any, hits: Any, decay: Any) -> None:
        """Multiply the earlier counts by `decay`, and add new ones."""
        self.tries = self.tries * decay + tries
        self.hits = self.hits * decay + hits

    @property
    def rate(self) -> Any:
        return shrunk(self.hits, self.tries, self.prior, self.strength)


def shrunk(hits: Any, tries: Any, prior: Any, strength: float) -> Any:
    """Return the ratio of hits to tries, shrunk towards `prior`, which counts as `strength` tries."""
    return (hits + strength * prior) / (tries + strength)
