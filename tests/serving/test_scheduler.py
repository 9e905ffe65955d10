"""First come, first served, within slots and memory."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_smartspec.serving.scheduler import Scheduler
from hf_smartspec.target.slabs import slot_size

SIZES = st.lists(st.integers(1, 300), max_size=30)


@given(SIZES, st.integers(1, 6), st.integers(300, 1000), st.data())
def test_requests_begin_in_their_order_and_always_fit(sizes, max_batch_size, max_tokens, data):
    scheduler = Scheduler(max_batch_size, max_tokens)
    begun, queue = [], list(enumerate(sizes))
    while queue or len(scheduler):
        for _ in range(data.draw(st.integers(0, 3))):
            if queue:
                scheduler.add(*queue.pop(0))
        while (item := scheduler.next()) is not None:
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
    assert scheduler.first == "sharer" and scheduler.next() is None
    assert scheduler.next(num_shared=960) == "sharer" and scheduler.running["sharer"] == 64
    scheduler.remove("base")
    assert scheduler.next(num_held=1024) is None
    assert scheduler.next() == "other" and scheduler.first is None
