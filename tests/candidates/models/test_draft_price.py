"""How many nodes and levels a draft model drafts where they have prices."""

import numpy as np
import pytest

from hf_smartspec import DraftModelCandidates
from hf_smartspec.drafts.price import LevelPrice
from hf_smartspec.goodput.papers.length import tree_size

from ...models import shared_model
from .checks import check_tree, count_forwards, look_at_the_end, next_scores, sharp_model, start


def test_what_drafts_have_promised_says_how_many_levels_come_next(monkeypatch):
    """Where nobody looks meanwhile: dear levels become few, cheap ones many, and none is drafted in vain for long."""
    look_at_the_end(monkeypatch)
    num_forwards = count_forwards(monkeypatch)
    settled = []
    for model in (shared_model("llama"), sharp_model()):  # of low probabilities, and of high ones
        for call in (0.01, 0.3, 5.0):
            source = DraftModelCandidates(model)
            texts = start(source)
            num_forwards.clear()
            for _ in range(8):
                tree = source.propose(["c"], [24], LevelPrice(call, 0.0, 0.02))[0]
                check_tree(model, tree, texts["c"], 4, 24)
                source.observe("c", tree.tokens[:1])
                texts["c"] += tree.tokens[:1].tolist()
            settled.append(num_forwards[-1])
    flat, sharp = settled[:3], settled[3:]
    assert flat == sorted(flat, reverse=True) and sharp == sorted(sharp, reverse=True)
    assert flat[-1] == sharp[-1] == 1 and sharp[0] > flat[0] > 1 and sharp[1] > flat[1]


def priced(model, price, limit=24, name="c", **options):
    source = DraftModelCandidates(model, **options)
    texts = start(source)
    return source.propose([name], [limit], price)[0], texts[name]


@pytest.mark.parametrize("options", [{}, {"width": 2}, {"num_nodes": 3}])
def test_where_prices_rule_no_node_is_worth_less_than_it_costs(options, way):
    """And none that is worth more was left out, as far as its level was drafted."""
    model = sharp_model()
    for node_price in (0.02, 0.1, 0.3):
        tree, text = priced(model, LevelPrice(0.05, 0.0, node_price), **options)
        width = options.get("width", 4)
        check_tree(model, tree, text, width, 24)
        first_of_levels = [np.flatnonzero(tree.depths == depth)[0] for depth in range(1, tree.depths.max() + 1)]
        others = np.setdiff1d(np.arange(len(tree)), first_of_levels)
        assert (tree.path_probs[others] >= node_price - 1e-6).all()
        probs = next_scores(model, text).softmax(0).sort(descending=True).values[:width]
        assert np.count_nonzero(tree.depths == 1) == max(int((probs >= node_price).sum()), 1)


def test_drafts_are_as_deep_as_levels_are_worth_their_price():
    model = sharp_model()
    depths = []
    for call in (0.001, 0.1, 0.3, 0.6, 5.0):
        tree, _ = priced(model, LevelPrice(call, 0.0, 0.01), limit=400)
        for depth in range(1, int(tree.depths.max())):
            assert np.sort(tree.path_probs[tree.depths == depth])[-4:].sum() > call
        depths.append(int(tree.depths.max()))
    assert depths == sorted(depths, reverse=True) and depths[0] > depths[2] > depths[-1] == 1
    shared = DraftModelCandidates(model)
    names = list(start(shared))
    trees = shared.propose(names, [24] * 3, LevelPrice(0.6, 0.0, 0.01))
    assert max(int(tree.depths.max()) for tree in trees) > depths[3], "they share the price"
    steps, _ = priced(model, LevelPrice(5.0, 0.0, 0.01, deeper=((0.0, 0.0), (0.0, 0.0), (5.0, 0.0))), limit=400)
    assert steps.depths.max() == 3, "every level has its own"


@pytest.mark.parametrize("trust", [0.5, 1.0, 1.5])
def test_a_drafter_that_is_trusted_more_drafts_more_and_always_trees(trust):
    model = sharp_model()
    tree, text = priced(model, LevelPrice(0.2, 0.0, 0.05, trust))
    check_tree(model, tree, text, 4, 24)
    usual, _ = priced(model, LevelPrice(0.2, 0.0, 0.05))
    assert (len(tree) >= len(usual)) if trust >= 1 else (len(tree) < len(usual))


def test_branches_end_behind_tokens_of_low_confidence_where_prices_rule(way):
    model = sharp_model()
    tree, text = priced(model, LevelPrice(0.0, 0.0, 0.01), confidence_threshold=0.5)
    check_tree(model, tree, text, 4, 24)
    inner = np.unique(tree.parents[tree.parents >= 0])
    assert (tree.probs[inner] >= 0.5).all()
    deeper, _ = priced(model, LevelPrice(0.0, 0.0, 0.01))
    assert (deeper.probs[deeper.parents[deeper.parents >= 0]] < 0.5).any(), "there is something to end"


def test_prices_of_one_step_are_forgotten_and_sampled_drafts_do_not_heed_them():
    model = shared_model("llama")
    source = DraftModelCandidates(model)
    start(source)
    assert len(source.propose(["a"], [6], LevelPrice(9.0, 9.0, 9.0))[0]) == 1
    source.observe("a", np.array([1]))
    assert len(source.propose(["a"], [6])[0]) == 6
    sampled = DraftModelCandidates(model, samples=True)
    start(sampled, seed=3)
    assert len(sampled.propose(["a"], [6], LevelPrice(9.0, 9.0, 9.0))[0]) == 6 and not sampled.heeds_prices


@pytest.mark.parametrize("widths", [(1, 1, 1, 1), (3, 2, 2), (2,)])
def test_drafts_have_the_shape_that_a_policy_fixes(widths, way):
    """SmartSpec, section 4.3: each of a level's tokens is followed by the k likeliest ones."""
    model = sharp_model()
    tree, text = priced(model, LevelPrice(0.0, 0.0, 0.0, widths=widths))
    check_tree(model, tree, text, max(widths), tree_size(widths))
    assert len(tree) == tree_size(widths)
    for parent in range(-1, len(tree)):
        depth = int(tree.depths[parent]) if parent >= 0 else 0
        children = np.flatnonzero(tree.parents == parent)
        assert len(children) == (widths[depth] if depth < len(widths) else 0)
    assert len(priced(model, LevelPrice(0.0, 0.0, 0.0, widths=widths), limit=1, width=3)[0]) == 1


def test_algorithm_3_goes_on_while_confidence_exceeds_the_threshold(way):
    model = sharp_model()
    whole, _ = priced(model, LevelPrice(0.0, 0.0, 0.0, widths=(1,) * 12))
    for threshold in sorted(float(prob) for prob in whole.probs[:6]):
        chain, _ = priced(model, LevelPrice(0.0, 0.0, 0.0, widths=(1,) * 12, confidence=threshold))
        low = whole.probs <= threshold
        assert chain.tokens.tolist() == whole.tokens[: int(low.argmax()) + 1 if low.any() else 12].tolist()
