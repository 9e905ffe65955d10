"""Scheduler: admit requests within a number of rows and a budget of memory, while namespaces take turns."""

import math
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import nsmallest
from itertools import accumulate, chain
from types import MappingProxyType
from typing import Generic, TypeVar

from ..target_model.cache.slabs import slot_size

Item = TypeVar("Item")

TURN = 32  # tokens by which a namespace may be served more than another one that waits and has nothing running
LINGER = 512  # tokens computed for others during which a namespace without requests is expected to send another


@dataclass(eq=False)
class _Entry(Generic[Item]):
    """A request that waits or runs, with the tokens that it may reach, and its number in the order of arrival."""

    item: Item
    num_tokens: int
    number: int
    namespace: "_Namespace[Item]"
    size: int = 0  # tokens of its slot, while it runs


@dataclass(eq=False)
class _Namespace(Generic[Item]):
    """
    The requests of one namespace, in the order of arrival.

    Args:
        weight (`float`): Weight of its share, relative to other namespaces'.
        served (`float`): Tokens that were computed for it, divided by its weight; meaningful in comparisons only.
        last (`float`): When its last request ended, in tokens that were computed for all namespaces.
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
    The namespaces whose requests would give way first. They show at once for which namespaces no request would.

    Args:
        richest (list): The two with the largest shares after one of their requests has gone.
        shares (dict): Share of each namespace after one of its requests has gone.
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


@dataclass(frozen=True)
class Admission(Generic[Item]):
    """
    The caller's part in an admission.

    Args:
        suspend (`Callable`, *optional*): Called for each request that gives way, which then counts as waiting. Without
            it, no request gives way.
        may_yield (`Callable`): Returns whether a running request, and its slot with it, can give way.
        has_had_turn (`Callable`): Returns whether a running request has made progress since it began or resumed. Others
            are spared by the third rule of `Scheduler`, so that every turn brings some requests forward.
        num_shared (`Callable`): Returns the number of a request's first tokens that lie in the slot of another one;
            None if the request has to wait for them.
        num_held (`int`): Tokens of slots of ended requests, whose beginnings running requests share.
    """

    suspend: Callable[[Item], None] | None = None
    may_yield: Callable[[Item], bool] = lambda item: True
    has_had_turn: Callable[[Item], bool] = lambda item: True
    num_shared: Callable[[Item], int | None] = lambda item: 0
    num_held: int = 0


class Scheduler(Generic[Item]):
    """
    Scheduler that admits a request as soon as its keys and values, up to the last token that it may generate and the
    draft after it, fit beside those of the running requests. Each request has a slot, of one of a few sizes
    (`slot_size`); the sum of these sizes is bounded.

    Within a namespace, requests are served in the order of arrival. Between namespaces:

    1. The next row goes to the namespace with the smallest share of rows or of memory, whichever is larger, divided by
       its weight (dominant resource fairness: Ghodsi et al., 2011). Among equal shares, the namespace that was served
       less goes first (virtual token counters: Sheng et al., 2024).
    2. If there is no room, the newest request of a namespace with a larger share gives way, provided that its namespace
       then still has at least the share that the other one will have.
    3. If that makes no room either, a namespace with nothing running gets it from namespaces that were served more by a
       `TURN`, so that more namespaces than rows take turns. Until then, these get no new row.
    4. If every row makes steps longer (`lends_rows=False`), a namespace has no more than its part of the rows as long
       as there are other namespaces, even if these wait for nothing: more rows would slow their requests down.

    A request that gives way waits as the first of its namespace. With a single namespace, no request gives way.

    Args:
        max_batch_size (`int`): Rows that may run at once.
        max_tokens (`int`): Tokens of all slots together.

    Attributes:
        weights (mapping of namespaces to `float`): Weights of namespaces; 1 for those that are not in it.
        lends_rows (`bool`): Whether rows that a namespace leaves unused go to others.
    """

    weights: Mapping[Hashable, float] = MappingProxyType({})
    lends_rows = True

    def __init__(self, max_batch_size: int, max_tokens: int):
        self.max_batch_size, self.max_tokens = max_batch_size, max_tokens
        self.running: dict[Item, int] = {}  # with the tokens of the slot of each
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
        """Return a copy of the waiting requests, ordered by namespace. Other threads may call it."""
        return [entry.item for group in list(self._namespaces.values()) for entry in list(group.waiting)]

    def queue(self) -> tuple[list[Item], int]:
        """
        Return the waiting requests in the order of arrival, as many as there are rows left, and how many of these have
        room beside the running ones (SmartSpec's HasSlot).
        """
        waiting = [entry for group in self._namespaces.values() for entry in group.waiting]
        first = nsmallest(self.max_batch_size - len(self.running), waiting, key=lambda entry: entry.number)
        taken = accumulate((self.size(entry.num_tokens) for entry in first), initial=self.num_taken)
        num_fitting = sum(total <= self.max_tokens for total in taken) - 1
        return [entry.item for entry in first], max(num_fitting, 0)

    @property
    def num_without_rows(self) -> int:
        """Return the number of namespaces whose requests wait while none of them runs."""
        return sum(bool(group.waiting) and not group.running for group in self._namespaces.values())

    @property
    def num_taken(self) -> int:
        """Return the tokens of the running requests' slots."""
        return sum(self.running.values())

    def size(self, num_tokens: int) -> int:
        """Return the part of the budget that a request of `num_tokens` takes."""
        return slot_size(num_tokens, self.max_tokens)

    def check(self, num_tokens: int) -> None:
        """Raise `ValueError` if a request of `num_tokens` can never run."""
        if num_tokens > self.max_tokens:
            raise ValueError(
                f"The request may reach {num_tokens} tokens (prompt, `max_new_tokens` and draft), but the key/value "
                f"memory holds {self.max_tokens}: shorten the request, or raise the engine's `max_kv_bytes`."
            )

    def add(self, item: Item, num_tokens: int, namespace: Hashable = "") -> None:
        """Queue a request that may reach `num_tokens`."""
        self._num_added += 1
        group = self._group_of_new(namespace)
        self._entries[item] = entry = _Entry(item, num_tokens, self._num_added, group)
        group.waiting.append(entry)

    def _group_of_new(self, namespace: Hashable) -> _Namespace[Item]:
        """Return the namespace of a new request. It gets no credit for the time in which it had no requests."""
        group = self._namespaces.get(namespace)
        if group is not None and group.is_active:
            return group
        active = [other.served for other in self._namespaces.values() if other.is_active]
        least = min(active, default=math.inf)
        # Namespaces without requests are kept if they were served more than others, or had a request lately.
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
        """Return whether a namespace without requests had one a short while ago."""
        return self._num_computed < group.last + LINGER

    def remove(self, item: Item) -> None:
        """Remove a request that waits or runs."""
        entry = self._entries[item]
        if self.running.pop(item, None) is None:
            entry.namespace.waiting.remove(entry)
        else:
            entry.namespace.running.remove(entry)
        del self._entries[item]  # last: `num_waiting`, which other threads read, never falls below zero
        entry.namespace.last = self._num_computed

    def charge(self, item: Item, num_tokens: int) -> None:
        """Count tokens that were computed for a request."""
        self._num_computed += num_tokens
        group = self._entries[item].namespace
        group.served += num_tokens / group.weight

    def next(self, admission: Admission[Item] | None = None) -> Item | None:
        """Return the next request if one can begin now; it then counts as running."""
        rules = Admission() if admission is None else admission
        is_full = len(self.running) >= self.max_batch_size
        if is_full and (rules.suspend is None or len(self._namespaces) == 1):
            return None
        parts, bound = self._row_limits(), math.inf
        self._suspend(self._over_limit(parts, rules), rules)
        order = self._in_order()
        if not order:
            return None
        holders = {
            group: [entry for entry in group.running if rules.may_yield(entry.item)]
            for group in self._namespaces.values()
            if group.running and rules.suspend is not None
        }
        offers, least = self._offers(holders), self.size(1)
        has_room = (
            len(self.running) < self.max_batch_size and self.max_tokens - self.num_taken - rules.num_held >= least
        )
        for group in order:
            entry = group.waiting[0]
            if group.served >= bound or len(group.running) >= parts.get(group, self.max_batch_size):
                continue
            leaving = None
            if has_room or offers.may_suffice(group, self._share(group, 1, least)):
                shared = rules.num_shared(entry.item)
                if shared is None:
                    continue
                size = self.size(entry.num_tokens - shared)
                leaving = self._room_for(group, size, holders, rules)
            if leaving is not None:
                self._suspend(leaving, rules)
                group.waiting.popleft()
                group.running.append(entry)
                self.running[entry.item] = entry.size = size
                return entry.item
            if not group.running:
                bound = min(bound, group.served + TURN)
        return None

    def _row_limits(self) -> dict[_Namespace[Item], int]:
        """Return the rows that each namespace may have, by the fourth rule; empty if there is only one namespace."""
        if self.lends_rows or len(self._namespaces) == 1:
            return {}
        there = [group for group in self._namespaces.values() if group.is_active or self._lingers(group)]
        total = sum(group.weight for group in there)
        return {group: math.ceil(self.max_batch_size * group.weight / total) for group in there}

    @staticmethod
    def _over_limit(parts: Mapping[_Namespace[Item], int], rules: Admission[Item]) -> list[_Entry[Item]]:
        """Return the newest requests of namespaces that have more rows than their parts, if requests may give way."""
        found: list[_Entry[Item]] = []
        if rules.suspend is None:
            return found
        for group, most in parts.items():
            newest = sorted(group.running, key=lambda entry: -entry.number)[: max(len(group.running) - most, 0)]
            found += [entry for entry in newest if rules.may_yield(entry.item)]
        return found

    def _offers(self, holders: Mapping[_Namespace[Item], list[_Entry[Item]]]) -> "_Offers[Item]":
        """Return the namespaces that would give way first, by the second and the third rule."""
        newest = {group: max(entries, key=lambda entry: entry.number) for group, entries in holders.items() if entries}
        shares = {group: self._share(group, -1, -entry.size) for group, entry in newest.items()}
        richest = sorted(newest, key=lambda group: -shares[group])
        best_served = sorted(newest, key=lambda group: -group.served)
        return _Offers(richest[:2], shares, best_served[:2])

    def _in_order(self) -> list[_Namespace[Item]]:
        """Return the namespaces with waiting requests, in the order in which they are to be served."""
        waiting = [group for group in self._namespaces.values() if group.waiting] if self.num_waiting else []
        if len(waiting) > 1:
            waiting.sort(key=lambda group: (self._share(group), group.served, group.waiting[0].number))
        return waiting

    def _share(self, group: _Namespace[Item], num_rows: int = 0, num_tokens: int = 0) -> float:
        """Return a namespace's share of rows or memory, with `num_rows` and `num_tokens` added, by its weight."""
        rows = (len(group.running) + num_rows) / self.max_batch_size
        tokens = (sum(entry.size for entry in group.running) + num_tokens) / self.max_tokens
        return max(rows, tokens) / group.weight

    def _suspend(self, entries: Sequence[_Entry[Item]], rules: Admission[Item]) -> None:
        for entry in entries:
            group = entry.namespace
            del self.running[entry.item]
            group.running.remove(entry)
            earlier = [other for other in group.waiting if other.number < entry.number]
            group.waiting.insert(len(earlier), entry)
            assert rules.suspend is not None
            rules.suspend(entry.item)

    def _room_for(
        self,
        group: _Namespace[Item],
        size: int,
        holders: Mapping[_Namespace[Item], list[_Entry[Item]]],
        rules: Admission[Item],
    ) -> list[_Entry[Item]] | None:
        """Return the holders' requests that give way to one of this size; None if it cannot begin now."""
        rows, tokens = self.max_batch_size - len(self.running), self.max_tokens - self.num_taken - rules.num_held
        if rows > 0 and tokens >= size:
            return []
        others = {other: entries for other, entries in holders.items() if other is not group}
        for found in (self._of_larger_shares(group, size, others), self._of_better_served(group, others, rules)):
            leaving: list[_Entry[Item]] = []
            for entry in found:
                leaving.append(entry)
                if rows + len(leaving) > 0 and tokens + sum(item.size for item in leaving) >= size:
                    return leaving
        return None

    def _of_larger_shares(
        self, group: _Namespace[Item], size: int, others: Mapping[_Namespace[Item], list[_Entry[Item]]]
    ) -> Iterator[_Entry[Item]]:
        """Yield requests that may give way by the second rule, each from the namespace with the largest share left."""
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
        rules: Admission[Item],
    ) -> Iterator[_Entry[Item]]:
        """Yield requests that may give way by the third rule: of the best served namespaces first, newest first."""
        if group.running:
            return
        better = [other for other in others if other.served >= group.served + TURN]
        better.sort(key=lambda other: -other.served)
        for entry in chain(*(sorted(others[other], key=lambda entry: -entry.number) for other in better)):
            if rules.has_had_turn(entry.item):
                yield entry


class ByteScheduler(Scheduler[Item]):
    """Scheduler whose unit is bytes instead of tokens: a request takes exactly as many bytes as it may need."""

    def size(self, num_tokens: int) -> int:
        return num_tokens

    def check(self, num_tokens: int) -> None:
        if num_tokens > self.max_tokens:
            raise ValueError(
                f"The request may need {num_tokens} bytes of keys, values and states, but the engine's `max_kv_bytes` "
                f"allows {self.max_tokens}: shorten the request, or raise `max_kv_bytes`."
            )
