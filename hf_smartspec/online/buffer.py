"""The replay buffer (Online Speculative Decoding, section 4.2.1)."""

from collections.abc import Sequence

import numpy as np

from .samples import Sample

EVICTIONS = ("release", "newest", "informative")


class ReplayBuffer:
    """
    Samples that wait to be learnt, and such as were learnt before and may come again, within a bound on memory.

    Args:
        max_bytes (`int`): Bound on what is kept. Where more comes than is learnt, the oldest go.
        eviction (`str`): What is kept of samples that have been learnt: "release" (nothing, as in the paper), "newest",
            or "informative" (those with the largest share of tokens that drafts got wrong).
    """

    def __init__(self, max_bytes: int, eviction: str = "newest"):
        self.max_bytes, self.eviction = max_bytes, eviction
        self.new: list[Sample] = []
        self.old: list[Sample] = []  # the best ones last

    @property
    def num_bytes(self) -> int:
        return sum(item.num_bytes for item in (*self.new, *self.old))

    def __len__(self) -> int:
        return len(self.new) + len(self.old)

    def add(self, sample: Sample) -> None:
        self.new.append(sample)
        self._evict()

    def take(self, num_replayed: int, generator: np.random.Generator) -> tuple[list[Sample], list[Sample]]:
        """All new samples, and some that were learnt before, at random."""
        num = min(num_replayed, len(self.old))
        chosen = generator.choice(len(self.old), num, replace=False) if num else ()
        new, self.new = self.new, []
        return new, [self.old[index] for index in chosen]

    def put_back(self, learnt: Sequence[Sample]) -> None:
        """They have been learnt once."""
        if self.eviction == "release":
            return
        self.old += learnt
        if self.eviction == "informative":
            self.old.sort(key=lambda item: float(item.errors.mean()) if len(item.errors) else 0.0)
        self._evict()

    def return_new(self, samples: Sequence[Sample]) -> None:
        """They were taken, and have not been learnt after all."""
        self.new = [*samples, *self.new]
        self._evict()

    def _evict(self) -> None:
        total = self.num_bytes
        for samples in (self.old, self.new):
            while total > self.max_bytes and samples and len(self) > 1:
                total -= samples.pop(0).num_bytes
