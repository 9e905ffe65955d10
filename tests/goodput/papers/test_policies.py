"""The papers' policies."""

import numpy as np
import pytest

from hf_smartspec import DraftTree
from hf_smartspec.goodput import (
    BatchLookupTable,
    CostModel,
    DraftCost,
    FixedLength,
    GoodputAuction,
    NoSpeculation,
    Oracle,
    PowerLaw,
    PrefillGate,
    RandomLength,
    RequestGoodput,
    Stage,
    StepGoodput,
    StepRows,
    correct_lengths,
)

from ..simulation import Drafter, line, simulate


def rows_of(num, cap=8, context=0, **arguments):
    return StepRows(list(range(num)), np.full(num, context), np.full(num, cap), **arguments)


def asked(policy, rows):
    """The nodes that the only stage is asked for."""
    return policy.max_nodes(rows, rows.stages[0], [DraftTree.empty()] * len(rows))


@pytest.mark.parametrize(
    "policy", [BatchLookupTable({1: 3}), StepGoodput(line(), max_length=3), RequestGoodput(line(), max_length=3)]
)
def test_drafts_of_two_stages_are_no_longer_than_those_of_one(policy):
    caps = np.array([8])
    rows = rows_of(1, stages=[Stage(DraftCost(source=name), caps, position) for position, name in enumerate("ab")])
    trees = [DraftTree.empty()]
    for stage in rows.stages:
        stage.asked = np.asarray(policy.max_nodes(rows, stage, trees))
    assert [stage.asked.tolist() for stage in rows.stages] == [[3], [3]]
    joined = DraftTree(np.arange(6), np.array([-1, 0, 1, -1, 3, 4]), np.full(6, 0.5, np.float32))
    assert len(policy.select(rows, [joined])[0]) == 3


# --- Su et al.'s look-up table ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("batch_size", "length"), [(1, 6), (2, 4), (3, 3), (4, 3), (5, 1), (7, 1), (8, 1), (9, 1), (16, 2), (99, 2)]
)
def test_between_profiled_batch_sizes_the_smaller_length_is_taken(batch_size, length):
    table = BatchLookupTable({8: 1, 1: 6, 2: 4, 4: 3, 16: 2})
    assert table.length(batch_size) == length
    assert asked(table, rows_of(batch_size, cap=5)).tolist() == [min(length, 5)] * batch_size


def test_profiling_takes_the_fastest_length_at_powers_of_two():
    asked = []

    def seconds_per_token(batch_size, length):
        asked.append((batch_size, length))
        return abs(length - 8 / batch_size)

    table = BatchLookupTable.profiled(seconds_per_token, max_batch_size=20, max_length=8)
    assert table.lengths == {1: 8, 2: 4, 4: 2, 8: 1, 16: 0}
    assert len(asked) == 5 * 9


def test_equation_4_is_the_mean_of_what_is_correct_up_to_each_length():
    found = correct_lengths([0, 3, 1, 80], 5)
    assert found.tolist() == [np.mean([min(number, s) for number in (0, 3, 1, 80)]) for s in range(1, 6)]
    with pytest.raises(ValueError, match="at least one draft"):
        correct_lengths([], 5)


def test_the_modelled_table_falls_with_the_batch_size():
    table = BatchLookupTable.modelled(line(), PowerLaw(0.9, 0.548), mean_context=200, max_batch_size=64)
    lengths = [table.lengths[size] for size in (1, 2, 4, 8, 16, 32, 64)]
    assert lengths == sorted(lengths, reverse=True) and lengths[0] > 3 and lengths[-1] < 2


@pytest.mark.parametrize("lengths", [{}, {0: 1}, {1: -1}])
def test_bad_tables_are_refused(lengths):
    with pytest.raises(ValueError, match="lengths"):
        BatchLookupTable(lengths)


def test_random_lengths_are_any_of_any_row():
    """SmartSpec, Figure 14: "random all"."""
    policy = RandomLength(3, seed=1)
    found = np.concatenate([asked(policy, rows_of(50)) for _ in range(20)])
    assert set(found.tolist()) == {0, 1, 2, 3} and np.bincount(found).min() > 200
    with pytest.raises(ValueError, match="max_length"):
        RandomLength(-1)


