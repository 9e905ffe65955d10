"""Routers: who gets what, and when affinity gives way."""

import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from hf_smartspec.replicas.routing import Affinity, LeastLoaded, PowerOfTwo, ReplicaLoad, RoundRobin

IDLE = [ReplicaLoad(name) for name in "abc"]
TEXT = np.arange(64)
OTHER = np.arange(1000, 1064)


def busy(*running):
    return [ReplicaLoad(name, count) for name, count in zip("abc", running)]


def test_one_after_the_other():
    router = RoundRobin()
    assert [router.choose(IDLE, TEXT) for _ in range(6)] == [0, 1, 2, 0, 1, 2]


def test_the_least_loaded():
    assert LeastLoaded().choose(busy(3, 1, 2), TEXT) == 1
    assert LeastLoaded().choose([ReplicaLoad("a", 1, 5), ReplicaLoad("b", 4)], TEXT) == 1


def test_the_less_loaded_of_two():
    router = PowerOfTwo()
    chosen = Counter(router.choose(busy(9, 1, 5), TEXT) for _ in range(300))
    assert chosen[0] == 0 and chosen[1] > chosen[2] > 50
    assert PowerOfTwo().choose(IDLE[:1], TEXT) == 0


def test_beginnings_go_where_they_were_served():
    router = Affinity()
    first = router.choose(IDLE, TEXT)
    loads = [ReplicaLoad(item.name, int(place == first)) for place, item in enumerate(IDLE)]
    assert router.choose(loads, OTHER) != first, "nobody knows it, so the least loaded"
    assert router.choose(loads, np.concatenate([TEXT, OTHER[:32]])) == first
    assert router.choose(loads, np.concatenate([TEXT[:16], OTHER])) != first, "16 of 80 tokens are too few"


def test_the_longest_beginning_wins():
    router = Affinity()
    assert router.choose(busy(0, 1, 1), TEXT[:32]) == 0
    assert router.choose(busy(9, 0, 9), np.concatenate([OTHER, TEXT])) == 1
    assert router.choose(busy(9, 0, 9), OTHER[:32]) == 1
    assert router.choose(busy(60, 0, 1), TEXT) == 1, "0, which knows half of it, has too much to do"
    assert router.choose(busy(0, 9, 9), TEXT) == 1, "0 knows half of it, 1 all"


def test_namespaces_have_a_home_that_stays_when_others_come_and_go():
    homes = {name: Affinity().choose(IDLE, OTHER[:3], name) for name in map(str, range(60))}
    assert set(homes.values()) == {0, 1, 2}
    more = [*IDLE, ReplicaLoad("d")]
    moved = [name for name, home in homes.items() if Affinity().choose(more, OTHER[:3], name) not in (home, 3)]
    assert not moved
    assert 5 < sum(Affinity().choose(more, OTHER[:3], name) == 3 for name in homes) < 30


def test_whatever_a_request_calls_its_namespace_is_served():
    assert Affinity().choose(IDLE, TEXT, "\ud800") in (0, 1, 2)


def test_tenants_do_not_share_beginnings():
    router = Affinity()
    home = router.choose(IDLE, TEXT, "one")
    other = next(name for name in map(str, range(99)) if Affinity().choose(IDLE, OTHER, name) != home)
    assert router.choose(IDLE, TEXT, other) != home


def test_who_has_too_much_to_do_is_left_out():
    router = Affinity()
    router.max_extra = 4
    assert router.choose(busy(0, 1, 1), TEXT) == 0
    assert router.choose(busy(8, 4, 4), TEXT) == 0, "more than 1.5 times the mean, by a few"
    assert router.choose(busy(16, 4, 5), TEXT) == 1
    assert router.choose(busy(16, 5, 16), TEXT) == 1, "it has been served there since"


def test_the_longest_unused_are_forgotten():
    router = Affinity()
    router.max_blocks = 8
    router.choose(busy(0, 1, 1), TEXT)
    router.choose(busy(1, 0, 1), OTHER)
    router.choose(busy(1, 1, 0), np.arange(2000, 2064))
    assert len(router._served) == 8
    assert router.choose(busy(1, 0, 1), TEXT) == 1, "forgotten: the least loaded"


def test_several_threads_may_ask_at_once():
    affinity, rounds, interval = Affinity(), RoundRobin(), sys.getswitchinterval()
    affinity.max_blocks = 8

    def ask(thread):
        for number in range(500):
            affinity.choose(busy(0, 1, 2), np.arange(64) + 100 * ((thread + number) % 5))
            rounds.choose(IDLE, TEXT)

    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(ask, range(8)))
    finally:
        sys.setswitchinterval(interval)
    assert len(affinity._served) == 8
    assert rounds.choose(IDLE, TEXT) == 8 * 500 % 3, "nobody's turn was lost"


def test_replicas_that_are_gone_are_forgotten():
    router = Affinity()
    router.choose(busy(0, 1, 1), TEXT)
    router.forget("a")
    assert router.choose(busy(1, 0, 1), TEXT) == 1


@given(
    st.lists(st.integers(0, 200), min_size=1, max_size=6),
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 80), st.sampled_from(["", "x", "y"])), max_size=12),
    st.integers(1, 40),
)
def test_any_load_is_served_by_somebody(counts, requests, max_blocks):
    loads = [ReplicaLoad(number, count) for number, count in enumerate(counts)]
    router = Affinity()
    router.max_blocks = max_blocks
    for text, length, namespace in requests:
        place = router.choose(loads, np.arange(length) + 1000 * text, namespace)
        most = max(1.5 * np.mean(counts), np.mean(counts) + 16)
        assert 0 <= place < len(loads) and counts[place] <= most + 1e-9
        assert len(router._served) <= max_blocks
