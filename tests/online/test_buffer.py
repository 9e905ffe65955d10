"""The replay buffer keeps within its bound, and what it was told to keep."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hf_smartspec.online.buffer import EVICTIONS, ReplayBuffer
from hf_smartspec.online.samples import Sample, in_batches


def sample(length: int = 4, errors: int = 0) -> Sample:
    return Sample(
        np.arange(3, dtype=np.int32),
        np.arange(length, dtype=np.int32),
        torch.zeros(length, 2, dtype=torch.int32),
        torch.zeros(length, 2, dtype=torch.float16),
        np.arange(length) < errors,
    )


@given(
    st.sampled_from(EVICTIONS),
    st.lists(st.one_of(st.integers(1, 30), st.just("take"), st.just("return")), max_size=40),
    st.integers(1, 1500),
)
def test_it_keeps_within_its_bound_and_loses_only_the_oldest(eviction, actions, max_bytes):
    buffer, generator = ReplayBuffer(max_bytes, eviction), np.random.default_rng(0)
    expected: list[Sample] = []
    for action in actions:
        if action == "take":
            new, _ = buffer.take(2, generator)
            assert new == expected[len(expected) - len(new) :]
            buffer.put_back(new)
            expected = []
        elif action == "return":
            new, _ = buffer.take(0, generator)
            buffer.return_new(new)
        else:
            item = sample(action)
            buffer.add(item)
            expected.append(item)
        assert buffer.num_bytes <= max_bytes or len(buffer) == 1
        assert buffer.new == expected[len(expected) - len(buffer.new) :]


def test_samples_that_were_learnt_go_first():
    items = [sample(4) for _ in range(4)]
    buffer, generator = ReplayBuffer(3 * items[0].num_bytes), np.random.default_rng(0)
    buffer.add(items[0])
    buffer.put_back(buffer.take(0, generator)[0])
    for item in items[1:]:
        buffer.add(item)
    assert buffer.new == items[1:] and not buffer.old


@pytest.mark.parametrize("eviction, kept", [("release", []), ("newest", [1, 2, 3]), ("informative", [0, 1, 3])])
def test_what_stays_of_samples_that_were_learnt(eviction, kept):
    items = [sample(4, errors) for errors in (4, 2, 0, 3)]
    buffer, generator = ReplayBuffer(3 * items[0].num_bytes, eviction), np.random.default_rng(0)
    for item in items:
        buffer.add(item)
        buffer.put_back(buffer.take(0, generator)[0])
    assert sorted(map(items.index, buffer.old)) == kept


def test_some_that_were_learnt_come_again():
    items = [sample(4) for _ in range(5)]
    buffer, generator = ReplayBuffer(10**6), np.random.default_rng(0)
    for item in items[:4]:
        buffer.add(item)
    buffer.put_back(buffer.take(0, generator)[0])
    buffer.add(items[4])
    new, replayed = buffer.take(3, generator)
    assert new == items[4:] and len(replayed) == 3 and set(replayed) < set(items[:4])


@given(st.lists(st.integers(1, 20), max_size=20), st.integers(1, 60))
def test_batches_hold_all_samples_and_few_tokens(lengths, most):
    items = [sample(length) for length in lengths]
    batches = in_batches(items, most)
    assert sorted(map(id, items)) == sorted(id(item) for batch in batches for item in batch)
    for batch in batches:
        assert len(batch) == 1 or len(batch) * max(item.num_tokens for item in batch) <= most


def test_each_sample_is_measured_once():
    """It happens where requests end."""
    looks = []

    class Hidden(dict):
        def values(self):
            looks.append(self)
            return super().values()

    buffer = ReplayBuffer(10**6)
    for _ in range(20):
        buffer.add(replace(sample(), hidden=Hidden()))
    assert len(looks) == 20 and buffer.num_bytes == 20 * sample().num_bytes