# --- Oracle -----------------------------------------------------------------------------------------------------------


def test_the_oracle_verifies_what_will_be_accepted():
    tree = DraftTree(np.array([1, 5, 2, 6, 3]), np.array([-1, -1, 0, 0, 2]), np.full(5, 0.1, np.float32))
    chain = DraftTree.chain([9, 9])
    policy = Oracle(line(), {0: np.array([1, 2, 4]), 1: np.array([8])}.get)
    kept = policy.select(rows_of(2), [tree, chain])
    assert kept[0].tokens.tolist() == [1, 2] and len(kept[1]) == 0
    dear = Oracle(CostModel(0, 1.0, 0.0, knots=(1, 3, 4, 9), curve=(1, 1, 9, 9)), {0: np.array([1, 2, 3, 4])}.get)
    assert len(dear.select(rows_of(1), [DraftTree.chain([1, 2, 3, 4])])[0]) == 2, "a third one costs too much"


# --- Draft models -----------------------------------------------------------------------------------------------------


def test_the_prefill_gate_closes_when_nothing_is_proposed_and_opens_again():
    gate = PrefillGate(window=32, retry=8, group=2)
    assert gate.admits("first")
    for _ in range(100):
        gate.observe(["first"], [0])
    admitted = [gate.admits(name) for name in range(16)]
    assert [name for name in range(16) if admitted[name]] == [5, 6, 13, 14], "two in eight, together"
    refused = [name for name in range(16) if not admitted[name]]
    assert gate._refused == set(refused)
    for _ in range(100):
        gate.observe([refused[0], "first"], [0, 3])  # refused ones do not count
    assert gate.idle_share < 0.1 and gate.admits("next")
    gate.forget(refused[0])
    assert gate._refused == set(refused[1:])


def test_the_prefill_gate_stays_open_at_the_threshold():
    gate = PrefillGate(threshold=0.7)
    for step in range(300):
        gate.observe(["a"], [int(step % 3 == 0)])
    assert 0.6 < gate.idle_share < 0.7 and gate.admits("b")


def test_the_prefill_gate_counts_steps_however_many_rows_they_have():
    """A full batch that pauses for a few steps has not given up."""
    gate = PrefillGate()
    rows = list(range(32))
    for _ in range(60):
        gate.observe(rows, [2] * 32)
    for _ in range(40):
        gate.observe(rows, [0] * 32)
    assert gate.idle_share == pytest.approx(0.59, abs=0.01) and gate.admits("next")
    gate.observe([], [])
    assert gate.idle_share == pytest.approx(0.59, abs=0.01), "a step without drafting rows says nothing"


@pytest.mark.parametrize("arguments", [{"threshold": 2}, {"window": 0}, {"retry": 0}, {"group": 0}, {"group": 65}])
def test_bad_gates_are_refused(arguments):
    with pytest.raises(ValueError, match=next(iter(arguments))):
        PrefillGate(**arguments)


def test_all_policies_run_the_same_loop():
    drafters = [Drafter(0.8)] * 2
    policies = [NoSpeculation(), FixedLength(2), BatchLookupTable({1: 3}), StepGoodput(line()), RequestGoodput(line())]
    for policy in [*policies, GoodputAuction(line())]:
        totals = simulate(policy, drafters, line(), steps=30)
        assert totals.tokens >= 60 and (totals.verified > 0) != isinstance(policy, NoSpeculation)


def test_a_policy_may_serve_two_steps_at_once():
    """Threads may share one: the shapes of a step are its own."""
    policy = RandomLength(max_length=7, seed=1)
    one, other = rows_of(3), rows_of(5)
    first = asked(policy, one).tolist()
    asked(policy, other)
    trees = [DraftTree.chain(list(range(7)), [0.5] * 7)] * 3
    assert [len(tree) for tree in policy.select(one, trees)] == first == asked(policy, one).tolist()
