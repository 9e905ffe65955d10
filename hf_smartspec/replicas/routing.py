"""Which of several replicas serves a request."""

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from itertools import count
from threading import Lock
from typing import NamedTuple, Protocol

import numpy as np

from ..validate import check_positive

_BLOCK = 16  # tokens that are recognised together


class ReplicaLoad(NamedTuple):
    """
    Args:
        name (hashable): Stays a replica's own for as long as it lives.
        running, waiting (`int`): Its requests that run, and that wait for a place.
    """

    name: Hashable
    running: int = 0
    waiting: int = 0

    @property
    def requests(self) -> int:
        return self.running + self.waiting


class Router(Protocol):
    """
    Chooses among replicas, as they are at the moment; none may be missing a second time unless it is gone. Several
    threads may ask at once.
    """

    def choose(self, loads: Sequence[ReplicaLoad], prompt: np.ndarray, namespace: str = "") -> int:
        """
        The place in `loads` of the replica that is to serve a request.

        Args:
            loads (sequence of `ReplicaLoad`): All replicas; at least one.
            prompt (`np.ndarray` of shape `[prompt_len]`): Token ids.
            namespace (`str`): Whose text the request's drafts come from.
        """
        ...


class RoundRobin:
    """One after the other."""

    def __init__(self) -> None:
        self._numbers = count()  # whose next one is one thread's alone

    def choose(self, loads: Sequence[ReplicaLoad], prompt: np.ndarray, namespace: str = "") -> int:
        return next(self._numbers) % len(loads)


class LeastLoaded:
    """The replica with the fewest requests; of several, the first."""

    def choose(self, loads: Sequence[ReplicaLoad], prompt: np.ndarray, namespace: str = "") -> int:
        return min(range(len(loads)), key=lambda place: loads[place].requests)


class PowerOfTwo:
    """The less loaded of two that are drawn at random (Mitzenmacher, 2001)."""

    def __init__(self, seed: int = 0):
        self._rng = np.random.default_rng(seed)

    def choose(self, loads: Sequence[ReplicaLoad], prompt: np.ndarray, namespace: str = "") -> int:
        drawn = self._rng.choice(len(loads), min(2, len(loads)), replace=False).tolist()
        return min(drawn, key=lambda place: loads[place].requests)


class Affinity:
    """
    Where the longest beginning of the prompt has been served before: its keys and values are there. Else where the
    namespace is at home: its suffix trees are there. Replicas that have too much to do are left out of both, so that a
    beginning or a namespace in demand spreads; without either, the least loaded serves.

    Args:
        min_share (`float`): Of the prompt, that must be known for it to count.
        max_imbalance (`float`): A replica has too much to do if it has more than so many times as many requests as the
            mean of all,
        max_extra (`int`): and more than so many more.
        max_blocks (`int`): Blocks of 16 tokens that are remembered of all replicas' prompts; those that were unused
            for longest are forgotten first.

    Raises:
        ValueError: for arguments that no replica could fulfil.
    """

    def __init__(
        self,
        min_share: float = 0.3,
        max_imbalance: float = 1.5,
        max_extra: int = 16,
        max_blocks: int = 1_000_000,
    ):
        if not 0 < min_share <= 1:
            raise ValueError(f"`min_share` must lie in (0, 1], got {min_share!r}.")
        if not max_imbalance >= 1:
            raise ValueError(f"`max_imbalance` must be at least 1, got {max_imbalance!r}.")
        check_positive("max_extra", max_extra)
        check_positive("max_blocks", max_blocks)
        self.min_share, self.max_imbalance, self.max_extra = min_share, max_imbalance, max_extra
        self.max_blocks = max_blocks
        self._served: OrderedDict[bytes, set[Hashable]] = OrderedDict()  # by block: the replicas that have served it
        self._lock = Lock()  # of these

    def choose(self, loads: Sequence[ReplicaLoad], prompt: np.ndarray, namespace: str = "") -> int:
        blocks = _blocks(prompt, namespace)
        free = self._free(loads)
        with self._lock:
            place = self._by_prompt(loads, blocks, free)
            if place is None and namespace:
                place = _at_home(loads, namespace, free)
            if place is None:
                place = min(free, key=lambda item: loads[item].requests)
            self._remember(blocks, loads[place].name)
        return place

    def _free(self, loads: Sequence[ReplicaLoad]) -> list[int]:
        """Replicas that may be given more."""
        mean = sum(item.requests for item in loads) / len(loads)
        most = max(self.max_imbalance * mean, mean + self.max_extra)
        return [place for place, item in enumerate(loads) if item.requests <= most]  # some are not above the mean

    def _by_prompt(self, loads: Sequence[ReplicaLoad], blocks: Sequence[bytes], free: Sequence[int]) -> int | None:
        known, knowing = dict.fromkeys(free, 0), list(free)
        for length, block in enumerate(blocks, 1):
            served = self._served.get(block, ())
            knowing = [place for place in knowing if loads[place].name in served]
            if not knowing:
                break
            known.update(dict.fromkeys(knowing, length))
        place = max(free, key=lambda item: (known[item], -loads[item].requests))
        return place if known[place] and known[place] >= self.min_share * len(blocks) else None

    def _remember(self, blocks: Sequence[bytes], name: Hashable) -> None:
        for block in blocks:
            self._served.setdefault(block, set()).add(name)
        for block in reversed(blocks):  # beginnings outlive what stands behind them
            self._served.move_to_end(block)
        while len(self._served) > self.max_blocks:
            self._served.popitem(last=False)

    def forget(self, name: Hashable) -> None:
        """A replica is gone."""
        with self._lock:
            for served in self._served.values():
                served.discard(name)


# By name, as options have them.
ROUTERS: dict[str, Callable[[], Router]] = {
    "affinity": Affinity,
    "least_loaded": LeastLoaded,
    "power_of_two": PowerOfTwo,
    "round_robin": RoundRobin,
}


def _at_home(loads: Sequence[ReplicaLoad], namespace: str, free: Sequence[int]) -> int:
    """
    The free replica that comes first in an order of the namespace's own (rendezvous hashing): it stays while others
    come and go.
    """
    return max(free, key=lambda place: hashlib.blake2b(_encoded(f"{namespace}\0{loads[place].name}")).digest())


def _encoded(name: str) -> bytes:
    """Of any string that JSON may hold."""
    return name.encode(errors="surrogatepass")


def _blocks(prompt: np.ndarray, namespace: str) -> list[bytes]:
    """Of each whole block, a hash of the namespace and of all tokens up to its end."""
    digest = hashlib.blake2b(_encoded(namespace), digest_size=12)
    tokens, found = np.ascontiguousarray(prompt, np.int64), []
    for start in range(0, len(tokens) - _BLOCK + 1, _BLOCK):
        digest.update(tokens[start : start + _BLOCK].tobytes())
        found.append(digest.copy().digest())
    return found
