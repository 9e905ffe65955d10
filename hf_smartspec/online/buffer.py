"""The replay buffer (Online Speculative Decoding, section 4.2.1)."""

from collections.abc import Sequence

import numpy as np

from .samples import Sample

EVICTIONS = ("release", "newest", "informative")


class ReplayBuffer:
    """
    Samples within a bound on memory: new ones to train on, held-out ones, and old ones that may be replayed.

    Args:
        max_bytes (`int`): Bound on the memory of samples. If more come than are trained on, the oldest are dropped.
        eviction (`str`): Samples that are kept after training: "release" (none, as in the paper), "newest", or
            "informative" (those with the largest share of tokens that drafts got wrong).
    """

    def __init__(self, max_bytes: int, eviction: str = "newest"):
        self.max_bytes, self.eviction = max_bytes, eviction
        self.new: list[Sample] = []
        self.old: list[Sample] = []  # the best ones last
        self.fresh: list[Sample] = []  # held out from training so far

    @property
    def num_bytes(self) -> int:
        return sum(item.num_bytes for item in (*self.new, *self.old, *self.fresh))

    def __len__(self) -> int:
        return len(self.new) + len(self.old) + len(self.fresh)

    def add(self, sample: Sample) -> None:
        self.new.append(sample)
        self._evict()

    def hold_out(self, sample: Sample, most: int) -> None:
        """Add a sample that is held out from training until `most` further ones have been held out."""
        self.fresh.append(sample)
        if len(self.fresh) > most:
            self.new.append(self.fresh.pop(0))
        self._evict()

    def clear(self) -> None:
        self.new, self.old, self.fresh = [], [], []

    def take(self, num_replayed: int, generator: np.random.Generator) -> tuple[list[Sample], list[Sample]]:
        """Remove and return all new samples, and return up to `num_replayed` old ones, chosen at random."""
        num = min(num_replayed, len(self.old))
        chosen = generator.choice(len(self.old), num, replace=False) if num else ()
        new, self.new = self.new, []
        return new, [self.old[index] for index in chosen]

    def put_back(self, learnt: Sequence[Sample]) -> None:
        """Keep samples that have been trained on for replay, as `eviction` has it."""
        if self.eviction == "release":
            return
        self.old += learnt
        if self.eviction == "informative":
            self.old.sort(key=lambda item: float(item.errors.mean()) if len(item.errors) else 0.0)
        self._evict()

    def return_new(self, samples: Sequence[Sample]) -> None:
        """Put samples back that were taken but not trained on."""
        self.new = [*samples, *self.new]
        self._evict()

    def _evict(self) -> None:
        """Drop samples beyond the bound: old ones first, then those of the larger group of held-out and new ones."""
        total = self.num_bytes
        while total > self.max_bytes and len(self) > 1:
            samples = self.old or (self.fresh if len(self.fresh) > len(self.new) else self.new)
            total -= samples.pop(0).num_bytes
