"""The simplest length policies, and what a step's rows add up to."""

import numpy as np
import pytest

from hf_smartspec import DraftTree, FixedLength, NoSpeculation
from hf_smartspec.drafts.price import LevelPrice
from hf_smartspec.goodput import DraftCost, Stage, StepOutcome, StepRows, StepSeconds

from ..sources import random_tree


def rows_of(caps, **arguments):
    return StepRows(list(range(len(caps))), np.array([30, 10, 20][: len(caps)]), np.array(caps, int), **arguments)


def test_what_a_step_reads_and_runs():
    rows = rows_of([5, 5, 5], num_prefill_tokens=7)
    assert len(rows) == 3 and rows.num_context == 90, "padded to the longest"
    assert rows.num_batched == 10
    assert rows.forward_size(4, 3) == (90, 14, 3)
    rows = rows_of([5, 5, 5], num_prefill_tokens=7, prefill_context=10, prefill_pairs=70)
    assert rows.forward_size(4, 3) == (100, 14, 3.4), "what each column costs, on average"
    assert rows.without_prefill().forward_size(4, 3) == (90, 7, 3)
    empty = rows_of([])
    assert len(empty) == empty.num_context == empty.num_batched == 0


def test_rows_may_be_padded_apart():
    rows = rows_of([5, 5, 5], num_prefill_tokens=7, prefill_context=10, prefill_pairs=70, padded_context=70)
    assert rows.num_context == 70
    assert rows.forward_size(4, 3) == (80, 14, 3.5)
    assert rows.without_prefill().num_context == rows.first(3).num_context == 70
    assert rows.first(2).num_context == round(70 * 40 / 60), "their share"


@pytest.mark.parametrize("num_nodes", [0, 1, 5])
def test_fixed_length_asks_for_as_many_nodes_as_it_keeps(num_nodes):
    policy, rows = FixedLength(num_nodes), rows_of([9, 9, 3])
    nothing = [DraftTree.empty()] * 3
    assert policy.max_nodes(rows, rows.stages[0], nothing).tolist() == [num_nodes, num_nodes, min(num_nodes, 3)]
    rng = np.random.default_rng(0)
    trees = [random_tree(rng, size) for size in (0, 3, 9)]
    kept = policy.select(rows, trees)
    assert [len(tree) for tree in kept] == [min(num_nodes, len(tree)) for tree in trees]
    for tree, part in zip(trees, kept):
        assert part.path_probs.sum() == pytest.approx(tree.most_likely(num_nodes).path_probs.sum())


def test_a_number_that_was_named_is_asked_for_whatever_is_likely():
    rows, texts = rows_of([9]), Stage(DraftCost(heeds_prices=True), np.array([9]))
    assert FixedLength(4).price(rows, texts) == LevelPrice(0.0, 0.0, 0.0)
    assert FixedLength(4, is_usual=True).price(rows, texts) is None
    model = Stage(DraftCost(heeds_prices=True, is_autoregressive=True), np.array([9]))
    assert FixedLength(4).price(rows, model) is None, "its levels cost a forward each, and it drafts them all"


def test_no_speculation_asks_for_nothing():
    policy, rows = NoSpeculation(), rows_of([4, 4])
    assert policy.max_nodes(rows, rows.stages[0], [DraftTree.empty()] * 2).tolist() == [0, 0]
    assert [len(tree) for tree in policy.select(rows, [DraftTree.chain([1]), DraftTree.empty()])] == [0, 0]
    policy.observe(StepOutcome(rows, [], [], [], StepSeconds(0.0, 0.1)))
    policy.forget("unknown")


def test_a_later_stage_is_asked_where_the_trees_promise_at_most_its_threshold():
    little, much = DraftTree.chain([1, 2], [0.5, 0.5]), DraftTree.chain([1, 2], [0.9, 0.9])
    later = Stage(DraftCost(), np.array([9, 9, 2]), position=1, threshold=0.75)
    assert FixedLength(4).max_nodes(rows_of([9, 9, 2]), later, [little, much, little]).tolist() == [4, 0, 2]


@pytest.mark.parametrize("num_nodes", [-1, 1.5, "3", None])
def test_bad_lengths_are_refused(num_nodes):
    with pytest.raises(ValueError, match="num_nodes"):
        FixedLength(num_nodes)
