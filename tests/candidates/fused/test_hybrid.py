"""What a drafter beside other sources is told, and what is asked of it."""

import numpy as np

from hf_smartspec import DraftTree
from hf_smartspec.candidates.fused.source import FusedCandidates
from hf_smartspec.drafts.price import LevelPrice
from hf_smartspec.goodput import Calibrator

from .test_source import Scripted


class Priced(Scripted):
    """Notes its prices and what it is asked for."""

    is_autoregressive, heeds_prices, most_nodes = True, True, 24

    def __init__(self, tree):
        super().__init__(tree)
        self.prices, self.asked = [], []

    def price(self, price):
        self.prices.append(price)

    def propose(self, request_ids, max_nodes):
        self.asked.append(list(max_nodes))
        return super().propose(request_ids, max_nodes)


def test_only_a_drafter_that_is_told_prices_drafts_more_than_usual():
    inner, drafter = Priced(DraftTree.chain([1])), Priced(DraftTree.chain([5, 6]))
    fused = FusedCandidates([inner, Scripted(DraftTree.chain([2]))], drafter=drafter, threshold=9.0)
    fused.start("a", np.array([7]))
    for price, most in ((None, 5), (LevelPrice(0.1, 0.0, 0.1), 24), (None, 5)):
        fused.price(price)
        fused.propose(["a"], [30])
        assert drafter.asked[-1] == [most] and drafter.prices[-1] == price
    assert inner.asked == [[5]] * 3 and not any(inner.prices)


def test_a_drafter_is_trusted_as_far_as_its_word_was_good_in_the_requests_namespace():
    drafter = Priced(DraftTree.chain([5, 6], [0.8, 0.8]))
    fused = FusedCandidates([Scripted(DraftTree.empty())], drafter=drafter, threshold=9.0, calibrator=Calibrator())
    for name, namespace, following in (("a", "good", [5, 6, 9]), ("b", "bad", [8])):
        fused.assign(name, namespace)
        fused.start(name, np.array([7]))
        fused.price(LevelPrice(0.1, 0.0, 0.1))
        for _ in range(100):
            fused.propose([name], [8])
            fused.observe(name, np.array(following))
    for names, least, most in ((["a"], 1.1, 1.3), (["b"], 0.0, 0.4), (["a", "b"], 0.5, 0.9)):
        fused.propose(names, [8] * len(names))
        assert least < drafter.prices[-1].trust < most
