"""Turns between namespaces, first come, first served within one, within slots and memory."""

import itertools
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_smartspec.serving.scheduler import LINGER, TURN, Admission, Scheduler
from hf_smartspec.target_model.cache.slabs import slot_size

SIZES = st.lists(st.integers(1, 300), max_size=30)
NAMES = "abcd"


@given(SIZES, st.integers(1, 6), st.integers(300, 1000), st.data())
def test_requests_begin_in_their_order_and_always_fit(sizes, max_batch_size, max_tokens, data):
    scheduler = Scheduler(max_batch_size, max_tokens)
    begun, queue = [], list(enumerate(sizes))
    while queue or len(scheduler):
        for _ in range(data.draw(st.integers(0, 3))):
            if queue:
                scheduler.add(*queue.pop(0))
        while (item := scheduler.next(Admission(begun.remove))) is not None:
            begun.append(item)
            assert len(scheduler.running) <= max_batch_size
            assert scheduler.num_taken == sum(scheduler.running.values()) <= max_tokens
            assert scheduler.running[item] == min(slot_size(sizes[item]), max_tokens) >= sizes[item]
        if scheduler.waiting:
            assert scheduler.running, "somebody can always run"
            assert not data.draw(st.booleans()) or scheduler.next() is None, "nobody overtakes"
        if scheduler.running:
            scheduler.remove(data.draw(st.sampled_from(sorted(scheduler.running))))
        elif not queue:
            break
    assert begun == sorted(begun) == list(range(len(sizes)))


@given(SIZES.filter(bool), st.data())
def test_waiting_requests_can_leave(sizes, data):
    scheduler = Scheduler(1, 300)
    for item, size in enumerate(sizes):
        scheduler.add(item, size)
    gone = data.draw(st.sets(st.sampled_from(range(len(sizes)))))
    for item in gone:
        scheduler.remove(item)
    served = []
    while (item := scheduler.next()) is not None:
        served.append(item)
        scheduler.remove(item)
    assert served == [item for item in range(len(sizes)) if item not in gone]


def test_requests_that_never_fit_are_refused():
    scheduler = Scheduler(4, 100)
    scheduler.check(100)
    with pytest.raises(ValueError, match=r"may reach 101 tokens .* holds 100"):
        scheduler.check(101)


def test_a_long_request_takes_no_more_room_than_it_needs():
    """Others run beside it as if they were alone in what it leaves."""
    scheduler = Scheduler(100, 8192 + 31 * 256)
    for item, size in enumerate([8000, *[200] * 40]):
        scheduler.add(item, size)
    while scheduler.next() is not None:
        pass
    assert list(scheduler.running.values()) == [8192, *[256] * 31]


def test_what_is_shared_counts_with_whom_it_lies():
    """And goes on to count when that one has ended, as long as it is held."""
    scheduler = Scheduler(4, 1024 + 64)
    for item, size in (("base", 1000), ("sharer", 1010), ("other", 60)):
        scheduler.add(item, size)
    assert scheduler.next() == "base" and scheduler.running["base"] == 1024
    assert scheduler.next() is None
    assert scheduler.next(Admission(num_shared=lambda item: None)) is None, "it waits for what it shares"
    assert scheduler.next(Admission(num_shared=lambda item: 960)) == "sharer" and scheduler.running["sharer"] == 64
    scheduler.remove("base")
    assert scheduler.next(Admission(num_held=1024)) is None
    assert scheduler.next() == "other" and not scheduler.waiting


# Namespaces. Requests are pairs of a namespace and a number.


def fill(scheduler: Scheduler, **options) -> tuple[list, list]:
    """Admits whom it can; returns those that have begun and those that have given way, in order."""
    begun, gone = [], []
    while (item := scheduler.next(Admission(gone.append, **options))) is not None:
        begun.append(item)
    return begun, gone


def add(scheduler: Scheduler, namespace: str, count: int = 1, size: int = 1, first: int = 0) -> None:
    for number in range(first, first + count):
        scheduler.add((namespace, number), size, namespace)


def counts(items) -> Counter:
    return Counter(namespace for namespace, _ in items)


def serve(scheduler: Scheduler, item, num_tokens: int) -> None:
    """So many steps of a running request, and admission after each."""
    for _ in range(num_tokens):
        scheduler.charge(item, 1)
        fill(scheduler)


