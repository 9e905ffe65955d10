"""Outcomes of drafters on texts that resemble another one."""

from collections.abc import Mapping

import numpy as np

from .features import Text, features_of

_NUM_FEATURES, _SIZE = 2**14, 1024  # of texts, and of their sketches
_MOST_TEXTS = 10_000  # over which it is counted how common a string is, before the earlier ones count half


class Neighbours:
    """
    The latest outcomes with sketches of their texts: random projections of the strings that occur in them, with more
    weight for rare ones. So unnamed kinds of text are told apart, too.

    Args:
        num_kept (`int`): Number of outcomes that are kept, of 4 kB each.
        num_nearest (`int`): Number of outcomes, on the most similar texts, that a text is judged by.
    """

    def __init__(self, num_kept: int = 1024, num_nearest: int = 48):
        self.num_kept, self.num_nearest = num_kept, num_nearest
        rng = np.random.default_rng(0)  # the same in all processes
        self._places, self._signs = rng.integers(0, _SIZE, _NUM_FEATURES), rng.choice([-1.0, 1.0], _NUM_FEATURES)
        self._num_texts, self._num_with = 0.0, np.zeros(_NUM_FEATURES)
        self._sketches = np.zeros((0, _SIZE), np.float32)
        self._arms, self._values, self._weights = np.zeros(0, np.int64), np.zeros(0), np.zeros(0)
        self._next = 0  # the line that is written next: the oldest, once all are full

    def sketch(self, text: Text) -> np.ndarray:
        """
        Return the sketch of a text, float32 `[1024]`, of length 1 or 0, and count the text: how rare strings are is
        learnt.
        """
        features = features_of(text, _NUM_FEATURES)
        if self._num_texts >= _MOST_TEXTS:
            self._num_texts, self._num_with = self._num_texts / 2, self._num_with / 2
        self._num_texts += 1
        self._num_with[features] += 1
        rarity = np.log((self._num_texts + 1) / (self._num_with[features] + 0.5))
        sketch = np.bincount(self._places[features], rarity * self._signs[features], _SIZE)
        return (sketch / max(float(np.linalg.norm(sketch)), 1e-9)).astype(np.float32)

    def add(self, sketch: np.ndarray, arm: int, value: float, weight: float) -> None:
        """Add an outcome: the drafter that served, and its value."""
        if self._next == len(self._sketches) < self.num_kept:
            more = min(max(self._next, 32), self.num_kept - self._next)
            self._sketches = np.concatenate([self._sketches, np.zeros((more, _SIZE), np.float32)])
            self._arms = np.append(self._arms, np.zeros(more, np.int64))
            self._values, self._weights = (np.append(old, np.zeros(more)) for old in (self._values, self._weights))
        line = self._next
        self._sketches[line], self._arms[line], self._values[line], self._weights[line] = sketch, arm, value, weight
        self._next = (line + 1) % self.num_kept

    def state(self) -> dict[str, np.ndarray]:
        """Return its whole state, as copied arrays."""
        num = int((self._weights > 0).sum())  # lines are written one after the other
        return {
            "num_texts": np.array(self._num_texts),
            "num_with": self._num_with.copy(),
            "next": np.array(self._next),
            "sketches": self._sketches[:num].copy(),
            "arms": self._arms[:num].copy(),
            "values": self._values[:num].copy(),
            "weights": self._weights[:num].copy(),
        }

    def restore(self, state: Mapping[str, np.ndarray], arms: np.ndarray) -> None:
        """
        Args:
            state: Result of `state` of another one.
            arms (`np.ndarray` of shape `[arms]`, int64): Own numbers of its arms; -1 for arms that are not known here.

        Raises:
            ValueError: if sizes differ.
        """
        sketches, old, values, weights = (state[name] for name in ("sketches", "arms", "values", "weights"))
        num = len(sketches)
        if sketches.shape != (num, _SIZE) or not all(item.shape == (num,) for item in (old, values, weights)):
            raise ValueError("sizes differ")
        if state["num_with"].shape != self._num_with.shape or num > self.num_kept:
            raise ValueError("sizes differ")
        order = np.roll(np.arange(num), -int(state["next"])) if num == self.num_kept else np.arange(num)
        kept = order[arms[old[order]] >= 0]
        self._num_texts, self._num_with = float(state["num_texts"]), state["num_with"].astype(np.float64)
        self._sketches, self._arms = sketches[kept].astype(np.float32), arms[old[kept]]
        self._values, self._weights = values[kept].astype(np.float64), weights[kept].astype(np.float64)
        self._next = len(kept) % self.num_kept

    def nearest(self, sketch: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """
        Return arms, values and weights `[n]` of the outcomes on the most similar texts; the less similar, the lower the
        weight.
        """
        likeness = np.maximum(self._sketches @ sketch, 0.0) * (self._weights > 0)
        best = np.argsort(-likeness, kind="stable")[: self.num_nearest]
        weights = self._weights[best] * likeness[best] / max(float(likeness.max(initial=0.0)), 1e-9)
        return self._arms[best], self._values[best], weights
