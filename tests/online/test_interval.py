"""The interval between updates follows load and drift (Online Speculative Decoding, section 4.2.1)."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_smartspec.online.interval import UpdateInterval
from hf_smartspec.online.options import LearningOptions

from .helpers import feed, learner_of, new_target


def interval(least=8, most=64):
    now = [0.0]
    found = UpdateInterval(least, most, lambda: now[0])

    def passes(seconds, is_idle):
        found.note_load(is_idle)
        now[0] += seconds

    return found, passes


@given(st.integers(1, 20), st.integers(0, 100), st.lists(st.tuples(st.integers(0, 9), st.booleans()), min_size=1))
def test_by_load_it_is_the_least_over_the_share_of_time_with_capacity(least, more, spans):
    found, passes = interval(least, least + more)
    for seconds, is_idle in spans:
        passes(seconds, is_idle)
    total, idle = sum(seconds for seconds, _ in spans), sum(seconds for seconds, is_idle in spans if is_idle)
    wanted = least if not total else least + more if not idle else min(math.ceil(least * total / idle), least + more)
    assert found.requests == wanted
    found.restart()
    assert found.requests == least


def test_by_drift_it_is_the_least_again():
    found, passes = interval()
    for rate in [0.1, 0.2, 0.15, 0.12] * 4:
        found.note_request(rate)
    found.restart()
    passes(1, True)
    passes(9, False)
    assert found.requests == 64
    for rate in (0.12, 0.18, 0.14):
        found.note_request(rate)
    assert not found.has_drifted and found.requests == 64
    for rate in (0.8, 0.9, 0.7):
        found.note_request(rate)
    assert found.has_drifted and found.requests == 8
    found.restart()  # what came last is what is usual now
    passes(1, False)
    for rate in (0.8, 0.4, 0.5):
        found.note_request(rate)
    assert not found.has_drifted and found.requests == 64


def test_one_error_after_faultless_requests_is_no_drift():
    found = UpdateInterval(8, 64)
    for _ in range(2):
        found.note_request(0.0)
    found.restart()
    for rate in (0.05, 0.0):
        found.note_request(rate)
    assert not found.has_drifted
    found.note_request(0.6)
    assert found.has_drifted


def test_under_load_learners_wait_for_more_requests():
    target = new_target()
    learner = learner_of(target, every_requests=4, most_requests=12)
    learner._interval = UpdateInterval(4, 12, iter(range(10**6)).__next__)  # time passes while the load is on
    learner.note_load(False)
    feed(learner, target, 4)
    assert not learner.is_due and learner.statistics.interval == 12
    feed(learner, target, 8)
    assert learner.is_due


def test_what_cannot_be_is_refused():
    with pytest.raises(ValueError, match="`most_requests` must be at least `every_requests`"):
        LearningOptions(every_requests=8, most_requests=4)
    with pytest.raises(ValueError, match="longest interval of `every_requests`, which is None"):
        LearningOptions(every_requests=None, every_tokens=5, most_requests=4)
