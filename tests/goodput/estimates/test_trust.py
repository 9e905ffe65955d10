"""Corrections of drafts' probabilities by the acceptance of all requests, and of one."""

import numpy as np
import pytest

from hf_smartspec import DraftTree
from hf_smartspec.drafts.forest import Forest
from hf_smartspec.goodput.estimates.trust import Trust

IDS = ["code", "chat"]


def learn(trust, num, right, claimed=0.6):
    """Let drafts of one token be right or wrong in `num` steps, `right[row]` for each request."""
    for _ in range(num):
        forest = Forest([DraftTree.chain([1], [claimed]) for _ in right])
        trust.learn("lookup", forest, np.arange(len(right)), np.array(right), IDS)


def of_chains(trust, probs, ids=IDS):
    """Return what chains with these probabilities become, `[rows, depths]`."""
    forest = Forest([DraftTree.chain(range(len(probs)), probs)] * len(ids))
    return trust.probs("lookup", forest, ids).reshape(len(ids), -1)


def test_a_request_has_the_ratio_of_its_own_acceptance():
    trust = Trust()
    learn(trust, 8, [True, False])
    (code,), (chat,), (new,) = of_chains(trust, [0.6], [*IDS, "new"])
    assert chat < 0.5 * code and chat < new < code


def test_one_request_is_corrected_as_beside_others():
    trust = Trust()
    learn(trust, 8, [True, False])
    alone = [of_chains(trust, [0.3, 0.9], [name])[0] for name in IDS]
    assert np.array(alone) == pytest.approx(of_chains(trust, [0.3, 0.9]))


def test_the_end_of_a_request_ends_its_ratio():
    trust = Trust()
    learn(trust, 8, [True, False])
    trust.forget("chat")
    trust.forget("unknown")
    chat, new = of_chains(trust, [0.6], ["chat", "new"])
    assert chat == new


def test_a_rise_makes_nothing_certain():
    """Drafts that are right half of the time, as they claim, are right ten times in a row."""
    trust = Trust()
    for is_right in [True, False] * 50 + [True] * 10:
        learn(trust, 1, [is_right, is_right], claimed=0.5)
    half, likely = of_chains(trust, [0.5, 0.9])[0]
    assert 0.55 < half < 0.8 and 0.9 < likely < 0.98
