"""Limits on the requests of each key that replicas hold at once, so that a place is left for other keys."""

import asyncio
from collections import Counter, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from ...serving.server.errors import ApiError


class KeyTurns:
    """
    Limiter that admits a key's requests as long as an equal part of the places stays free for one more key; further
    ones wait here, in order of arrival. A request takes as many places as it asks for answers, at most half of all.

    Parts shrink when keys arrive, and admitted requests stay admitted. Where they take all places, a later key gets one
    request in at once, and further ones as places become free, which go to the key that has fewest.

    Args:
        num_places (`int`): Requests that all replicas take at once.
        max_waiting (`int`): Requests of one key that may wait here.
    """

    def __init__(self, num_places: int, max_waiting: int):
        self.num_places, self.max_waiting = num_places, max_waiting
        self._running: Counter[str] = Counter()  # places
        self._waiting: dict[str, deque[tuple[asyncio.Future[None], int]]] = {}  # with the places that each needs

    @asynccontextmanager
    async def turn(self, namespace: str, num_answers: int = 1) -> AsyncIterator[None]:
        """
        Admit a request of a key, for so many answers, for the duration of the context.

        Raises:
            ApiError: 429, if too many of the key wait.
        """
        # A larger request must be admitted at some time, too, and must not keep other keys to one request each.
        num = max(min(num_answers, self.num_places // 2), 1)
        await self._take(namespace, num)
        try:
            yield
        finally:
            self._leave(namespace, num)

    async def _take(self, namespace: str, num: int) -> None:
        waiting = self._waiting.get(namespace, ())
        if not waiting and self._has_room(namespace, num):
            self._running[namespace] += num
            return
        if len(waiting) >= self.max_waiting:
            raise ApiError(429, "Too many requests of this key wait already: try again later", retry_after=1)
        entry = asyncio.get_running_loop().create_future(), num
        self._waiting.setdefault(namespace, deque()).append(entry)
        try:
            await entry[0]
        except asyncio.CancelledError:  # the client has left
            if not entry[0].cancelled():  # it had just been admitted
                self._leave(namespace, num)
            elif entry in self._waiting.get(namespace, ()):
                self._waiting[namespace].remove(entry)
                self._let_in()  # those after it may need fewer places
            raise

    def _leave(self, namespace: str, num: int) -> None:
        self._running -= Counter({namespace: num})  # subtraction drops keys without requests, which get no part
        self._let_in()

    def _has_room(self, namespace: str, num: int) -> bool:
        own, num_keys = self._running[namespace], len(self._running.keys() | {namespace})
        part = self.num_places // (num_keys + 1)
        return not own or (own + num <= part and self._running.total() + num <= self.num_places)

    def _let_in(self) -> None:
        while True:
            self._waiting = {name: waiting for name, waiting in self._waiting.items() if waiting}
            able = [name for name, waiting in self._waiting.items() if self._has_room(name, waiting[0][1])]
            if not able:
                return
            namespace = min(able, key=lambda name: self._running[name])
            place, num = self._waiting[namespace].popleft()
            if not place.done():
                self._running[namespace] += num
                place.set_result(None)
