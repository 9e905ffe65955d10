"""Draft trees against definitions written out node by node."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from hf_smartspec import DraftTree
from hf_smartspec.drafts.tree import check_trees

from ..strategies import path_to, trees


def tree_of(tokens, parents, probs=None) -> DraftTree:
    probs = np.ones(len(tokens)) if probs is None else probs
    return DraftTree(np.array(tokens, np.int64), np.array(parents, np.int64), np.array(probs, np.float32))


#        (5: .5) -- (7: .5) -- (9: 1)
# root <                  \
#        (6: .4)           (8: .2)       nodes in the order 5, 6, 7, 8, 9; 8 is a child of 5
EXAMPLE = tree_of([5, 6, 7, 8, 9], [-1, -1, 0, 0, 2], [0.5, 0.4, 0.5, 0.2, 1.0])


def test_depths_and_path_probs_of_a_small_tree():
    assert EXAMPLE.depths.tolist() == [1, 1, 2, 2, 3]
    np.testing.assert_allclose(EXAMPLE.path_probs, [0.5, 0.4, 0.25, 0.1, 0.25])


@given(trees())
def test_derived_arrays_follow_the_path_of_every_node(tree):
    for node in range(len(tree)):
        path = path_to(tree, node)
        assert tree.depths[node] == len(path)
        expected = np.prod(tree.probs[path], dtype=np.float64)
        np.testing.assert_allclose(tree.path_probs[node], expected, rtol=1e-5, atol=1e-43)  # float32 rounds to 1.4e-45


@given(trees())
def test_a_chain_is_recognised_by_its_parents(tree):
    assert tree.is_chain == (tree.parents.tolist() == list(range(-1, len(tree) - 1)))


@given(trees(), st.integers(0, 3))
def test_child_finds_the_first_of_equal_siblings_and_no_other_node(tree, token):
    for parent in range(-1, len(tree)):
        same = [node for node in range(len(tree)) if tree.parents[node] == parent and tree.tokens[node] == token]
        assert tree.child(parent, token) == (same[0] if same else None)


@given(trees(), st.lists(st.integers(0, 3), max_size=4))
def test_within_keeps_the_likeliest_children_of_every_node(tree, widths):
    kept, expected = tree.within(widths), {-1}
    for node in range(len(tree)):
        siblings = [other for other in range(len(tree)) if tree.parents[other] == tree.parents[node]]
        rank = sorted(siblings, key=lambda other: -tree.probs[other]).index(node)
        depth = int(tree.depths[node]) - 1
        if tree.parents[node] in expected and depth < len(widths) and rank < widths[depth]:
            expected.add(node)
    nodes = sorted(expected - {-1})
    assert kept.tokens.tolist() == tree.tokens[nodes].tolist() and kept.probs.tolist() == tree.probs[nodes].tolist()
    assert kept.depths.tolist() == tree.depths[nodes].tolist()
    assert tree.within([1] * len(tree)).tokens.tolist() == tree.best_chain().tokens.tolist()


@given(trees(), st.data())
def test_keep_preserves_every_kept_path(tree, data):
    lengths = np.array(data.draw(st.lists(st.integers(0, 9), min_size=len(tree), max_size=len(tree))), np.int64)
    tree = replace(tree, match_lengths=lengths)
    wanted = data.draw(st.sets(st.integers(0, len(tree) - 1)) if len(tree) else st.just(set()))
    nodes = np.zeros(len(tree), bool)
    for node in wanted:
        nodes[path_to(tree, node)] = True
    kept = tree.keep(nodes)
    kept.check_integrity(vocab_size=4)
    originals = np.flatnonzero(nodes)
    assert len(kept) == len(originals)
    for node, original in enumerate(originals):
        assert kept.tokens[path_to(kept, node)].tolist() == tree.tokens[path_to(tree, original)].tolist()
        assert kept.probs[node] == tree.probs[original]
    assert kept.match_lengths.tolist() == lengths[nodes].tolist()


def test_one_match_length_serves_all_nodes():
    tree = DraftTree.chain([1, 2, 3], match_lengths=5)
    tree.check_integrity(vocab_size=4)
    assert tree.most_likely(2).match_lengths == 5 and EXAMPLE.best_chain().match_lengths == 0


def test_keep_takes_the_draft_distributions_along():
    chain = DraftTree.chain([3, 1, 2], distributions=torch.eye(4)[[3, 1, 2]])
    kept = chain.keep(np.array([True, True, False]))
    assert kept.distributions.argmax(dim=-1).tolist() == kept.tokens.tolist() == [3, 1]


@given(trees(), st.integers(0, 8))
def test_most_likely_is_the_best_tree_of_its_size(tree, num_nodes):
    """Against all node sets that are closed under parents: none of that size promises more accepted tokens."""
    best = tree.most_likely(num_nodes)
    best.check_integrity(vocab_size=4)
    assert len(best) == min(num_nodes, len(tree))
    closed = [
        np.flatnonzero(chosen)
        for chosen in product([False, True], repeat=len(tree))
        if sum(chosen) == len(best)
        and all(tree.parents[node] < 0 or chosen[tree.parents[node]] for node in np.flatnonzero(chosen))
    ]
    expected = max(float(tree.path_probs[list(nodes)].sum()) for nodes in closed)
    np.testing.assert_allclose(best.path_probs.sum(), expected, rtol=1e-5, atol=1e-30)


@given(trees(), st.integers(0, 8))
def test_most_likely_keeps_paths_that_were_there(tree, num_nodes):
    best = tree.most_likely(num_nodes)
    paths = [tree.tokens[path_to(tree, node)].tolist() for node in range(len(tree))]
    for node in range(len(best)):
        assert best.tokens[path_to(best, node)].tolist() in paths


def test_most_likely_keeps_parents_whose_probability_is_rounded_above_one():
    """exp(x - logsumexp) may come out as 1 + 1e-7; a child must not then outrank its parent."""
    tree = tree_of([1, 2, 3], [-1, 0, -1], [0.5, 1.0000001, 0.2])
    assert tree.probs[0] * tree.probs[1] > tree.probs[0], "the example must show the problem"
    assert tree.most_likely(1).tokens.tolist() == [1]


@given(trees())
def test_best_chain_takes_the_most_probable_child_at_every_node(tree):
    chain = tree.best_chain()
    assert chain.is_chain
    node = -1
    for token, prob in zip(chain.tokens, chain.probs):
        children = np.flatnonzero(tree.parents == node)
        assert prob == tree.probs[children].max()
        node = next(child for child in children if tree.tokens[child] == token and tree.probs[child] == prob)
    if len(set(tree.probs.tolist())) == len(tree):  # without equal probabilities the end is unique as well
        assert not (tree.parents == node).any()


def test_chain_has_probability_one_where_none_is_given():
    assert DraftTree.chain([4, 5]).probs.tolist() == [1, 1]
    assert DraftTree.chain([4, 5]).parents.tolist() == [-1, 0]
    assert DraftTree.chain(np.array([4]), [0.25]).path_probs.tolist() == [0.25]


def test_empty_tree_has_all_properties():
    empty = DraftTree.empty()
    assert len(empty) == 0 and empty.is_chain and empty.child(-1, 0) is None
    assert empty.depths.tolist() == empty.path_probs.tolist() == []
    assert len(empty.most_likely(3)) == len(empty.best_chain()) == 0
    empty.check_integrity(vocab_size=1)


@pytest.mark.parametrize(
    ("tree", "match"),
    [
        (tree_of([1, 2], [1, -1]), "parent"),  # child before parent
        (tree_of([1, 2], [-1, 1]), "parent"),  # its own parent
        (tree_of([1], [-2]), "parent"),
        (tree_of([10], [-1]), "10"),  # no such token
        (tree_of([-1], [-1]), "-1"),
        (DraftTree(np.array([1, 2]), np.array([-1]), np.ones(2)), "array of"),
        (DraftTree(np.array([1]), np.array([-1]), np.ones(2)), "array of"),
        (DraftTree(np.array([1.0]), np.array([-1]), np.ones(1)), "integers"),
        (DraftTree(np.array([1]), np.array([-1.0]), np.ones(1)), "integers"),
        (DraftTree.chain([1, 2], match_lengths=np.array([3])), "`match_lengths` .* array of 2 integers"),
        (DraftTree.chain([1, 2], match_lengths=None), "`match_lengths` .* got NoneType"),
    ],
)
def test_check_integrity_refuses_what_is_no_tree(tree, match):
    with pytest.raises(ValueError, match=match):
        tree.check_integrity(vocab_size=10)
    sound = DraftTree.chain([1, 2])
    with pytest.raises(ValueError, match=match):
        check_trees([sound, DraftTree.empty(), tree, sound], vocab_size=10)
    with pytest.raises(ValueError, match=match):
        check_trees([*[sound] * 5, tree], vocab_size=10)


@given(trees())
def test_check_integrity_accepts_every_tree(tree):
    assume(len(tree))
    tree.check_integrity(vocab_size=4)
    with pytest.raises(ValueError, match="tokens"):
        tree.check_integrity(vocab_size=int(tree.tokens.max()))


@given(trees(max_size=9), st.lists(st.integers(0, 3), max_size=6))
def test_the_path_along_tokens_is_the_longest_that_holds_them(tree, tokens):
    path = tree.path_along(np.array(tokens, np.int64))
    assert tree.tokens[path].tolist() == tokens[: len(path)]
    assert tree.parents[path].tolist() == [-1, *path][: len(path)]
    if len(path) < len(tokens):
        assert tree.child(path[-1] if path else -1, tokens[len(path)]) is None


@given(trees(max_size=9))
def test_other_probabilities_change_nothing_else(tree):
    before = tree.path_probs.copy()
    other = tree.with_probs(np.full(len(tree), 0.5, np.float32))
    assert other.path_probs.tolist() == pytest.approx((0.5**tree.depths).tolist())
    assert other.tokens is tree.tokens and other.parents is tree.parents and tree.path_probs.tolist() == before.tolist()


@given(st.lists(trees(), min_size=5, max_size=8))
def test_trees_that_are_in_order_are_passed_at_once(drafts):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DraftTree, "check_integrity", lambda *_: pytest.fail("looked at one by one"))
        check_trees([*drafts, DraftTree.empty()], vocab_size=4)
