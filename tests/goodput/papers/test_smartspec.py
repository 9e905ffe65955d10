"""SmartSpec's policies against its algorithms, written out plainly."""

from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_smartspec import DraftTree
from hf_smartspec.goodput import (
    ConfidenceGoodput,
    CostModel,
    DraftCost,
    RequestGoodput,
    Stage,
    StepGoodput,
    StepOutcome,
    StepRows,
    StepSeconds,
    TreeGoodput,
    expected_length,
)

from ..simulation import Drafter, line, simulate
from .test_policies import asked, rows_of


class Known:
    """An acceptance estimator that knows."""

    def __init__(self, rates):
        self._rates = np.array(rates, float)

    @property
    def rate(self):
        return float(self._rates.mean())

    def rates(self, request_ids):
        return self._rates[list(request_ids)]

    def by_depth(self, num_depths):
        return self._rates[:num_depths]


def test_algorithm_1_and_2_on_an_example_worked_by_hand():
    # T = 1 + 0.25 N seconds, alpha 0.5, queue of 2, up to 2 nodes each. Goodput of n requests with k nodes:
    #   n = 1: k = 0: 1 / 1.25 = 0.8      k = 1: 1.5 / 1.5 = 1.0      k = 2: 1.75 / 1.75 = 1.0
    #   n = 2: k = 0: 2 / 1.5  = 1.333    k = 1: 3   / 2   = 1.5      k = 2: 3.5  / 2.5  = 1.4
    policy = StepGoodput(CostModel(0.0, 0.25, 1.0), max_length=2)
    policy.acceptance = Known([0.5])
    rows = rows_of(2)
    assert policy.plan(rows) == (2, 1, pytest.approx(1.5))
    assert policy.plan(rows_of(1)) == (1, 1, pytest.approx(1.0)), "of equals the shorter"
    assert asked(policy, rows).tolist() == [1, 1]
    # No room for two requests with a node each: lines 5 to 7 drop the candidate.
    assert policy.plan(rows, has_slots=lambda num, length: num * (length + 1) < 4) == (1, 1, pytest.approx(1.0))
    assert policy.plan(rows, has_slots=lambda num, length: False).num_requests == 0
    # Each draft level costs a second: then none pays.
    policy = StepGoodput(CostModel(0.0, 0.25, 1.0), max_length=2)
    policy.acceptance = Known([0.5])
    dear = rows_of(2, stages=[Stage(DraftCost(1.0, is_autoregressive=True), np.full(2, 8))])
    assert policy.plan(dear) == (2, 0, pytest.approx(2 / 1.5))


@given(st.lists(st.floats(0, 0.99), min_size=1, max_size=3), st.floats(0, 0.5), st.integers(0, 3))
def test_request_lengths_are_the_best_of_all(rates, gamma, cap):
    cost = CostModel(0.0, gamma, 1.0)
    policy = RequestGoodput(cost, max_length=3)
    policy.acceptance = Known(rates)
    rows = rows_of(len(rates), cap=cap)

    def goodput(lengths):
        tokens = expected_length(np.array(rates), np.array(lengths)).sum()  # Eq. 9
        return tokens / cost.seconds(0, len(rates) + sum(lengths))

    everything = np.stack(np.meshgrid(*[np.arange(min(cap, 3) + 1)] * len(rates)), -1).reshape(-1, len(rates))
    found = asked(policy, rows)
    assert (found <= cap).all()
    assert goodput(found) == pytest.approx(max(map(goodput, everything)), rel=1e-9)


@pytest.mark.parametrize("policy", [StepGoodput, RequestGoodput])
def test_moving_averages_find_the_length(policy):
    for accuracy, low, high in ((0.05, 0, 1), (0.9, 5, 8)):
        learner = policy(line())
        simulate(learner, [Drafter(accuracy)] * 2, line(), steps=200)
        assert low <= asked(learner, rows_of(2, context=200)).max() <= high
    simulate(learner, [Drafter(0.9)] * 2, line(), steps=2)
    for name in range(3):
        learner.forget(name)
    assert not learner.acceptance._requests
    assert len(asked(learner, rows_of(0))) == 0


