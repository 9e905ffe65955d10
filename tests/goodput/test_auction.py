"""The goodput auction: the optimum of one step."""

from itertools import product

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from hf_smartspec import DraftTree
from hf_smartspec.goodput import CostModel, GoodputAuction, StepOutcome, StepRows, StepSeconds

from ..strategies import path_to, trees
from .simulation import decide, line


def rows_of(trees_, context=100, **arguments):
    num = len(trees_)
    caps = np.array([len(tree) for tree in trees_], np.int64)
    return StepRows(list(range(num)), np.full(num, context), caps, **arguments)


def closed_subsets(tree):
    """Every set of nodes that holds its nodes' parents, as bool masks."""
    for bits in product([False, True], repeat=len(tree)):
        if all(not bit or parent < 0 or bits[parent] for bit, parent in zip(bits, tree.parents)):
            yield np.array(bits, bool)


def seconds_of(cost, rows, sizes):
    return float(cost.seconds(rows.num_context, len(rows) + sum(sizes), 1 + max(sizes)))


def profit_of(cost, rows, tokens, sizes, speedup=1.0):
    """Tokens, less those that the time yields elsewhere."""
    return tokens - speedup * len(rows) * seconds_of(cost, rows, sizes) / seconds_of(cost, rows, [0])


def best_profit(cost, rows, trees_):
    """By trying everything."""
    best = 0.0
    for masks in product(*(list(closed_subsets(tree)) for tree in trees_)):
        sizes = [int(mask.sum()) for mask in masks]
        tokens = len(rows) + sum(float(tree.path_probs[mask].sum()) for tree, mask in zip(trees_, masks))
        best = max(best, profit_of(cost, rows, tokens, sizes))
    return best


def expected_tokens(rows, kept):
    return len(rows) + sum(float(tree.path_probs.sum()) for tree in kept)


COSTS = st.one_of(
    st.builds(CostModel, st.just(1e-6), st.floats(0, 0.02), st.floats(1e-4, 0.02), st.sampled_from([0.0, 1e-6, 2e-5])),
    # Steps, as CUDA graphs make them: free up to 4 tokens, then dear, then free again.
    st.just(CostModel(0.0, 0.0, 0.0, knots=(1, 4, 5, 9), curve=(0.01, 0.01, 0.014, 0.014))),
)


@given(COSTS, st.lists(trees(max_size=4), min_size=1, max_size=3))
def test_selects_the_best_of_all_forests(cost, drafts):
    rows = rows_of(drafts)
    policy = GoodputAuction(cost, margin=0, calibrates=False)
    kept = policy.select(rows, drafts)
    tokens, sizes = expected_tokens(rows, kept), [len(tree) for tree in kept]
    assert profit_of(cost, rows, tokens, sizes) == pytest.approx(best_profit(cost, rows, drafts), rel=1e-6, abs=1e-6)
    assert policy.prediction.tokens == pytest.approx(tokens, rel=1e-5)
    assert policy.prediction.seconds == pytest.approx(seconds_of(cost, rows, sizes))


@given(COSTS, st.lists(trees(max_size=6), min_size=1, max_size=3))
def test_prompts_that_ride_along_change_nothing_where_tokens_cost_the_same_everywhere(cost, drafts):
    assume(not cost.knots)
    prompts = {"num_prefill_tokens": 500, "prefill_context": 700, "prefill_pairs": 350_000}
    alone, beside = rows_of(drafts), rows_of(drafts, **prompts)
    policies = [GoodputAuction(cost, calibrates=False) for _ in range(2)]
    kept = [policy.select(rows, drafts) for policy, rows in zip(policies, (alone, beside))]
    assert [len(tree) for tree in kept[0]] == [len(tree) for tree in kept[1]]
    assert policies[1].prediction.seconds > policies[0].prediction.seconds


@given(st.lists(trees(max_size=9), min_size=1, max_size=4), st.floats(0, 0.01), st.floats(0, 0.1))
def test_what_is_selected_are_parts_of_the_trees(drafts, gamma, margin):
    policy = GoodputAuction(CostModel(1e-6, gamma, 0.01), margin=margin)
    for tree, kept in zip(drafts, policy.select(rows_of(drafts), drafts)):
        kept.check_integrity(vocab_size=4)
        paths = [tuple(tree.tokens[path_to(tree, node)]) for node in range(len(tree))]
        found = [tuple(kept.tokens[path_to(kept, node)]) for node in range(len(kept))]
        assert all(found.count(path) <= paths.count(path) for path in found)


