"""Routing: the choice of the replica that serves a request."""

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from itertools import count
from threading import Lock
from typing import NamedTuple, Protocol

import numpy as np

_BLOCK = 16  # tokens that are recognised together


class ReplicaLoad(NamedTuple):
    """Load of one replica."""

    name: Hashable  # name of the replica, which does not change during its life
    running: int = 0  # its requests that run
    waiting: int = 0  # its requests that wait for a place

    @property
    def requests(self) -> int:
        return self.running + self.waiting


class Router(Protocol):
    """
    Interface of routers. Several threads may call one router at once.
    """

    def choose(self, loads: Sequence[ReplicaLoad], prompt: np.ndarray, namespace: str = "") -> int:
        """
        Return the place in `loads` of the replica that is to serve a request.

        Args:
            loads (sequence of `ReplicaLoad`): All replicas, at least one.
            prompt (`np.ndarray` of shape `[prompt_len]`): Token ids.
            namespace (`str`): Namespace of the texts that the request's drafts come from.
        """
        ...


class RoundRobin:
    """Router that chooses the replicas in turn."""

    def __init__(self) -> None:
        self._numbers = count()  # `next` on it is atomic

    def choose(self, loads: Sequence[ReplicaLoad], prompt: np.ndarray, namespace: str = "") -> int:
        return next(self._numbers) % len(loads)


class LeastLoaded:
    """Router that chooses the replica with the fewest requests; of several, the first."""

    def choose(self, loads: Sequence[ReplicaLoad], prompt: np.ndarray, namespace: str = "") -> int:
        return min(range(len(loads)), key=lambda place: loads[place].requests)


class PowerOfTwo:
    """Router that chooses the less loaded of two replicas drawn at random (Mitzenmacher, 2001)."""

    def __init__(self, seed: int = 0):
        self._rng = np.random.default_rng(seed)

    def choose(self, loads: Sequence[ReplicaLoad], prompt: np.ndarray, namespace: str = "") -> int:
        drawn = self._rng.choice(len(loads), min(2, len(loads)), replace=False).tolist()
        return min(drawn, key=lambda place: loads[place].requests)


class Affinity:
    """
    Router that chooses the replica that has served the longest prefix of the prompt, and so holds its keys and values;
    without such a replica, the home of the namespace, which holds its suffix trees; without a namespace, the replica
    with the fewest requests. Overloaded replicas are left out, so that a prefix or a namespace in demand spreads.

    Attributes:
        min_share (`float`): Share of the prompt that a replica must have served to be chosen for it.
        max_imbalance (`float`), max_extra (`int`): A replica is overloaded if it has more than `max_imbalance` times
            the mean number of requests of all replicas, and more than `max_extra` above it.
        max_blocks (`int`): Bound on the blocks of 16 tokens that are kept of all replicas' prompts; the least recently
            used are dropped first.
    """

    min_share = 0.3
    max_imbalance = 1.5
    max_extra = 16
    max_blocks = 1_000_000

    def __init__(self) -> None:
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
        """Return the replicas that are not overloaded."""
        mean = sum(item.requests for item in loads) / len(loads)
        most = max(self.max_imbalance * mean, mean + self.max_extra)
        return [place for place, item in enumerate(loads) if item.requests <= most]  # at least one is below the mean

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
        for block in reversed(blocks):  # a prefix is dropped after its continuations
            self._served.move_to_end(block)
        while len(self._served) > self.max_blocks:
            self._served.popitem(last=False)

    def forget(self, name: Hashable) -> None:
        """Drop a replica that has ended."""
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
    Return the first free replica in an order that depends on the namespace (rendezvous hashing): it does not change
    when other replicas come and go.
    """
    return max(free, key=lambda place: hashlib.blake2b(_encoded(f"{namespace}\0{loads[place].name}")).digest())


def _encoded(name: str) -> bytes:
    """Return the bytes of any string in JSON, lone surrogates included."""
    return name.encode(errors="surrogatepass")


def _blocks(prompt: np.ndarray, namespace: str) -> list[bytes]:
    """Return for each whole block a hash of the namespace and of all tokens up to its end."""
    digest = hashlib.blake2b(_encoded(namespace), digest_size=12)
    tokens, found = np.ascontiguousarray(prompt, np.int64), []
    for start in range(0, len(tokens) - _BLOCK + 1, _BLOCK):
        digest.update(tokens[start : start + _BLOCK].tobytes())
        found.append(digest.copy().digest())
    return found
