"""Random requests over all kinds of drafters, in engines and in `generate`: none differs from plain decoding."""

import os
import random

import pytest

from ..conftest import COUNTS
from ..covering import IS_EXHAUSTIVE
from . import __main__ as command
from .kinds import KINDS
from .outcome import Outcome
from .rounds import _drawn, play
from .targets import ARCHITECTURES, GROUPS, USUAL

NUM_REQUESTS = int(os.environ.get("HF_SMARTSPEC_REQUESTS", "0")) or (90 if IS_EXHAUSTIVE else 60)
NAMES = [*KINDS, "lists"]
HYBRIDS = GROUPS["hybrids"]
FEW = (*USUAL, *[name for name in ("qwen3_5_text", "bamba", "jamba", "lfm2") if name in HYBRIDS])
HARD = "sampled", "cancelled", "reused", "swaps", "gave way"


@pytest.fixture(scope="module")
def total():
    found = Outcome(0)
    # Some more, until all that makes it hard has happened; of all, until every kind has drafted something that was
    # accepted.
    while (num := found.counts["requests"]) < NUM_REQUESTS or (num < 4 * NUM_REQUESTS and _is_easy(found)):
        # After enough requests, only kinds that have not been right yet.
        kinds = found.idle(KINDS) if IS_EXHAUSTIVE and num >= NUM_REQUESTS else []
        found += play(found.seed, kinds or tuple(KINDS), ARCHITECTURES if IS_EXHAUSTIVE else FEW)
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


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", [name for name in KINDS if not set(KINDS[name].architectures).isdisjoint(HYBRIDS)])
def test_every_kind_of_drafter_was_right_for_hybrids_at_times(kind):
    found = Outcome(0)
    while found.idle([kind]) and found.seed < 20:
        found += play(found.seed, [kind], HYBRIDS)
        found.seed += 1
    assert not found.faults and not found.idle([kind]), found


def test_what_makes_it_hard_has_happened(total):
    for name in HARD:
        assert total.counts[name] > 0, f"{name}: {total}"


def test_drafters_and_targets_can_be_named(monkeypatch):
    asked = []

    def named(*options):
        monkeypatch.setattr("sys.argv", ["randomised", "--round", "1", *options])
        monkeypatch.setattr(command, "play", lambda _, *names: asked.append(names) or Outcome(1))
        assert command.main() == 0
        return asked[-1]

    assert named() == (list(KINDS), list(ARCHITECTURES))
    own = named("--targets", "deepseek_v3", "--kinds", "early exit,suffix")
    assert own == (["suffix"], ["deepseek_v3"]), "it is not written out"
    kinds, targets = named("--targets", "hybrids,llama", "--kinds", "blocks,mtp")
    assert targets == [*HYBRIDS, "llama"] and {"mtp", "dflash", "jetspec", "dspark"} < set(kinds) < set(KINDS)
    for seed in range(20):
        target, own = _drawn(kinds, targets, seed, random.Random(seed))
        assert target in targets and set(own) <= set(kinds) and own[0] == kinds[seed % len(kinds)]
    for options in (("--targets", "llamas"), ("--kinds", "block"), ("--targets", "gpt2", "--kinds", "mtp")):
        with pytest.raises(SystemExit):
            named(*options)
