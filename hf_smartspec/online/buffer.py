"""The replay buffer (Online Speculative Decoding, section 4.2.1)."""

from collections.abc import Sequence

import numpy as np

from .samples import Sample

EVICTIONS = ("release", "newest", "informative")


class ReplayBuffer:
    """
    Samples that wait to be learnt, such as are held out, and such as were learnt before and may come again, within a
    bound on memory.

    Args:
        max_bytes (`int`): Bound on what is kept. Where more comes than is learnt, the oldest go.
        eviction (`str`): What is kept of samples that have been learnt: "release" (nothing, as in the paper), "newest",
            or "informative" (those with the largest share of tokens that drafts got wrong).
    """

    def __init__(self, max_bytes: int, eviction: str = "newest"):
        self.max_bytes, self.eviction = max_bytes, eviction
        self.new: list[Sample] = []
        self.old: list[Sample] = []  # the best ones last
        self.fresh: list[Sample] = []  # held out: nothing is learnt from them yet

    @property
    def num_bytes(self) -> int:
        return sum(item.num_bytes for item in (*self.new, *self.old, *self.fresh))

    def __len__(self) -> int:
        return len(self.new) + len(self.old) + len(self.fresh)

    def add(self, sample: Sample) -> None:
        self.new.append(sample)
        self._evict()

    def hold_out(self, sample: Sample, most: int) -> None:
        """Like `add`, but it is learnt only when as many as `most` further ones have been held out."""
        self.fresh.append(sample)
        if len(self.fresh) > most:
            self.new.append(self.fresh.pop(0))
        self._evict()

    def clear(self) -> None:
        self.new, self.old, self.fresh = [], [], []

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
        """What was learnt goes first; held-out samples never take more room than those that are to be learnt."""
        total = self.num_bytes
        while total > self.max_bytes and len(self) > 1:
            samples = self.old or (self.fresh if len(self.fresh) > len(self.new) else self.new)
            total -= samples.pop(0).num_bytes