# --- Depth, not nodes -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", [StepGoodput, RequestGoodput])
def test_lengths_are_depths_of_chains_also_where_the_source_drafts_trees(policy):
    """Algorithm 1, Top-1: k proposed tokens are a chain, whose expected length is Eq. 8."""
    policy = policy(CostModel(0.0, 1e-3, 1.0), max_length=3)
    policy.acceptance = Known([0.9])
    rows = rows_of(1)
    assert asked(policy, rows).tolist() == [3] and policy.price(rows, rows.stages[0]).widths == (1, 1, 1)
    #   5 - 7 - 8 - 9    and 6 beside 5, 4 beside 7
    tree = DraftTree(np.array([6, 5, 7, 4, 8, 9]), np.array([-1, -1, 1, 1, 2, 4]), np.array([0.3, 0.6, 0.5, 0.4, 1, 1]))
    assert policy.select(rows, [tree])[0].tokens.tolist() == [5, 7, 8]


# --- Equation 5 -------------------------------------------------------------------------------------------------------


@given(
    st.lists(st.tuples(st.integers(0, 900), st.floats(0, 0.98)), min_size=1, max_size=3), st.sampled_from([1, 20, 900])
)
def test_equation_5_sums_forwards_of_the_draft_over_its_steps(requests, share):
    """T_draft = sum over i of T_fwd(M, N_context(i), N_batched(i)); at each, the rows that propose so many tokens."""
    contexts, rates = map(list, zip(*requests))
    target, draft = CostModel(1e-6, 0.01, 1.0), CostModel(1e-5, 0.002, 0.02 / share)
    stages = [Stage(DraftCost(is_autoregressive=True), np.full(len(rates), 3))]
    rows = StepRows(list(range(len(rates))), np.array(contexts), np.full(len(rates), 3), stages=stages)

    def goodput(lengths, rates):
        lengths = np.array(lengths)
        draft_seconds = 0.0
        for step in range(lengths.max(initial=0)):
            running = lengths > step
            draft_seconds += float(draft.seconds(sum(np.array(contexts)[running] + step), running.sum()))
        size = rows.forward_size(lengths.sum(), 1 + lengths.max())
        return expected_length(np.array(rates), lengths).sum() / (target.seconds(*size) + draft_seconds)

    policy = StepGoodput(target, 3, draft)
    policy.acceptance = Known(rates)
    same = [policy.acceptance.rate] * len(rates)
    best = max(goodput([length] * len(rates), same) for length in range(4))
    assert goodput(asked(policy, rows), same) == pytest.approx(best, rel=1e-9)
    assert policy.plan(rows, least=len(rows)).goodput == pytest.approx(best, rel=1e-9)
    policy = RequestGoodput(target, 3, draft)
    policy.acceptance = Known(rates)
    assert policy.best(rows)[1] == pytest.approx(goodput(asked(policy, rows), rates), rel=1e-9)


def test_a_longer_context_makes_drafts_shorter():
    lengths = []
    for context in (0, 10_000, 100_000):
        policy = StepGoodput(CostModel(0.0, 1e-3, 1.0), 8, draft=CostModel(1e-5, 0.0, 1e-3))
        policy.acceptance = Known([0.8])
        rows = rows_of(1, context=context, stages=[Stage(DraftCost(is_autoregressive=True), np.array([8]))])
        lengths.append(int(asked(policy, rows)[0]))
    assert lengths[0] > lengths[1] > lengths[2]


# Seconds per call and row of the sources that requests may have, the second one without calls for levels.
SOURCES = DraftCost(0.02, 1e-3, True, source="large"), DraftCost(0.05, 0.0, source="text"), DraftCost(source="free")


