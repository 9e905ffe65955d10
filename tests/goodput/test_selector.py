"""Length policies, by themselves and in a generation."""

import numpy as np
import pytest
import torch

import hf_smartspec
from hf_smartspec import DraftModelCandidates, DraftTree, FixedLength, LengthPolicy, NoSpeculation, SmartSpecConfig

from ..cases import left_padded
from ..models import noisy_model, shared_model
from ..sources import Recording, random_tree

INPUTS = left_padded([[5, 9, 5, 9, 5], [11], [3, 4, 5, 6, 7, 3, 4]])


@pytest.mark.parametrize("num_nodes", [0, 1, 5])
def test_fixed_length_asks_for_as_many_nodes_as_it_keeps(num_nodes):
    policy = FixedLength(num_nodes)
    assert policy.max_nodes(3) == [num_nodes] * 3
    rng = np.random.default_rng(0)
    trees = [random_tree(rng, size) for size in (0, 3, 9)]
    kept = policy.select(trees)
    assert [len(tree) for tree in kept] == [min(num_nodes, len(tree)) for tree in trees]
    for tree, part in zip(trees, kept):
        assert part.path_probs.sum() == pytest.approx(tree.most_likely(num_nodes).path_probs.sum())


def test_no_speculation_asks_for_nothing():
    policy = NoSpeculation()
    assert policy.max_nodes(2) == [0, 0]
    assert [len(tree) for tree in policy.select([DraftTree.chain([1]), DraftTree.empty()])] == [0, 0]


@pytest.mark.parametrize("num_nodes", [-1, 1.5, "3", None])
def test_bad_lengths_are_refused(num_nodes):
    with pytest.raises(ValueError, match="num_nodes"):
        FixedLength(num_nodes)


class Uneven(LengthPolicy):
    """A different length for every row; of the drafts, it keeps every other tree."""

    def __init__(self):
        self.asked: list[list[int]] = []
        self.given: list[list[int]] = []

    def max_nodes(self, num_rows):
        self.asked.append([2 * row for row in range(num_rows)])
        return self.asked[-1]

    def select(self, trees):
        self.given.append([len(tree) for tree in trees])
        return [tree if index % 2 == 0 else DraftTree.empty() for index, tree in enumerate(trees)]


def generate(policy, **arguments):
    model = shared_model("llama")
    source = Recording(DraftModelCandidates(noisy_model("llama")))
    with hf_smartspec.enabled(model):
        output = model.generate(
            **INPUTS,
            max_new_tokens=15,
            assistant=SmartSpecConfig(source, policy=policy),
            return_dict_in_generate=True,
            **arguments,
        )
    assert torch.equal(output.sequences, model.generate(**INPUTS, max_new_tokens=15))
    return output.statistics, source


def test_the_engine_does_what_the_policy_says():
    policy = Uneven()
    statistics, source = generate(policy)
    assert policy.asked[0] == [0, 2, 4]
    assert policy.given[0] == [0, 2, 4], "the draft model drafts as many nodes as it may"
    assert all(given <= asked for step in zip(policy.given, policy.asked) for given, asked in zip(*step))
    assert source.drafted == sum(map(sum, policy.given))
    assert 0 < statistics.drafted_tokens < source.drafted, "what was not selected is not verified"
    assert statistics.accepted_tokens > 0


def test_no_speculation_runs_the_source_not_at_all():
    statistics, source = generate(NoSpeculation())
    assert source.num_asked == statistics.drafted_tokens == 0
    assert statistics.steps == statistics.generated_tokens == 45


@pytest.mark.parametrize("num_nodes", [1, 3, 7])
def test_fixed_length_bounds_what_is_verified(num_nodes):
    statistics, source = generate(FixedLength(num_nodes))
    assert 0 < statistics.drafted_tokens <= num_nodes * statistics.steps
    assert source.drafted >= statistics.drafted_tokens


def test_a_policy_that_loses_rows_is_an_error():
    class Losing(FixedLength):
        def select(self, trees):
            return super().select(trees)[:-1]

    with pytest.raises(ValueError, match="Losing selected 2 trees for 3 rows"):
        generate(Losing(3))
