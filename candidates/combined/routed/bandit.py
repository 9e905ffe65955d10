"""
A bandit that finds out by serving which drafter is best for a kind of text: Thompson sampling by measured goodput.
"""

import json
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple

import numpy as np

from ....goodput.estimates.decayed import DecayedMean, shrunk
from .files import load_arrays, save_arrays
from .neighbours import Neighbours

_KIND_STRENGTH = 1.0  # of how a drafter does on all texts, in requests, where one kind of text is judged
_SPREAD = 0.3  # of requests' goodput before it is known, relative to it
_SPREAD_STRENGTH = 2.0  # of that, in requests
_TYPICAL_STEPS = 16.0  # of a request that counts half
_MOST_KINDS = 256  # of text with counts of their own; beyond that, those unused for longest are dropped
_FORMAT = 1
_UNIT_SHARE = 0.02  # of the newest request in the running mean of what a step takes


class Outcome(NamedTuple):
    """
    Result of a request.

    Args:
        drafter (`str`): The drafter that served it.
        kind (`str`): Kind of its text; "" if unknown.
        tokens, steps (`int`): Tokens committed after the step that ran the prompt, and the number of their steps.
        drafting, rest (`float`): Seconds of this drafter's calls for it, and of the rest of these steps, without other
            drafters.
        sketch (`np.ndarray` of shape `[1024]`, *optional*): Sketch of its prompt, see `Neighbours`.
    """

    drafter: str
    kind: str
    tokens: int
    steps: int
    drafting: float
    rest: float
    sketch: np.ndarray | None = None


class _Arms:
    """
    Decayed counts, means and spreads of the tokens that drafters' requests yielded in the time of an ordinary step.
    """

    def __init__(self, num: int):
        self.counts, self.sums, self.squares = np.zeros(num), np.zeros(num), np.zeros(num)

    def add(self, arm: int, value: float, weight: float, decay: float) -> None:
        for sums, one in ((self.counts, 1.0), (self.sums, value), (self.squares, value**2)):
            sums *= decay
            sums[arm] += weight * one

    def add_all(self, arms: np.ndarray, values: np.ndarray, weights: np.ndarray) -> None:
        """Add several outcomes at once, without decay."""
        self.counts += np.bincount(arms, weights, len(self.counts))
        self.sums += np.bincount(arms, weights * values, len(self.counts))
        self.squares += np.bincount(arms, weights * values**2, len(self.counts))

    def restore(self, counts: np.ndarray, arms: np.ndarray) -> None:
        """
        Take counts, sums and squares `[3, arms]` of other arms, each of which is one of these `arms`, or none (-1).
        """
        for own, other in zip((self.counts, self.sums, self.squares), counts):
            own[arms[arms >= 0]] = other[arms >= 0]

    def means(self, priors: np.ndarray, strength: float) -> np.ndarray:
        means: np.ndarray = shrunk(self.sums, self.counts, priors, strength)
        return means

    def spreads(self, means: np.ndarray, strength: float) -> np.ndarray:
        """Return standard deviations of the means, estimated from how requests differ."""
        own = np.maximum(self.squares - 2 * means * self.sums + means**2 * self.counts, 0.0)
        variance = (own + _SPREAD_STRENGTH * (_SPREAD * means) ** 2) / (self.counts + _SPREAD_STRENGTH)
        return np.sqrt(variance / (self.counts + strength))


