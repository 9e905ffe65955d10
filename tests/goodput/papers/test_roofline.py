"""SSSD's free budget as a policy (section 3.2.1)."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import hf_smartspec
from hf_smartspec import DraftTree, Engine, SmartSpecConfig
from hf_smartspec.commands.load.policies import Policies
from hf_smartspec.goodput import CostModel, DraftCost, Roofline, RooflineBudget, Stage, StepRows
from hf_smartspec.prepare.sources import resolve

from ...generate.helpers import tiny_llama

ASCEND, LLAMA2_7B = Roofline(280e12, 0.8e12), 4096


def rows_of(num_rows, cap=100, **arguments):
    caps = np.full(num_rows, cap)
    return StepRows(list(range(num_rows)), np.zeros(num_rows), caps, stages=[Stage(DraftCost(), caps)], **arguments)


def asked(policy, rows):
    return np.asarray(policy.max_nodes(rows, rows.stages[0], [DraftTree.empty()] * len(rows))).tolist()


def test_the_paper_s_example():
    """At 1 / (2 (1/h + 1/(2 b s_q))) = 280 / 0.8; the paper rounds b s_q to 435, and s_q to 54 at b = 8."""
    budget = ASCEND.free_tokens(LLAMA2_7B)
    assert 1 / (2 * (1 / LLAMA2_7B + 1 / (2 * budget))) == pytest.approx(280 / 0.8)
    assert asked(RooflineBudget(budget), rows_of(8)) == [51] * 8, "s_q is 52, and one of them the last token"
    assert RooflineBudget(435).length(rows_of(8)) == 53


@given(st.floats(1, 1000), st.integers(1, 64), st.integers(0, 300), st.integers(0, 40))
def test_the_forward_holds_as_many_tokens_as_the_budget(budget, num_rows, num_prefill, cap):
    """The budget is b s_q, and the tokens of prompts (section 3.2.2)."""
    length = RooflineBudget(budget).length(rows_of(num_rows, 10**6, num_prefill_tokens=num_prefill))
    assert length == 0 or num_rows * (1 + length) + num_prefill <= budget
    assert num_rows * (2 + length) + num_prefill > budget
    capped = asked(RooflineBudget(budget), rows_of(num_rows, cap, num_prefill_tokens=num_prefill))
    assert capped == [min(length, cap)] * num_rows


def test_without_rows_or_without_a_limit_there_is_an_answer():
    assert asked(RooflineBudget(9), rows_of(0)) == []
    assert asked(RooflineBudget(np.inf), rows_of(2, cap=7)) == [7, 7]
    with pytest.raises(ValueError, match="at least 1, got 0"):
        RooflineBudget(0)


def test_merged_drafts_are_cut_to_the_budget():
    tree = DraftTree(np.arange(6), np.array([-1, 0, 1, -1, 3, 4]), np.full(6, 0.5, np.float32))
    (verified,) = RooflineBudget(4).select(rows_of(1), [tree])
    assert len(verified) == 3


def test_a_profile_s_budget_is_where_its_line_leaves_the_floor():
    """A forward that takes as long for 32 tokens as for one, and 1/32 of that more for each further token."""
    knots, seconds = [1, 32, 64], [0.01, 0.01, 0.02]
    cost = CostModel(0.0, 0.0, 0.0, knots=knots, curve=seconds)
    assert RooflineBudget.of_profile(cost).num_tokens == pytest.approx(32)
    assert Policies(cost).new("roofline").num_tokens == pytest.approx(32)


@pytest.mark.parametrize("policy", ["roofline", "roofline:4e12,1e12"])
def test_the_policy_has_a_name_in_calls_and_engines(policy):
    model = hf_smartspec.enable(tiny_llama())
    ids = torch.tensor([[5, 6, 5, 6, 5], [7, 8, 9, 7, 8]])
    config = SmartSpecConfig("sssd", policy=policy)
    assert isinstance(resolve(config, model).config.policy, RooflineBudget)
    expected = model.generate(ids, max_new_tokens=16, assistant="none")
    assert torch.equal(model.generate(ids, max_new_tokens=16, assistant=config), expected)
    with Engine(model, assistant=config) as engine:
        outputs = engine.generate(ids.tolist(), max_new_tokens=16)
    assert [output.generated_tokens for output in outputs] == expected[:, ids.shape[1] :].tolist()


def test_a_data_sheet_is_read_with_the_model_s_sizes():
    model = tiny_llama()
    policy = resolve(SmartSpecConfig("sssd", policy="roofline:4e12,1e12"), model).config.policy
    sizes = model.config.hidden_size, model.dtype.itemsize
    assert policy.num_tokens == Roofline(4e12, 1e12).free_tokens(*sizes)


@pytest.mark.parametrize(
    "name",
    [
        "rooflin", "roofline:", "roofline:1e12", "roofline:1e12,0", "roofline:fast,slow", "roofline:inf,1e12",
        "roofline:1e12,inf", "roofline:nan,1e12",
    ],
)  # fmt: skip
def test_unknown_names_are_refused(name):
    with pytest.raises(ValueError, match=r"must be a LengthPolicy, 'table', 'roofline' or"):
        SmartSpecConfig("sssd", policy=name)
