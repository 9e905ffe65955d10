"""Means and rates in which old observations count less than new ones."""

from typing import Any


class DecayedMean:
    """
    Running mean: plain over the first 1 / `weight` values, and later one in which the newest value has this weight.

    Args:
        weight (`float`): Least weight of the newest value, in (0, 1].
        mean, num (`float`): Mean to begin with, and the number of values that it stands for: none by default. With
            `math.inf`, the newest value has `weight` from the first one on.
    """

    def __init__(self, weight: float, mean: float = 0.0, num: float = 0):
        self.weight, self.mean, self.num = weight, mean, num

    def add(self, value: float) -> None:
        self.num += 1
        self.mean += max(self.weight, 1 / self.num) * (value - self.mean)


class DecayedRate:
    """
    Hits by tries, drawn to a prior rate by a number of tries that are added. Both counts decay when further ones come.
    Counts are numbers, or arrays with one entry per cell.

    Args:
        prior (`float`): Rate that is assumed before anything is known.
        strength (`float`): Tries that the prior stands for; they do not decay.
        tries, hits (`float` or `np.ndarray`): Counts to begin with.
    """

    def __init__(self, prior: float = 1.0, strength: float = 0.0, tries: Any = 0.0, hits: Any = 0.0):
        self.prior, self.strength, self.tries, self.hits = prior, strength, tries, hits

    def add(self, tries: Any, hits: Any, decay: Any) -> None:
        """Adds counts to earlier ones, which are multiplied with `decay` first."""
        self.tries = self.tries * decay + tries
        self.hits = self.hits * decay + hits

    @property
    def rate(self) -> Any:
        return drawn(self.hits, self.tries, self.prior, self.strength)


def drawn(hits: Any, tries: Any, prior: Any, strength: float) -> Any:
    """Rate that is drawn to a prior one, as by `strength` tries."""
    return (hits + strength * prior) / (tries + strength)