class DrafterBandit:
    """
    Thompson sampling over drafters, apart for every kind of text. What counts is goodput as it would be if all requests
    had this drafter: tokens by the seconds of its own calls and of the rest of the step. Seconds are taken in units of
    an ordinary step's rest, so that load, which all drafters suffer from alike, does not speak for or against one. A
    kind of text of which little is known is drawn to what drafters yield on all texts. Where a text is of no known
    kind, those count that resemble it most (see `Neighbours`).

    Counts decay, those of drafters that are not chosen as well: they are tried again some time, and so drafters that
    learn, or texts that change, are noticed.

    Args:
        names (sequence of `str`): Names of the drafters.
        half_life (`float`): Requests of a kind after which one counts half.
        seed (`int`): Seed of the draws.
    """

    def __init__(self, names: Sequence[str], half_life: float = 200.0, seed: int = 0):
        if not half_life > 0:
            raise ValueError(f"`half_life` must be positive, got {half_life!r}.")
        self.names, self.half_life = list(names), half_life
        self._rng = np.random.default_rng(seed)
        self._general = _Arms(len(self.names))
        self._kinds: OrderedDict[str, _Arms] = OrderedDict()  # the latest used last
        self.neighbours = Neighbours()
        self._lock = Lock()  # of its state, which requests of several threads use and change
        self._unit = DecayedMean(_UNIT_SHARE)  # seconds of an ordinary step, drafting aside

    def choose(self, kind: str = "", sketch: np.ndarray | None = None) -> str:
        """Return the drafter for a request of this kind, or if that is unknown (""), with a prompt of this sketch."""
        with self._lock:
            means, spreads = self._judged(kind, sketch)
            return self.names[int(np.argmax(means + spreads * self._rng.standard_normal(len(means))))]

    def update(self, outcome: Outcome) -> None:
        """Learn from a request that has ended, unless it has no measured step."""
        seconds = outcome.drafting + outcome.rest
        if outcome.steps >= 1 and seconds > 0:
            with self._lock:
                self._add(outcome, seconds)

    def _add(self, outcome: Outcome, seconds: float) -> None:
        self._unit.add(outcome.rest / outcome.steps)
        value = outcome.tokens * self._unit.mean / seconds
        weight, decay = outcome.steps / (outcome.steps + _TYPICAL_STEPS), 0.5 ** (1 / self.half_life)
        arm = self.names.index(outcome.drafter)
        for arms in (self._general, self._of(outcome.kind)):
            arms.add(arm, value, weight, decay)
        if outcome.sketch is not None:
            self.neighbours.add(outcome.sketch, arm, value, weight)

    def goodput(self, kind: str = "") -> dict[str, float]:
        """
        Return estimated tokens per second of a row of this kind of text, by drafter; 0 before any request has ended.
        """
        with self._lock:
            means, unit = self._judged(kind)[0], self._unit.mean
        return {name: float(mean / unit) if unit else 0.0 for name, mean in zip(self.names, means)}

    @property
    def kinds(self) -> list[str]:
        """Kinds of text that requests had."""
        return list(self._kinds)

    # On disk

    def save(self, path: str | Path) -> None:
        """Write a file (`.npz`), whole or not at all."""
        with self._lock:
            arms = [self._general, *self._kinds.values()]
            arrays = {
                "options": np.array([_FORMAT, self._unit.num, self._unit.mean]),
                "names": np.array(self.names, np.str_),
                "kinds": np.array(list(self._kinds), np.str_),
                "counts": np.array([[item.counts, item.sums, item.squares] for item in arms]),
                "draws": np.array(json.dumps(self._rng.bit_generator.state)),
                **{f"near_{name}": item for name, item in self.neighbours.state().items()},
            }
        save_arrays(path, **arrays)

    def load(self, path: str | Path) -> None:
        """
        Continue from a file that `save` has written, by the names of drafters: those that the file does not have begin
        anew, and further ones in it are ignored.

        Raises:
            ValueError: if it is no such file, or has none of the drafters.
        """
        load_arrays(path, "outcomes of these drafters", self._restore)

    def _restore(self, file: Mapping[str, Any]) -> None:
        version, num, unit = file["options"].tolist()
        names, kinds, counts = file["names"].tolist(), file["kinds"].tolist(), file["counts"]
        arms = np.array([self.names.index(name) if name in self.names else -1 for name in names], np.int64)
        if version != _FORMAT or counts.shape != (1 + len(kinds), 3, len(names)):
            raise ValueError("sizes or version differ")
        if not (arms >= 0).any():
            raise ValueError(f"it knows {names}, and not {self.names}")
        neighbours, rng = Neighbours(), np.random.default_rng()
        neighbours.restore({name: file[f"near_{name}"] for name in neighbours.state()}, arms)
        rng.bit_generator.state = json.loads(str(file["draws"]))
        found = [_Arms(len(self.names)) for _ in counts]
        for item, own in zip(found, counts):
            item.restore(own, arms)
        with self._lock:
            self._general, self._kinds = found[0], OrderedDict(zip(kinds, found[1:]))
            self._unit, self._rng, self.neighbours = DecayedMean(_UNIT_SHARE, unit, int(num)), rng, neighbours

    def _judged(self, kind: str, sketch: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
        """Return the mean of each drafter, and its standard deviation."""
        known, total = self._general.sums.sum(), self._general.counts.sum()
        average = np.full(len(self.names), known / total if total > 0 else 1.0)
        general = self._general.means(average, _KIND_STRENGTH)
        arms = self._kinds.get(kind)
        if arms is None or (not kind and sketch is not None):
            arms = _Arms(len(self.names))
        if not kind and sketch is not None:
            arms.add_all(*self.neighbours.nearest(sketch))
        means = arms.means(general, _KIND_STRENGTH)
        return means, arms.spreads(means, _KIND_STRENGTH)

    def _of(self, kind: str) -> _Arms:
        if kind not in self._kinds:
            while len(self._kinds) >= _MOST_KINDS:
                self._kinds.popitem(last=False)
            self._kinds[kind] = _Arms(len(self.names))
        self._kinds.move_to_end(kind)
        return self._kinds[kind]