@given(st.integers(1, 6), st.lists(st.sampled_from([0.5, 1.0, 2.0]), min_size=4, max_size=4), st.data())
def test_no_namespace_waits_while_another_has_more(max_batch_size, weights, data):
    weight = dict(zip(NAMES, weights))
    scheduler = Scheduler(max_batch_size, 10**6)
    scheduler.weights = weight
    numbers = Counter()
    for _ in range(data.draw(st.integers(1, 25))):
        if data.draw(st.booleans()) or not scheduler.running:
            name, count = data.draw(st.sampled_from(NAMES)), data.draw(st.integers(1, 8))
            add(scheduler, name, count, first=numbers[name])
            numbers[name] += count
        else:
            scheduler.remove(data.draw(st.sampled_from(sorted(scheduler.running))))
        fill(scheduler)
        running, waiting = counts(scheduler.running), counts(scheduler.waiting)
        assert sum(running.values()) == min(max_batch_size, len(scheduler)), "a place is empty only if nobody waits"
        for name in waiting:
            for other in running.keys() - {name}:
                left, own = (running[other] - 1) / weight[other], (running[name] + 1) / weight[name]
                assert left < own, "one place less would still have left it no fewer"
            oldest = min(number for whose, number in scheduler.waiting if whose == name)
            assert all(number < oldest for whose, number in scheduler.running if whose == name), "first come"


@given(
    st.lists(st.tuples(st.sampled_from(NAMES), st.integers(1, 120), st.integers(1, 100)), min_size=1, max_size=20),
    st.integers(1, 4),
    st.integers(120, 400),
    st.lists(st.integers(0, 3), min_size=20, max_size=20),
)
def test_all_are_served_and_every_step_brings_some_forward(requests, max_batch_size, max_tokens, arrivals):
    """Requests of any size may come at any time: none is lost by giving way, and budgets hold."""
    scheduler = Scheduler(max_batch_size, max_tokens)
    left, queue, num_steps = {}, list(enumerate(requests)), 0
    while queue or len(scheduler):
        for index, (name, size, length) in queue[: arrivals[num_steps] if num_steps < len(arrivals) else len(queue)]:
            scheduler.add((name, index), size, name)
            left[name, index] = length
            queue.pop(0)
        fill(scheduler)
        assert len(scheduler.running) <= max_batch_size and scheduler.num_taken <= max_tokens
        assert scheduler.running or not len(scheduler)
        for item in list(scheduler.running):
            scheduler.charge(item, 1)
            left[item] -= 1
            if not left[item]:
                scheduler.remove(item)
        num_steps += 1
    assert not any(left.values()) and num_steps <= sum(length for *_, length in requests) + len(arrivals)


def test_a_newcomer_gets_the_newest_place_of_who_has_all():
    scheduler = Scheduler(4, 10**6)
    add(scheduler, "a", 8)
    fill(scheduler)
    add(scheduler, "b", 3)
    assert fill(scheduler) == ([("b", 0), ("b", 1)], [("a", 3), ("a", 2)]), "half for each"
    scheduler.remove(("b", 0))
    assert fill(scheduler) == ([("b", 2)], [])
    scheduler.remove(("b", 1))
    assert fill(scheduler) == ([("a", 2)], []), "the first that has given way goes on first"
    scheduler.remove(("a", 0))
    assert fill(scheduler) == ([("a", 3)], [])


def test_memory_is_shared_like_places():
    scheduler = Scheduler(32, 1024)
    add(scheduler, "a", 4, size=256)
    add(scheduler, "b", 1, size=200)
    assert fill(scheduler)[0] == [("a", 0), ("b", 0), ("a", 1), ("a", 2)]
    add(scheduler, "b", 1, size=512, first=1)
    assert fill(scheduler) == ([], []), "it would have more than it leaves"
    scheduler.remove(("b", 0))
    add(scheduler, "c", 1, size=256)
    assert fill(scheduler) == ([("b", 1), ("c", 0)], [("a", 2), ("a", 1)])


def test_few_large_requests_are_as_much_as_many_small_ones():
    scheduler = Scheduler(32, 1024)
    add(scheduler, "a", 4, size=128)
    add(scheduler, "b", 1, size=512)
    fill(scheduler)
    add(scheduler, "b", 1, size=128, first=1)
    assert len(scheduler.running) == 5 and fill(scheduler) == ([], []), "it has half of the memory already"


def test_weights_are_parts():
    scheduler = Scheduler(8, 10**6)
    scheduler.weights = {"a": 3.0}
    for name in "ab":
        add(scheduler, name, 10)
    fill(scheduler)
    assert counts(scheduler.running) == {"a": 6, "b": 2}


def test_more_namespaces_than_places_take_turns():
    """Each at least a turn, so that what is computed anew pays."""
    scheduler = Scheduler(1, 10**6)
    for name in "abc":
        add(scheduler, name)
    fill(scheduler)
    order = []
    for _ in range(9 * TURN):
        (item,) = scheduler.running
        order.append(item[0])
        serve(scheduler, item, 1)
    assert counts((name, 0) for name in order) == pytest.approx({"a": 3 * TURN, "b": 3 * TURN, "c": 3 * TURN}, abs=TURN)
    switches = [place for place in range(1, len(order)) if order[place] != order[place - 1]]
    assert min(after - before for before, after in itertools.pairwise(switches)) >= TURN


