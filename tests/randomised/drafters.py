"""The drafters of a round, whose weights change while they draft."""

import random
from collections.abc import Sequence
from typing import Any

from hf_smartspec import RoutedCandidates, TreeCandidateGenerator

from .kinds import KINDS
from .outcome import Outcome
from .requests import Way

_SWAP = 0.15  # chance before a draft


class Drafters:
    """
    One of each kind that is asked for, which all requests of a round share; weights that can be swapped are, now and
    then.
    """

    def __init__(self, kinds: Sequence[str], architecture: str, rng: random.Random, outcome: Outcome):
        self.kinds, self._outcome = list(kinds), outcome
        self._architecture, self._rngs = architecture, {name: random.Random(rng.random()) for name in kinds}
        self._sources: dict[str, TreeCandidateGenerator] = {}

    def random_way(self, rng: random.Random) -> Way:
        """
        Draw one of the kinds, most often the first, or a list of several, and make those that are not there yet: not
        in an engine's thread, where none could be trained.
        """
        if len(self.kinds) > 1 and rng.random() < 0.3:
            way = Way(tuple(rng.sample(self.kinds, rng.randint(2, min(3, len(self.kinds))))))
        else:
            way = Way((self.kinds[0] if rng.random() < 0.5 else rng.choice(self.kinds),))
        for name in way.kinds:
            if name not in self._sources:
                self._sources[name] = self._made(name, self._architecture, self._rngs[name])
        return way

    def assistant(self, way: Way) -> Any:
        sources = [self._sources[name] for name in way.kinds]
        return sources[0] if len(sources) == 1 else sources

    def _made(self, name: str, architecture: str, rng: random.Random) -> TreeCandidateGenerator:
        kind = KINDS[name]
        source = kind.make(architecture, rng)
        if (swap := kind.swap) is None:
            return source
        # Routed drafters are asked by themselves: theirs change when requests begin.
        verb = "choose" if isinstance(source, RoutedCandidates) else "propose"
        call = getattr(source, verb)

        def swapping(*args: Any, **kwargs: Any) -> Any:
            if rng.random() < _SWAP:
                swap(source, rng)
                self._outcome.counts["swaps"] += 1
            return call(*args, **kwargs)

        setattr(source, verb, swapping)
        return source
