"""Sources that cost nothing by the level: where nodes are cheap, they propose what otherwise would not be worth it."""

import numpy as np
import pytest

from hf_smartspec import DraftTree, SuffixTreeCandidates
from hf_smartspec.candidates.combined.fused.source import FusedCandidates
from hf_smartspec.drafts.price import LevelPrice

from .combined.fused.test_source import Scripted


def of_node(node, trust=1.0):
    return LevelPrice(0.0, 0.0, node, trust)


def uncertain(**options):
    """Knows texts in which much may follow every token, some of it often and some rarely."""
    source, rng = SuffixTreeCandidates(max_bytes=2**20, **options), np.random.default_rng(0)
    source.add_outputs(list(rng.choice(6, (20, 60), p=[0.4, 0.25, 0.15, 0.1, 0.06, 0.04])), progress=False)
    source.start("a", np.array([0, 1]))
    return source


def draft(source, price, limit=10**6):
    return source.propose(["a"], [limit], price=price)[0]


def test_the_cheaper_nodes_are_the_more_are_proposed_and_all_are_worth_it():
    source, sizes = uncertain(), []
    for node in (0.1, 0.05, 0.02, 0.01):
        tree = draft(source, of_node(node))
        assert (tree.path_probs >= node - 1e-6).all()
        sizes.append(len(tree))
    assert 0 < sizes[0] < sizes[1] < sizes[2] < sizes[3]
    assert source.default_num_nodes < sizes[3] <= source.most_nodes == 63


@pytest.mark.parametrize("price", [None, of_node(0.1), of_node(0.7), of_node(float("inf"))])
def test_dear_nodes_leave_drafts_as_usual_so_that_there_is_something_to_learn_from(price):
    source = uncertain()
    usual = source.propose(["a"], [16])[0]
    assert len(draft(source, of_node(0.01))) > len(usual) > 0
    assert draft(source, price).tokens.tolist() == usual.tokens.tolist()


def test_sources_that_are_trusted_less_need_to_promise_more():
    source = uncertain()
    assert draft(source, of_node(0.02, trust=0.5)).tokens.tolist() == draft(source, of_node(0.04)).tokens.tolist()
    assert len(draft(source, of_node(0.02))) > len(draft(source, of_node(0.02, trust=0.5)))


def test_what_the_caller_says_holds_at_any_price():
    named = uncertain(min_probability=0.1)
    assert not named.heeds_prices and named.most_nodes == named.default_num_nodes == 16
    tree = draft(named, of_node(0.01))
    assert len(tree) and (tree.path_probs >= 0.1 - 1e-6).all()
    few = uncertain(num_nodes=4)
    assert few.most_nodes == few.default_num_nodes == 4
    counted = SuffixTreeCandidates(max_bytes=2**20, scoring="counts")
    assert not counted.heeds_prices and counted.most_nodes == 16, "its scores are no probabilities"


def test_lists_pass_the_price_on_and_go_by_it_themselves():
    fused = FusedCandidates([uncertain()])
    fused.start("b", np.array([0, 1]))
    sizes = []
    for node in (0.05, 0.02, 0.01):
        tree = fused.propose(["b"], [63], of_node(node))[0]
        assert (tree.path_probs >= node - 1e-6).all()
        sizes.append(len(tree))
    assert 0 < sizes[0] < sizes[1] <= sizes[2]
    assert 0 < len(fused.propose(["b"], [63])[0]) <= sizes[0]
    named = FusedCandidates([uncertain()], min_probability=0.05)
    named.start("b", np.array([0, 1]))
    tree = named.propose(["b"], [63], of_node(0.01))[0]
    assert len(tree) and (tree.path_probs >= 0.05 - 1e-6).all()


class Priced(Scripted):
    """Notes its prices and what it is asked for."""

    heeds_prices, most_nodes = True, 24

    def __init__(self, tree):
        super().__init__(tree)
        self.prices, self.asked = [], []

    def propose(self, request_ids, max_nodes, price=None):
        self.prices.append(price)
        self.asked.append(list(max_nodes))
        return super().propose(request_ids, max_nodes)


def test_a_source_of_a_list_that_fails_at_a_price_leaves_the_others():
    class Bad(Priced):
        def propose(self, request_ids, max_nodes, price=None):
            raise ValueError("knows no prices")

    fused = FusedCandidates([Scripted(DraftTree.chain([1])), Bad(DraftTree.chain([2]))])
    fused.start("a", np.array([0]))
    assert fused.propose(["a"], [8], of_node(0.01))[0].tokens.tolist() == [1]


def test_autoregressive_sources_of_a_list_are_told_no_price_and_draft_as_much_as_usual():
    inner = Priced(DraftTree.chain([1]))
    inner.is_autoregressive = True
    fused = FusedCandidates([inner, Scripted(DraftTree.chain([2]))])
    fused.start("a", np.array([7]))
    for price in (None, of_node(0.1), None):
        fused.propose(["a"], [30], price)
    assert inner.asked == [[5]] * 3 and not any(inner.prices)


def test_sources_in_lists_that_go_by_no_price_propose_as_many_nodes_as_usual():
    chain = DraftTree.chain(range(1, 31), [0.99] * 30)
    fused = FusedCandidates([Scripted(chain), uncertain()])
    fused.start("a", np.array([2]))
    for price, most in ((None, 30), (of_node(0.01), Scripted.default_num_nodes)):
        tree = fused.propose(["a"], [63], price)[0]
        assert max(tree.tokens.tolist()) == most
