"""Limits on the requests of each key that replicas hold at once, so that a place is left for other keys."""

import asyncio
from collections import Counter, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from ...serving.server.errors import ApiError


class KeyTurns:
    """
    Limiter that admits a key's requests as long as an equal part of the places stays free for one more key; further
    ones wait here, in order of arrival. Parts shrink when keys arrive, and admitted requests stay admitted: a later key
    gets its part even while others still hold more than theirs, and the replicas queue the rest.

    Args:
        num_places (`int`): Requests that all replicas take at once.
        max_waiting (`int`): Requests of one key that may wait here.
    """

    def __init__(self, num_places: int, max_waiting: int):
        self.num_places, self.max_waiting = num_places, max_waiting
        self._running: Counter[str] = Counter()
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}

    @asynccontextmanager
    async def turn(self, namespace: str) -> AsyncIterator[None]:
        """
        Admit a request of a key for the duration of the context.

        Raises:
            ApiError: 429, if too many of the key wait.
        """
        await self._take(namespace)
        try:
            yield
        finally:
            self._leave(namespace)

    async def _take(self, namespace: str) -> None:
        waiting = self._waiting.get(namespace, ())
        if not waiting and self._has_place(namespace):
            self._running[namespace] += 1
            return
        if len(waiting) >= self.max_waiting:
            raise ApiError(429, "Too many requests of this key wait already: try again later", retry_after=1)
        place = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(namespace, deque()).append(place)
        try:
            await place
        except asyncio.CancelledError:  # the client has left
            if place.cancelled():
                self._forget(namespace, place)
            else:  # it had just been admitted
                self._leave(namespace)
            raise

    def _leave(self, namespace: str) -> None:
        self._running[namespace] -= 1
        if not self._running[namespace]:
            del self._running[namespace]  # only keys with requests here get a part
        self._let_in()

    def _has_place(self, namespace: str) -> bool:
        num_keys = len(self._running) + (namespace not in self._running)
        return self._running[namespace] < max(self.num_places // (num_keys + 1), 1)

    def _let_in(self) -> None:
        for namespace, waiting in list(self._waiting.items()):
            while waiting and self._has_place(namespace):
                place = waiting.popleft()
                if not place.done():
                    self._running[namespace] += 1
                    place.set_result(None)
            if not waiting:
                del self._waiting[namespace]

    def _forget(self, namespace: str, place: "asyncio.Future[None]") -> None:
        waiting = self._waiting.get(namespace)
        if waiting is not None and place in waiting:
            waiting.remove(place)
            if not waiting:
                del self._waiting[namespace]