def test_certain_chains_stay_closed_though_all_their_nodes_are_worth_the_same():
    chain = DraftTree.chain(np.arange(40), np.full(40, 0.9999999))
    cost = CostModel(0, 0, 0, knots=(1, 50, 51, 200), curve=(0.1, 0.1, 10.0, 100.0))  # a wall behind 50 tokens
    kept = GoodputAuction(cost, calibrates=False).select(rows_of([chain] * 3), [chain] * 3)
    assert all(tree.is_chain for tree in kept) and sum(map(len, kept)) == 47


def test_speculates_less_as_the_batch_grows():
    chain = DraftTree.chain(np.arange(8), np.full(8, 0.8))
    policy, lengths = GoodputAuction(line(), calibrates=False), []
    for batch_size in (1, 8, 64):
        kept = policy.select(rows_of([chain] * batch_size), [chain] * batch_size)
        lengths.append(sum(map(len, kept)) / batch_size)
    assert lengths[0] > lengths[1] > lengths[2]


def test_where_all_rows_are_waited_for_the_last_one_drafts_most():
    chain, cost = DraftTree.chain(np.arange(8), np.full(8, 0.6)), line()
    kept = {}
    for name, remaining in {"apart": None, "alike": [90] * 8, "one late": [30, 30, 30, 90, 30, 30, 30, 30]}.items():
        rows = rows_of([chain] * 8, num_remaining=None if remaining is None else np.array(remaining))
        policy = GoodputAuction(cost, calibrates=False)
        kept[name] = [len(tree) for tree in policy.select(rows, [chain] * 8)]
        expected = 8 + sum((0.6 ** np.arange(1, num + 1)).sum() for num in kept[name])
        assert policy.prediction.tokens == pytest.approx(expected, rel=1e-5)
    assert kept["alike"] == kept["apart"]
    late = kept["one late"].pop(3)
    assert late > max(kept["apart"]) and max(kept["one late"]) < min(kept["apart"])


def test_a_gain_within_the_margin_is_none():
    chain = DraftTree.chain([1], [0.5])
    cost = CostModel(0, 0.0098, 0.0)  # (1 + 0.5) / (2 * 0.0098) against 1 / 0.0098
    cheap = CostModel(0, 0.001, 0.05)
    for model, margin, num in ((cost, 0.0, 0), (cheap, 0.01, 1), (cheap, 0.5, 0)):
        assert len(GoodputAuction(model, margin, calibrates=False).select(rows_of([chain]), [chain])[0]) == num


def test_poor_drafts_leave_the_time_to_steps_with_good_ones():
    """Between the marginal price of plain decoding and what speculation gains on the whole, drafts do not pay."""
    cost = CostModel(0, 1.0, 9.0)  # a node costs as much as a tenth of a token
    good, poor = DraftTree.chain(np.arange(8), np.full(8, 0.99)), DraftTree.chain([1], [0.15])
    policy = GoodputAuction(cost, calibrates=False)
    assert len(policy.select(rows_of([poor]), [poor])[0]) == 1
    for _ in range(100):
        rows = rows_of([good])
        kept = decide(policy, rows, [good])
        seconds = StepSeconds(0.0, 10.0 + len(kept[0]))
        policy.observe(StepOutcome(rows, [good], kept, [len(kept[0])], seconds, [good.tokens]))
    assert len(policy.select(rows_of([good]), [good])[0]) == 8
    kept = [policy.select(rows_of([poor]), [poor])[0] for _ in range(2)]  # first a trial: no step has had two tokens
    assert len(kept[1]) == 0


def test_caps_hold_against_sources_that_exceed_them():
    chain = DraftTree.chain(np.arange(9), np.full(9, 0.99))
    rows = StepRows([0, 1], np.array([5, 5]), np.array([3, 0]))
    kept = GoodputAuction(line(gamma=0)).select(rows, [chain, chain])
    assert [len(tree) for tree in kept] == [3, 0]


def test_steps_without_rows_or_drafts():
    policy = GoodputAuction(line())
    rows = StepRows([], np.zeros(0, int), np.zeros(0, int), num_prefill_tokens=50)
    assert len(policy.max_nodes(rows, rows.stages[0], [])) == 0 and policy.select(rows, []) == []
    policy.observe(StepOutcome(rows, [], [], [], StepSeconds(0.0, 0.1), []))
    rows = rows_of([DraftTree.empty()])
    assert policy.max_nodes(rows, rows.stages[0], [DraftTree.empty()]).tolist() == [0]
    assert [len(tree) for tree in policy.select(rows, [DraftTree.empty()])] == [0]


@pytest.mark.parametrize("margin", [-0.1, float("nan")])
def test_bad_margins_are_refused(margin):
    with pytest.raises(ValueError, match="margin"):
        GoodputAuction(line(), margin=margin)
