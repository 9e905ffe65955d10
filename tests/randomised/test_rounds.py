"""Random requests over all kinds of drafters, in engines and in `generate`: none differs from plain decoding."""

import os

import pytest

from ..conftest import COUNTS
from ..covering import IS_EXHAUSTIVE
from .kinds import KINDS
from .outcome import Outcome
from .rounds import play

NUM_REQUESTS = int(os.environ.get("HF_SMARTSPEC_REQUESTS", "0")) or (90 if IS_EXHAUSTIVE else 60)
NAMES = [*KINDS, "lists"]


@pytest.fixture(scope="module")
def total():
    found = Outcome(0)
    # Of all, some more, until every kind has drafted something that was accepted.
    more = 4 * NUM_REQUESTS if IS_EXHAUSTIVE else 0
    while (num := found.counts["requests"]) < NUM_REQUESTS or (found.idle(NAMES) and num < more):
        found += play(found.seed)
        found.seed += 1
    return found


def test_random_requests_get_the_plain_tokens(total, record_property):
    counts = {name: total.counts[name] for name in ("tokens", "ties", "differences")}
    drafts = {"drafted": sum(total.drafted.values()), "accepted": sum(total.accepted.values())}
    record_property(COUNTS, {"counts": counts | drafts | {"cases": total.counts["requests"]}, "ties": total.ties})
    assert not total.faults, "\n".join(total.faults)


@pytest.mark.exhaustive
def test_every_kind_of_drafter_was_right_at_times(total):
    assert not total.idle(NAMES), total


def test_what_makes_it_hard_has_happened(total):
    for name in ("sampled", "cancelled", "reused", "swaps", "gave way"):
        assert total.counts[name] > 0, f"{name}: {total}"