@given(
    st.lists(st.tuples(st.integers(0, 2), st.floats(0, 0.98)), min_size=1, max_size=4), st.booleans(), st.integers(1, 4)
)
def test_every_row_s_own_source_takes_its_time(requests, is_profiled, num_running):
    """T_draft where requests have sources of their own, which draft one after the other (Eq. 4, 5)."""
    numbers, rates = map(np.array, zip(*requests))
    target, draft = CostModel(0.0, 0.01, 1.0), CostModel(1e-5, 0.002, 0.02) if is_profiled else None
    costs = [SOURCES[number] for number in numbers]
    stages = [Stage(cost, np.where([own is cost for own in costs], 3, 0)) for cost in dict.fromkeys(costs)]
    rows = StepRows(range(len(costs)), np.arange(len(costs)) * 100, np.full(len(costs), 3), stages=stages)

    def goodput(lengths, rates):
        seconds = target.seconds(*rows.first(len(lengths)).forward_size(sum(lengths), 1 + max(lengths)))
        for cost in dict.fromkeys(costs[: len(lengths)]):
            own = np.array([length if other is cost else 0 for other, length in zip(costs, lengths)])
            for level in range(max(own) if cost.is_autoregressive else min(max(own), 1)):
                running = own > level
                by_profile = is_profiled and cost.is_autoregressive
                context = sum(rows.context_lens[: len(own)][running] + level)
                known = cost.per_call + cost.per_row * running.sum()
                seconds += draft.seconds(context, running.sum()) if by_profile else known
        return expected_length(np.array(rates), np.array(lengths)).sum() / seconds

    policy = StepGoodput(target, 3, draft)
    policy.acceptance = Known(rates)
    some = rows.first(min(num_running, len(rows)))
    best = max(goodput([length] * len(some), [rates.mean()] * len(some)) for length in range(4))
    assert policy.best(some)[1] == pytest.approx(best, rel=1e-9)
    policy = RequestGoodput(target, 3, draft)
    policy.acceptance = Known(rates)
    shapes, found = policy.best(some)
    assert found == pytest.approx(goodput(list(map(len, shapes)), rates[: len(some)]), rel=1e-9)


def test_times_of_sources_are_learnt_apart():
    dear, cheap = DraftCost(2e-3, is_autoregressive=True, source="dear"), DraftCost(1e-4, source="cheap")
    for costs in ((dear, cheap), (cheap, dear)):
        policy = StepGoodput(line())
        simulate(policy, [Drafter(0.9, cost=cost) for cost in costs], line(), steps=20)
        for cost in costs:
            assert sum(policy.timers[cost.source].seconds(DraftCost())) == pytest.approx(cost.per_call, rel=0.1)


def test_the_drafts_profile_is_corrected_by_measured_drafts():
    """The online adaptor beside the offline profiler (section 6)."""
    draft = CostModel(0.0, 1e-4, 1e-3)
    policy = StepGoodput(line(), draft=draft)
    simulate(policy, [Drafter(0.9, cost=DraftCost(2e-3, 2e-4, is_autoregressive=True))] * 2, line(), steps=40)
    assert draft.seconds(0, 2) == pytest.approx(2 * 1.2e-3, rel=0.1)


# --- Algorithm 1 for trees --------------------------------------------------------------------------------------------


@given(st.lists(st.floats(0, 0.95), min_size=3, max_size=3), st.floats(1e-4, 0.5), st.integers(1, 4))
def test_algorithm_1_finds_the_best_number_of_tokens_for_each_head(rates, gamma, num_rows):
    """Lines 6 to 9, with the mended Eq. 10, and N_batched of full trees (section 4.3)."""
    cost = CostModel(0.0, gamma, 1.0)
    policy = TreeGoodput(cost, num_heads=3, max_width=3)
    policy.acceptance = Known(rates)
    rows = rows_of(num_rows, cap=99)

    def goodput(widths):
        length, reached, nodes, level = 1.0, 1.0, 0, 1
        for rate, width in zip(rates, widths):
            reached *= 1 - (1 - rate) ** width
            level *= width
            length, nodes = length + reached, nodes + level
        return num_rows * length / cost.seconds(0, num_rows * (1 + nodes))

    everything = [widths for depth in range(4) for widths in product((1, 2, 3), repeat=depth)]
    sizes = asked(policy, rows)
    found = policy.price(rows, rows.stages[0]).widths
    assert goodput(found) == pytest.approx(max(map(goodput, everything)), rel=1e-9)
    assert sizes.tolist() == [int(np.cumprod(found).sum())] * num_rows