def test_a_turn_begins_when_the_text_has_been_read():
    scheduler = Scheduler(1, 10**6)
    add(scheduler, "a")
    fill(scheduler)
    add(scheduler, "b")
    scheduler.charge(("a", 0), 10 * TURN)
    assert fill(scheduler, has_had_turn=lambda item: False) == ([], [])
    assert fill(scheduler, may_yield=lambda item: False) == ([], [])
    assert scheduler.next() is None, "nobody gives way"
    assert fill(scheduler) == ([("b", 0)], [("a", 0)])


@pytest.mark.parametrize("may_give_way", [True, False])
def test_a_large_request_is_not_passed_over_for_ever(may_give_way):
    """Namespaces that were served more make room for it, a turn later at the latest."""
    scheduler = Scheduler(8, 1024)
    add(scheduler, "a", 4, size=256)
    fill(scheduler)
    add(scheduler, "b", 1, size=1024)
    add(scheduler, "a", 100, size=256, first=4)
    num_steps = 0
    while ("b", 0) not in scheduler.running:
        for item in list(scheduler.running):
            scheduler.charge(item, 1)
        if num_steps % 3 == 0:  # they come and go, and all memory is never free at once by itself
            scheduler.remove(min(scheduler.running))
        fill(scheduler, has_had_turn=lambda item: may_give_way)
        num_steps += 1
        assert num_steps <= TURN
    assert len(scheduler.running) == 1


@pytest.mark.parametrize("max_batch_size", [1, 8])
def test_what_others_leave_is_not_lent_where_rows_are_dear(max_batch_size):
    """Until they have been away for a while."""
    scheduler = Scheduler(max_batch_size, 10**6)
    scheduler.lends_rows = False
    part = -(-max_batch_size // 2)
    add(scheduler, "a", 20)
    fill(scheduler)
    assert len(scheduler.running) == max_batch_size, "there is no other"
    add(scheduler, "b")
    scheduler.charge(("a", 0), TURN)
    fill(scheduler)
    assert counts(scheduler.running)["b"] == 1 and counts(scheduler.running)["a"] == min(part, max_batch_size - 1)
    scheduler.remove(("b", 0))
    fill(scheduler)
    assert scheduler.running == dict.fromkeys([("a", number) for number in range(part)], scheduler.size(1))
    scheduler.charge(("a", 0), LINGER - 1)
    assert fill(scheduler) == ([], [])
    scheduler.charge(("a", 0), 1)
    assert len(fill(scheduler)[0]) == max_batch_size - part
    add(scheduler, "b", first=1)
    fill(scheduler)
    assert ("b", 1) not in scheduler.running or max_batch_size > 1
    assert len(scheduler.running) == min(part + 1, max_batch_size)


def test_parts_are_by_weight():
    scheduler = Scheduler(8, 10**6)
    scheduler.lends_rows, scheduler.weights = False, {"a": 3.0}
    add(scheduler, "b", 10)
    fill(scheduler)
    add(scheduler, "a", 3)
    fill(scheduler)
    assert counts(scheduler.running) == {"a": 3, "b": 2}


def test_time_without_requests_is_not_made_up_for():
    scheduler = Scheduler(1, 10**6)
    add(scheduler, "a", 2)
    fill(scheduler)
    scheduler.charge(("a", 0), 1000)
    add(scheduler, "b", 3)
    assert fill(scheduler) == ([], []), "nobody owes it anything yet"
    scheduler.remove(("a", 0))
    order = []
    for _ in range(4):
        ((item,), _) = fill(scheduler)
        order.append(item[0])
        scheduler.charge(item, 10)
        scheduler.remove(item)
    assert order == ["a", "b", "b", "b"]
    assert not len(scheduler)


@given(SIZES, st.integers(1, 6), st.integers(300, 1000), st.integers(0, 3))
def test_the_queue_names_who_begins_next_and_for_how_many_there_is_room(sizes, max_batch_size, max_tokens, num_begun):
    """Candidate batches and HasSlot of SmartSpec's algorithm 2."""
    scheduler = Scheduler(max_batch_size, max_tokens)
    for number, size in enumerate(sizes):
        scheduler.add(number, size, NAMES[number % 2])
    for _ in range(num_begun):
        scheduler.next()
    waiting, num_fitting = scheduler.queue()
    assert waiting == sorted(scheduler.waiting)[: max_batch_size - len(scheduler.running)]
    sums = list(itertools.accumulate([scheduler.size(sizes[item]) for item in waiting], initial=scheduler.num_taken))
    assert sums[num_fitting] <= max_tokens and all(total > max_tokens for total in sums[num_fitting + 1 :])
