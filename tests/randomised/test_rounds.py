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
HARD = "sampled", "cancelled", "reused", "swaps", "gave way"


@pytest.fixture(scope="module")
def total():
    found = Outcome(0)
    # Some more, until all that makes it hard has happened; of all, until every kind has drafted something that was
    # accepted.
    while (num := found.counts["requests"]) < NUM_REQUESTS or (num < 4 * NUM_REQUESTS and _is_easy(found)):
        found += play(found.seed)
        found.seed += 1
    return found


def _is_easy(found: Outcome) -> bool:
    return not all(found.counts[name] for name in HARD) or bool(IS_EXHAUSTIVE and found.idle(NAMES))


def test_random_requests_get_the_plain_tokens(total, record_property):
    counts = {name: total.counts[name] for name in ("tokens", "ties", "differences")}
    drafts = {"drafted": sum(total.drafted.values()), "accepted": sum(total.accepted.values())}
    record_property(COUNTS, {"counts": counts | drafts | {"cases": total.counts["requests"]}, "ties": total.ties})
    assert not total.faults, "\n".join(total.faults)


@pytest.mark.exhaustive
def test_every_kind_of_drafter_was_right_at_times(total):
    assert not total.idle(NAMES), total


def test_what_makes_it_hard_has_happened(total):
    for name in HARD:
        assert total.counts[name] > 0, f"{name}: {total}"
