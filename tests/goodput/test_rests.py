"""Steps that the policy is not called for, since it would draft nothing."""

import numpy as np
import pytest

from hf_smartspec import Engine, SmartSpecConfig
from hf_smartspec.goodput import DraftCost, FixedLength, GoodputAuction, NoSpeculation, StepOutcome, StepSeconds
from hf_smartspec.goodput.report import LoggedPolicy

from ..generate.helpers import tiny_llama
from ..serving.helpers import Asked, check_all
from .simulation import Drafter, drafted, line, rows_of, simulate

LEVELS = DraftCost(3e-3, 3e-4, is_autoregressive=True, source="levels")
CALL = DraftCost(per_call=6e-3, source="call")


def step(policy, drafters):
    """Decide a step and let it pass, without accepted nodes."""
    rows, rng, truths = rows_of(drafters), np.random.default_rng(0), [np.zeros(64, np.int64)] * len(drafters)
    proposed = drafted(policy, rows, drafters, truths, rng)
    verified = policy.select(rows, proposed)
    sizes = [len(tree) for tree in verified]
    seconds = StepSeconds(0.0, float(line().seconds(*rows.forward_size(sum(sizes), 1 + max(sizes)))))
    policy.observe(StepOutcome(rows, proposed, verified, [0] * len(rows), seconds, [truth[:1] for truth in truths]))
    return rows


def resting(cost, num=4):
    """A policy that has learnt that these drafters are always wrong, after a step in which none was asked."""
    policy, drafters = GoodputAuction(line()), [Drafter(0.0, claimed=0.95, cost=cost, length=5)] * num
    simulate(policy, drafters, line(), steps=400, noise=0)
    while step(policy, drafters).stages[0].asked.any():
        pass
    return policy, drafters


@pytest.mark.parametrize("cost", [LEVELS, CALL])
def test_three_of_four_steps_rest_where_a_source_is_always_wrong(cost):
    policy, drafters = resting(cost)
    simulated = simulate(policy, drafters, line(), steps=2000, noise=0)
    assert 0.65 < simulated.rested / simulated.steps <= 0.75
    assert simulated.drafted, "it is still tried now and then"


def test_the_auction_is_called_again_after_three_steps_and_for_other_rows():
    policy, drafters = resting(CALL)
    assert not policy.rests([0, 1, 2]), "a row has ended"
    assert not policy.rests([0, 1, 2, 4]), "another one has begun"
    saved = policy._probe_seconds
    for _ in range(3):
        assert policy.rests(range(4)) and policy.rests(range(4)), "asking changes nothing"
        policy.rested(4, StepSeconds(0.0, 0.02, 0.0))
    assert not policy.rests(range(4))
    step(policy, drafters)
    plain = policy._plan.plain_seconds
    assert policy._probe_seconds == pytest.approx(saved + 4 * 0.01 * plain), "time for trials is saved meanwhile, too"


def test_no_step_rests_after_one_with_drafts_or_while_drafts_pay():
    policy, good = GoodputAuction(line()), [Drafter(0.9)] * 2
    assert not policy.rests(range(2)), "nothing is known yet"
    assert not simulate(policy, good, line(), steps=200).rested
    rows = step(policy, good)
    assert rows.stages[0].asked.any() and not policy.rests(range(2))


class Restful(FixedLength):
    """Rests wherever it may, and notes what it is called for."""

    def __init__(self):
        super().__init__(3)
        self.rests_asked, self.prompts, self.rows_rested = 0, [], 0

    def rests(self, request_ids):
        self.rests_asked += 1
        return True

    def rested(self, num_rows, seconds):
        assert seconds.forward > 0
        self.rows_rested += num_rows

    def max_nodes(self, rows, stage, trees):
        self.prompts.append(rows.num_prefill_tokens)
        return super().max_nodes(rows, stage, trees)

    def observe(self, outcome):
        assert outcome.rows.num_prefill_tokens


def test_a_policy_that_rests_is_called_for_steps_with_prompts_only():
    model, policy = tiny_llama(), Restful()
    asked = [Asked([3, 4, 5, 3, 4], {"max_new_tokens": num}) for num in (6, 9, 12)]
    config = SmartSpecConfig("prompt_lookup", policy=policy)
    with Engine(model, config, max_batch_size=2) as engine:
        check_all(engine, model, asked)
        report = engine.report()
    assert policy.prompts and all(policy.prompts) and policy.rests_asked
    assert report.nodes_per_row[0] >= policy.rows_rested > 0 and report.seconds["verify"] > 0


def test_steps_of_a_traced_request_do_not_rest():
    """A trace shows what was drafted at every step."""
    model, policy = tiny_llama(), Restful()
    policy.observe = lambda outcome: None
    with Engine(model, SmartSpecConfig("prompt_lookup", policy=policy)) as engine:
        engine.get_result(engine.add_request([3, 4, 5, 3, 4], max_new_tokens=6, trace=True))
    assert not policy.rests_asked


def test_reports_look_back_at_plain_decoding_too():
    policy = LoggedPolicy(NoSpeculation(), line())
    simulated = simulate(policy, [Drafter(0.5)], line(), steps=80, noise=0)
    report = policy.report()
    assert 0 < simulated.rested < 80 and report.nodes_per_row == {0: 80}
    assert report.goodput == pytest.approx(simulated.goodput)
