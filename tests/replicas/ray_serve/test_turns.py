"""Requests of several keys on their way to replicas."""

import asyncio
from collections import Counter

import pytest

pytest.importorskip("fastapi")

from hf_smartspec.replicas.ray_serve.turns import KeyTurns
from hf_smartspec.serving.server.errors import ApiError


class Asking:
    """Requests that stay with a replica until they are told to end."""

    def __init__(self, turns: KeyTurns):
        self.turns, self.inside, self.tasks = turns, [], {}

    async def begin(self, *names: str, num_answers: int = 1) -> None:
        for name in names:
            self.tasks[name] = asyncio.create_task(self._ask(name, num_answers))
        await self.settle()

    async def _ask(self, name: str, num_answers: int) -> None:
        async with self.turns.turn(name[0], num_answers):
            self.inside.append(name)
            try:
                await asyncio.Event().wait()
            finally:
                self.inside.remove(name)

    async def end(self, *names: str) -> None:
        for name in names:
            self.tasks[name].cancel()
        await self.settle()

    @staticmethod
    async def settle() -> None:
        for _ in range(10):
            await asyncio.sleep(0)


def test_a_key_leaves_places_for_others():
    async def play():
        asking = Asking(KeyTurns(6, max_waiting=2))
        await asking.begin("a1", "a2", "a3", "a4", "a5")
        assert asking.inside == ["a1", "a2", "a3"], "half"
        await asking.begin("b1", "b2", "b3")
        assert asking.inside[3:] == ["b1", "b2"], "a third"
        await asking.begin("c1", "c2")
        assert asking.inside[5:] == ["c1"], "a quarter"
        await asking.end("a1")
        assert "a4" not in asking.inside, "it has more than a quarter still"
        await asking.end("a2", "a3")
        assert asking.inside[-1] == "a4" and "a5" not in asking.inside
        await asking.end("c1", "c2", "b1", "b2", "b3")
        assert asking.inside == ["a4", "a5"]
        await asking.end("a4", "a5")
        assert not asking.inside and not asking.turns._running and not asking.turns._waiting

    asyncio.run(play())


def test_those_that_leave_while_they_wait_take_nothing():
    async def play():
        asking = Asking(KeyTurns(2, max_waiting=2))
        await asking.begin("a1", "a2", "a3")
        await asking.begin("a4")
        with pytest.raises(ApiError, match="of this key wait") as refused:
            await asking.tasks["a4"]
        assert refused.value.status == 429 and refused.value.retry_after
        asking.tasks["a1"].cancel()  # lets the second one in, which leaves at the same time
        await asyncio.sleep(0)
        asking.tasks["a2"].cancel()
        await asking.settle()
        assert asking.inside == ["a3"]
        await asking.end("a3")
        assert not asking.turns._running and not asking.turns._waiting
        await asking.begin("a5")
        await asking.begin("a6")
        await asking.end("a6")
        assert asking.inside == ["a5"] and not asking.turns._waiting
        await asking.end("a5")

    asyncio.run(play())


def test_no_more_are_let_in_than_there_are_places():
    """A key whose requests come when all places are taken gets one in; what becomes free goes to those with fewest."""

    async def play():
        asking = Asking(KeyTurns(12, max_waiting=100))
        for key in "abcdef":
            await asking.begin(*(f"{key}{number}" for number in range(12)))
        counts = Counter(name[0] for name in asking.inside)
        assert counts == {"a": 6, "b": 4, "c": 2, "d": 1, "e": 1, "f": 1}
        for number in range(2, 12):  # of those inside, and then of those waiting
            await asking.end(f"a{number}", f"b{number}")
            counts = Counter(name[0] for name in asking.inside)
            assert set(counts) == set("abcdef") and counts.total() <= 12 + 3
            assert max(counts[key] for key in "def") - min(counts[key] for key in "def") <= 1
        await asking.end(*asking.tasks)
        assert not asking.inside and not asking.turns._running and not asking.turns._waiting

    asyncio.run(play())


def test_requests_take_a_place_for_every_answer():
    async def play():
        asking = Asking(KeyTurns(12, max_waiting=100))
        await asking.begin("a1", "a2", "a3", num_answers=3)
        assert asking.inside == ["a1", "a2"], "six of twelve"
        await asking.begin("a4")
        assert "a4" not in asking.inside, "in order of arrival"
        await asking.end("a3")
        await asking.begin("b1", "b2", num_answers=2)
        assert asking.inside[2:] == ["b1", "b2"]
        await asking.end(*asking.tasks)
        await asking.begin("a1", num_answers=1000)
        await asking.begin("a2", "b1", "b2", "b3", "b4", "b5")
        assert asking.inside == ["a1", "b1", "b2", "b3", "b4"], "the largest counts as half, and others get their part"
        await asking.end(*asking.tasks)
        assert not asking.inside and not asking.turns._running and not asking.turns._waiting

    asyncio.run(play())
