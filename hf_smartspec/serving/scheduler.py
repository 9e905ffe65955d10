"""Who runs when: namespaces take turns, within a number of rows and a budget of key/value memory."""

import math
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain
from types import MappingProxyType
from typing import Generic, TypeVar

from ..target_model.cache.slabs import slot_size

Item = TypeVar("Item")

TURN = 32  # tokens by which one namespace may be served more than another that holds nothing and waits
LINGER = 512  # tokens of others, in which a namespace that has just had a request is expected to have another one


@dataclass(eq=False)
class _Entry(Generic[Item]):
    """A request that waits or runs: what it may reach, in tokens, and its number in the order of arrival."""

    item: Item
    num_tokens: int
    number: int
    namespace: "_Namespace[Item]"
    size: int = 0  # of its slot, while it runs


@dataclass(eq=False)
class _Namespace(Generic[Item]):
    """
    The requests of one namespace, in the order in which they came.

    Args:
        weight (`float`): Its part, relative to others'.
        served (`float`): Tokens that were computed for it, by its weight. Counts only in comparison with others.
        last (`float`): When its last request ended, in tokens that were computed for all.
    """

    weight: float
    served: float = 0.0
    last: float = -math.inf
    waiting: deque[_Entry[Item]] = field(default_factory=deque)
    running: list[_Entry[Item]] = field(default_factory=list)

    @property
    def is_active(self) -> bool:
        return bool(self.waiting or self.running)


@dataclass
class _Offers(Generic[Item]):
    """
    Namespaces whose requests could give way first, so that it is known at once for whom none would.

    Args:
        richest (list): The two that have most, were one of their requests gone; `shares` are what they then have.
        best_served (list): The two that were served most.
    """

    richest: list[_Namespace[Item]]
    shares: dict[_Namespace[Item], float]
    best_served: list[_Namespace[Item]]

    def may_suffice(self, group: _Namespace[Item], share: float) -> bool:
        """Return whether another namespace may give way to one that would come to have this share, or more."""
        if any(self.shares[other] >= share for other in self.richest if other is not group):
            return True
        served = group.served + TURN
        return not group.running and any(other.served >= served for other in self.best_served if other is not group)


