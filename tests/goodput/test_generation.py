"""Length policies in a generation: the loop does what they say, and tells them what came of it."""

import pytest
import torch

import hf_smartspec
from hf_smartspec import DraftModelCandidates, DraftTree, FixedLength, LengthPolicy, NoSpeculation, SmartSpecConfig
from hf_smartspec.goodput import GoodputAuction

from ..cases import left_padded
from ..models import noisy_model, shared_model
from ..sources import Recording
from .simulation import line

INPUTS = left_padded([[5, 9, 5, 9, 5], [11], [3, 4, 5, 6, 7, 3, 4]])


class Uneven(LengthPolicy):
    """A different length for every row; of the drafts, it keeps every other tree."""

    def __init__(self):
        self.asked: list[list[int]] = []
        self.given: list[list[int]] = []
        self.seen: list[tuple] = []

    def max_nodes(self, rows, stage, trees):
        self.asked.append([min(2 * row, cap) for row, cap in enumerate(stage.caps.tolist())])
        return self.asked[-1]

    def select(self, rows, trees):
        self.given.append([len(tree) for tree in trees])
        return [tree if index % 2 == 0 else DraftTree.empty() for index, tree in enumerate(trees)]

    def observe(self, outcome):
        self.seen.append(outcome[1:])


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


def test_the_loop_does_what_the_policy_says():
    policy = Uneven()
    statistics, source = generate(policy)
    assert policy.asked[0] == policy.given[0] == [0, 2, 4], "the draft model drafts as many nodes as it may"
    assert all(given <= asked for step in zip(policy.given, policy.asked) for given, asked in zip(*step))
    assert source.drafted >= sum(map(sum, policy.given)), "the loop may cut drafts at the end of a text"
    assert 0 < statistics.drafted_tokens < source.drafted, "what was not selected is not verified"
    assert statistics.accepted_tokens > 0


def test_the_policy_learns_what_came_of_it():
    policy = Uneven()
    statistics, _ = generate(policy)
    assert len(policy.seen) == len(policy.given)
    assert sum(sum(accepted) for _, _, accepted, _, _ in policy.seen) == statistics.accepted_tokens
    assert sum(len(ids) for step in policy.seen for ids in step[4]) == statistics.generated_tokens
    for proposed, verified, accepted, seconds, tokens in policy.seen:
        assert len(proposed) == len(verified) == len(accepted) == len(tokens)
        assert seconds.forward > 0 and min(seconds) >= 0
        for tree, count, ids in zip(verified, accepted, tokens):
            assert tree.tokens[:count].tolist() == ids[:count].tolist(), "the draft's chains, as far as they came true"


def test_no_speculation_runs_the_source_not_at_all():
    statistics, source = generate(NoSpeculation())
    assert source.num_asked == statistics.drafted_tokens == 0
    assert statistics.steps == statistics.generated_tokens == 45


@pytest.mark.parametrize("num_nodes", [1, 3, 7])
def test_fixed_length_bounds_what_is_verified(num_nodes):
    statistics, source = generate(FixedLength(num_nodes))
    assert 0 < statistics.drafted_tokens <= num_nodes * statistics.steps
    assert source.drafted >= statistics.drafted_tokens


def test_the_auction_learns_from_a_generation():
    policy = GoodputAuction(line())
    statistics, _ = generate(policy)
    assert statistics.accepted_tokens > 0
    (cost,) = policy.records
    assert policy.trust.of_source(cost.source) != 1, "acceptance was observed"
    assert any(policy.cost.correction(size) != 1 for size in range(1, 32)), "and so was what steps take"
    assert not policy.records[cost].acceptance._requests, "the requests have ended"


def test_a_policy_that_loses_rows_is_an_error():
    class Losing(FixedLength):
        def select(self, rows, trees):
            return super().select(rows, trees)[:-1]

    with pytest.raises(ValueError, match="Losing selected 2 trees for 3 rows"):
        generate(Losing(3))