@pytest.mark.parametrize("cap, largest", [(0, 0), (1, 1), (2, 2), (5, 4)])
def test_trees_of_which_no_row_has_room_for_all_gain_nothing(cap, largest):
    """Tokens are free here, so that the largest tree that fits is the best: of width 2, 1 + 1, 2 or 2 + 2 nodes."""
    policy = TreeGoodput(CostModel(0.0, 0.0, 1.0), num_heads=2, max_width=2)
    policy.acceptance = Known([0.9, 0.1])
    rows = rows_of(3, cap=cap)
    policy.max_nodes(rows, rows.stages[0], [])
    shape = policy.price(rows, rows.stages[0]).widths
    assert int(np.cumprod(shape).sum()) == largest if shape else largest == 0


def test_rates_of_heads_are_those_of_equation_10():
    """Each of a head's tokens is right with probability alpha, whatever the head's width."""
    rng, policy = np.random.default_rng(0), TreeGoodput(line(), num_heads=2, max_width=3)
    alphas, probs = (0.6, 0.3), [0.5, 0.4, 0.1]
    for widths in [(3, 2), (1, 1), (2, 3)] * 300:
        parents = [-1] * widths[0] + [node for node in range(widths[0]) for _ in range(widths[1])]
        ranks = [*range(widths[0]), *list(range(widths[1])) * widths[0]]
        tree = DraftTree(np.array(ranks), np.array(parents), np.array([probs[rank] for rank in ranks], np.float32))
        tokens = []
        for alpha, width in zip(alphas, widths):
            hits = rng.random(width) < alpha
            tokens.append(int(hits.argmax()) if hits.any() else 9)
            if not hits.any():
                break
        accepted = len(tree.path_along(np.array(tokens)))
        rows = rows_of(1)
        policy.observe(StepOutcome(rows, [tree], [tree], [accepted], StepSeconds(0.0, 1.0), [np.array([*tokens, 9])]))
    assert policy.acceptance.by_depth(2) == pytest.approx(alphas, abs=0.06)


# --- Algorithm 3 ------------------------------------------------------------------------------------------------------


@given(
    st.lists(st.lists(st.floats(0.01, 1.0), max_size=3), min_size=1, max_size=3), st.floats(0, 0.5), st.floats(0, 1.0)
)
def test_algorithm_3_verifies_the_lengths_of_the_highest_goodput(confidences, gamma, drafting):
    """Line 13: of the drafts as they are, with confidences as probabilities (section 4.4), all lengths are explored."""
    cost = CostModel(0.0, gamma, 1.0)
    policy = ConfidenceGoodput(cost, threshold=0.3, max_length=3)
    rows = rows_of(len(confidences))
    assert asked(policy, rows).tolist() == [3] * len(rows)
    price = policy.price(rows, rows.stages[0])
    assert price.widths == (1, 1, 1) and price.confidence == 0.3
    rows.stages[0].seconds = drafting
    chains = [DraftTree.chain(range(len(line)), line) for line in confidences]

    def goodput(lengths):
        tokens = sum(1 + sum(np.cumprod(np.float32(line))[:num]) for line, num in zip(confidences, lengths))
        return tokens / (cost.seconds(0, len(rows) + sum(lengths)) + drafting)

    found = [len(tree) for tree in policy.select(rows, chains)]
    best = max(map(goodput, product(*[range(len(line) + 1) for line in confidences])))
    assert goodput(found) == pytest.approx(best, rel=1e-6)


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda: StepGoodput(line(), -1), "max_length"), (lambda: RequestGoodput(line(), 2.5), "max_length"),
        (lambda: TreeGoodput(line(), num_heads=True), "num_heads"), (lambda: TreeGoodput(line(), 2, -1), "max_width"),
        (lambda: TreeGoodput(line(), 8, 8), "over 4096 trees"),
        (lambda: ConfidenceGoodput(line(), 1.0), "threshold"), (lambda: ConfidenceGoodput(line(), 0, -1), "max_length"),
    ],
)  # fmt: skip
def test_bad_numbers_are_refused(make, name):
    with pytest.raises(ValueError, match=name):
        make()