class Scheduler(Generic[Item]):
    """
    Admits requests as soon as their keys and values fit beside those of the running ones, up to the last token that
    they may generate and the draft after it. Each has a slot of its own, of a size that a few lengths share
    (`slot_size`): what counts is the sum of these sizes.

    Within a namespace, requests are served in the order in which they came. Between namespaces:

    1. The next place goes to the namespace with the smallest share: of rows or of memory, whichever is larger, by its
       weight (dominant resource fairness: Ghodsi et al., 2011). Of equal shares, the one that was served less goes
       first (virtual token counters: Sheng et al., 2024).
    2. Where there is no room for it, the newest request of a namespace with a larger share gives way, if its namespace
       then still has no less than the other one will have.
    3. Where that makes no room either, a namespace that holds nothing gets it from those that were served a `TURN`
       more: more namespaces than places take turns. Until then, these get no new place.

    4. Where every row makes steps longer (`lends=False`), a namespace has no more than its part of the rows as long as
       there are others, also of those that wait for nothing: their requests would take longer for it.

    A request that gives way waits as the first of its namespace. With a single namespace none ever has to.

    Args:
        max_batch_size (`int`): Rows that may run at once.
        max_tokens (`int`): Tokens of all slots together.

    Attributes:
        weights (mapping of namespaces to `float`): Parts of some, relative to those of others, which have 1.
        lends (`bool`): Whether rows that some namespaces leave go to others.
    """

    weights: Mapping[Hashable, float] = MappingProxyType({})
    lends = True

    def __init__(self, max_batch_size: int, max_tokens: int):
        self.max_batch_size, self.max_tokens = max_batch_size, max_tokens
        self.running: dict[Item, int] = {}  # and the tokens that the slot of each has room for
        self._entries: dict[Item, _Entry[Item]] = {}
        self._namespaces: dict[Hashable, _Namespace[Item]] = {}
        self._num_added = self._num_computed = 0

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def num_waiting(self) -> int:
        return len(self._entries) - len(self.running)

    @property
    def waiting(self) -> list[Item]:
        """Requests that wait, by namespace; a copy, which other threads may ask for."""
        return [entry.item for group in list(self._namespaces.values()) for entry in list(group.waiting)]

    @property
    def num_taken(self) -> int:
        """Tokens of the running requests' slots."""
        return sum(self.running.values())

    def size(self, num_tokens: int) -> int:
        """What a request of so many tokens takes of the budget."""
        return slot_size(num_tokens, self.max_tokens)

    def check(self, num_tokens: int) -> None:
        """Raises `ValueError` if a request of so many tokens can never run."""
        if num_tokens > self.max_tokens:
            raise ValueError(
                f"The request may reach {num_tokens} tokens (prompt, `max_new_tokens` and draft), and the key/value "
                f"memory holds {self.max_tokens}: shorten it, or raise the engine's `max_kv_bytes`."
            )

    def add(self, item: Item, num_tokens: int, namespace: Hashable = "") -> None:
        """Queues a request that may come to take so many tokens."""
        self._num_added += 1
        group = self._joined(namespace)
        self._entries[item] = entry = _Entry(item, num_tokens, self._num_added, group)
        group.waiting.append(entry)

    def _joined(self, namespace: Hashable) -> _Namespace[Item]:
        """The namespace, which has a request now: time without any is not made up for."""
        group = self._namespaces.get(namespace)
        if group is not None and group.is_active:
            return group
        active = [other.served for other in self._namespaces.values() if other.is_active]
        least = min(active, default=math.inf)
        # Of those without requests, what they were served more than others still counts, and that they were there.
        self._namespaces = {
            name: other
            for name, other in self._namespaces.items()
            if other.is_active or other.served > least or self._lingers(other)
        }
        group = self._namespaces.setdefault(namespace, _Namespace(self.weights.get(namespace, 1.0)))
        for other in self._namespaces.values() if not active else [group]:
            other.served = max(other.served, least) if active else 0.0
        return group

    def _lingers(self, group: _Namespace[Item]) -> bool:
        """Whether a namespace without requests had one a short while ago."""
        return self._num_computed < group.last + LINGER

    def remove(self, item: Item) -> None:
        """Forgets a request, waiting or running."""
        entry = self._entries[item]
        if self.running.pop(item, None) is None:
            entry.namespace.waiting.remove(entry)
        else:
            entry.namespace.running.remove(entry)
        del self._entries[item]  # last: `num_waiting`, which other threads read, never falls below zero
        entry.namespace.last = self._num_computed

    def charge(self, item: Item, num_tokens: int) -> None:
        """So many tokens were computed for a request."""
        self._num_computed += num_tokens
        group = self._entries[item].namespace
        group.served += num_tokens / group.weight

    def next(
        self,
        num_shared: Callable[[Item], int | None] | None = None,
        num_held: int = 0,
        suspend: Callable[[Item], None] | None = None,
        may_yield: Callable[[Item], bool] | None = None,
        has_had_turn: Callable[[Item], bool] | None = None,
    ) -> Item | None:
        """
        The next request if one can begin now; it then counts as running.

        Args:
            num_shared (`Callable`, *optional*): How many of a request's first tokens lie in the slot of another; None
                if it has to wait for that.
            num_held (`int`): Tokens of slots of requests that run no more, in which running ones begin.
            suspend (`Callable`, *optional*): Gets each request that gives way, which then counts as waiting. Without
                it, none does.
            may_yield (`Callable`, *optional*): Whether a request can give way, and its slot with it.
            has_had_turn (`Callable`, *optional*): Whether a request has read its text and gone on since it runs; those
                that have not are spared by the third rule, so that every turn brings some of them forward.
        """
        is_full = len(self.running) >= self.max_batch_size
        if is_full and (suspend is None or len(self._namespaces) == 1):
            return None
        parts, bound = self._parts(), math.inf
        if suspend is not None:
            for entry in self._beyond(parts, may_yield):
                self._suspend(entry)
                suspend(entry.item)
        order = self._in_order()
        if not order:
            return None
        holders = {
            group: [entry for entry in group.running if may_yield is None or may_yield(entry.item)]
            for group in self._namespaces.values()
            if group.running and suspend is not None
        }
        offers, least = self._offers(holders), self.size(1)
        has_room = len(self.running) < self.max_batch_size and self.max_tokens - self.num_taken - num_held >= least
        for group in order:
            entry = group.waiting[0]
            if group.served >= bound or len(group.running) >= parts.get(group, self.max_batch_size):
                continue
            leaving = None
            if has_room or offers.may_suffice(group, self._share(group, 1, least)):
                shared = 0 if num_shared is None else num_shared(entry.item)
                if shared is None:
                    continue
                size = self.size(entry.num_tokens - shared)
                leaving = self._room_for(group, size, num_held, holders, has_had_turn)
            if leaving is not None:
                for other in leaving:
                    self._suspend(other)
                    assert suspend is not None
                    suspend(other.item)
                group.waiting.popleft()
                group.running.append(entry)
                self.running[entry.item] = entry.size = size
                return entry.item
            if not group.running:
                bound = min(bound, group.served + TURN)
        return None

    def _parts(self) -> dict[_Namespace[Item], int]:
        """Rows that namespaces may have, by the fourth rule; empty where there is one only."""
        if self.lends or len(self._namespaces) == 1:
            return {}
        there = [group for group in self._namespaces.values() if group.is_active or self._lingers(group)]
        total = sum(group.weight for group in there)
        return {group: math.ceil(self.max_batch_size * group.weight / total) for group in there}

    @staticmethod
    def _beyond(parts: Mapping[_Namespace[Item], int], may_yield: Callable[[Item], bool] | None) -> list[_Entry[Item]]:
        """The newest requests of namespaces that have more than their parts."""
        found = []
        for group, most in parts.items():
            newest = sorted(group.running, key=lambda entry: -entry.number)[: max(len(group.running) - most, 0)]
            found += [entry for entry in newest if may_yield is None or may_yield(entry.item)]
        return found

    def _offers(self, holders: Mapping[_Namespace[Item], list[_Entry[Item]]]) -> "_Offers[Item]":
        """The most that namespaces could do without, by the second and the third rule."""
        newest = {group: max(entries, key=lambda entry: entry.number) for group, entries in holders.items() if entries}
        shares = {group: self._share(group, -1, -entry.size) for group, entry in newest.items()}
        richest = sorted(newest, key=lambda group: -shares[group])
        best_served = sorted(newest, key=lambda group: -group.served)
        return _Offers(richest[:2], shares, best_served[:2])

    def _in_order(self) -> list[_Namespace[Item]]:
        """Namespaces that wait, in the order in which they are to be served."""
        waiting = [group for group in self._namespaces.values() if group.waiting] if self.num_waiting else []
        if len(waiting) > 1:
            waiting.sort(key=lambda group: (self._share(group), group.served, group.waiting[0].number))
        return waiting

    def _share(self, group: _Namespace[Item], num_rows: int = 0, num_tokens: int = 0) -> float:
        """Of rows or memory that a namespace has, with so many more, by its weight."""
        rows = (len(group.running) + num_rows) / self.max_batch_size
        tokens = (sum(entry.size for entry in group.running) + num_tokens) / self.max_tokens
        return max(rows, tokens) / group.weight

    def _suspend(self, entry: _Entry[Item]) -> None:
        group = entry.namespace
        del self.running[entry.item]
        group.running.remove(entry)
        earlier = [other for other in group.waiting if other.number < entry.number]
        group.waiting.insert(len(earlier), entry)

    def _room_for(
        self,
        group: _Namespace[Item],
        size: int,
        num_held: int,
        holders: Mapping[_Namespace[Item], list[_Entry[Item]]],
        has_had_turn: Callable[[Item], bool] | None,
    ) -> list[_Entry[Item]] | None:
        """Requests, of those of the holders, that have to give way to one of this size; None if it cannot begin now."""
        rows, tokens = self.max_batch_size - len(self.running), self.max_tokens - self.num_taken - num_held
        if rows > 0 and tokens >= size:
            return []
        others = {other: entries for other, entries in holders.items() if other is not group}
        for found in (self._of_larger_shares(group, size, others), self._of_better_served(group, others, has_had_turn)):
            leaving: list[_Entry[Item]] = []
            for entry in found:
                leaving.append(entry)
                if rows + len(leaving) > 0 and tokens + sum(item.size for item in leaving) >= size:
                    return leaving
        return None

    def _of_larger_shares(
        self, group: _Namespace[Item], size: int, others: Mapping[_Namespace[Item], list[_Entry[Item]]]
    ) -> Iterator[_Entry[Item]]:
        """By the second rule, one after the other: always of the namespace that then has most left."""
        own = self._share(group, 1, size)
        left = {other: sorted(entries, key=lambda entry: entry.number) for other, entries in others.items() if entries}
        given = {other: [0, 0] for other in left}

        def after(other: _Namespace[Item]) -> float:
            rows, tokens = given[other]
            return self._share(other, -rows - 1, -tokens - left[other][-1].size)

        while left:
            richest = max(left, key=after)
            if after(richest) < own:
                return
            entry = left[richest].pop()
            given[richest] = [given[richest][0] + 1, given[richest][1] + entry.size]
            if not left[richest]:
                del left[richest]
            yield entry

    @staticmethod
    def _of_better_served(
        group: _Namespace[Item],
        others: Mapping[_Namespace[Item], list[_Entry[Item]]],
        has_had_turn: Callable[[Item], bool] | None,
    ) -> Iterator[_Entry[Item]]:
        """By the third rule, one after the other: of those that were served most first, and of them the newest."""
        if group.running:
            return
        better = [other for other in others if other.served >= group.served + TURN]
        better.sort(key=lambda other: -other.served)
        for entry in chain(*(sorted(others[other], key=lambda entry: -entry.number) for other in better)):
            if has_had_turn is None or has_had_turn(entry.item):
                yield entry


class ByteScheduler(Scheduler[Item]):
    """The same for requests of so many bytes each, with nothing between them: what it calls tokens are bytes."""

    def size(self, num_tokens: int) -> int:
        return num_tokens

    def check(self, num_tokens: int) -> None:
        if num_tokens > self.max_tokens:
            raise ValueError(
                f"The request may need {num_tokens} bytes of keys, values and states, and the engine's `max_kv_bytes` "
                f"allows {self.max_tokens}: shorten it, or raise that."
            )
