"""First come, first served, within slots and memory."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_smartspec.serving.scheduler import MemoryShape, Scheduler

SIZES = st.lists(st.integers(1, 40), max_size=30)


@given(SIZES, st.integers(1, 6), st.integers(40, 200), st.data())
def test_requests_begin_in_their_order_and_always_fit(sizes, max_batch_size, max_tokens, data):
    scheduler = Scheduler(max_batch_size, max_tokens)
    shape = MemoryShape(1, 1)
    begun, queue = [], list(enumerate(sizes))
    while queue or len(scheduler):
        for _ in range(data.draw(st.integers(0, 3))):
            if queue:
                scheduler.add(*queue.pop(0))
        while (item := scheduler.next()) is not None:
            begun.append(item)
            shape = scheduler.shape(shape, num_kept=data.draw(st.integers(0, 4)))
            longest = max(scheduler.running.values())
            assert len(scheduler.running) <= shape.num_slots <= max_batch_size and longest <= shape.capacity
            assert shape.num_tokens <= max_tokens
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
    scheduler = Scheduler(1, 100)
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


def test_memory_keeps_its_shape_while_it_fits():
    """Growing copies, so that it must be rare."""
    scheduler = Scheduler(8, 10_000)
    shape, changes = MemoryShape(1, 64), 0
    for item in range(200):
        scheduler.add(item, 100 + item % 7)
        if len(scheduler.running) == 5:
            scheduler.remove(next(iter(scheduler.running)))
        assert scheduler.next() == item
        new = scheduler.shape(shape)
        changes += new != shape
        shape = new
    assert changes <= 4 and shape == MemoryShape(8, 128)
    for item in list(scheduler.running):
        scheduler.remove(item)
    scheduler.add("small", 10)
    scheduler.next()
    assert scheduler.shape(shape).num_tokens <= 16, "and shrinks when little is needed"
