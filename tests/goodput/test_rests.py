"""Steps that the policy is not called for, since it would draft nothing."""

import numpy as np
import pytest

import hf_smartspec
from hf_smartspec import DraftTree, Engine, SmartSpecConfig
from hf_smartspec.decoding.drafting import Drafting
from hf_smartspec.drafts.merge import join
from hf_smartspec.goodput import DraftCost, FixedLength, GoodputAuction, NoSpeculation, StepOutcome, StepSeconds
from hf_smartspec.goodput.policy import Stage, StepRows
from hf_smartspec.goodput.report import LoggedPolicy
from hf_smartspec.goodput.stage_record import size_class
from hf_smartspec.simulator import LoadRequest, SimulatedEngine

from ..generate.helpers import Oracle as Knowing
from ..generate.helpers import prompts, tiny_llama
from ..serving.helpers import Asked, check_all
from ..sources import Oracle
from .simulation import Drafter, drafted, line, rows_of, simulate

LEVELS = DraftCost(3e-3, 3e-4, is_autoregressive=True, source="levels")
CALL = DraftCost(per_call=6e-3, source="call")
TEXT = DraftCost(per_call=1e-4, source="text")


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
def test_most_steps_rest_where_a_source_is_always_wrong(cost):
    policy, drafters = resting(cost)
    simulated = simulate(policy, drafters, line(), steps=2000, noise=0)
    assert 0.85 < simulated.rested / simulated.steps <= 15 / 16
    assert simulated.drafted, "it is still tried now and then"


def let_rest(policy, num_rows=4):
    """Let all steps pass that the policy is not called for, and return their number."""
    num = 0
    while policy.rests(range(num_rows)):
        assert policy.rests(range(num_rows)), "asking changes nothing"
        policy.rested(num_rows, StepSeconds(0.0, 0.02, 0.0))
        num += 1
    return num


def test_the_auction_is_called_again_after_fifteen_steps_and_for_other_rows():
    policy, _ = resting(CALL)
    assert not policy.rests([0, 1, 2]), "a row has ended"
    assert not policy.rests([0, 1, 2, 4]), "another one has begun"
    time = policy.records[CALL].trial_time
    time.due = 1.0  # no trial is due before
    saved, plain = time.seconds, policy._plan.plain_seconds
    assert let_rest(policy) == 15
    assert time.seconds == pytest.approx(saved + 15 * 0.01 * plain), "time for trials is saved meanwhile, too"


@pytest.mark.parametrize("cost", [LEVELS, CALL])
def test_the_auction_is_called_as_soon_as_a_trial_can_be_afforded(cost):
    policy, drafters = resting(cost)
    trials, steps = [], 0
    while len(trials) < 10:
        if step(policy, drafters).stages[0].asked.any():
            trials.append(steps)
            steps = 0
        steps += 1 + let_rest(policy)
    seconds = policy.records[cost].seconds(cost, np.ones(4, np.int64))
    expected = 2 * seconds / (0.01 * policy._plan.plain_seconds)  # half of the time for trials is left
    assert trials[5:] == pytest.approx([expected] * 5, abs=3)


def test_the_auction_is_called_more_often_until_the_price_of_steps_without_drafts_is_known():
    """A wrong profile is mended soon."""
    policy, drafters, rests = GoodputAuction(line()), [Drafter(0.0, claimed=0.95, cost=CALL, length=5)] * 4, []
    for _ in range(60):
        step(policy, drafters)
        rests += [num] if (num := let_rest(policy)) else []
    assert max(rests[:6]) == 5 and max(rests) == 15


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


def test_a_policy_that_rests_is_called_for_steps_with_prompts_only(monkeypatch):
    monkeypatch.setattr("hf_smartspec.goodput.report._EVERY", 1000)  # no step is called for to look back at it
    model, policy = tiny_llama(), Restful()
    asked = [Asked([3, 4, 5, 3, 4], {"max_new_tokens": num}) for num in (6, 9, 12)]
    config = SmartSpecConfig("prompt_lookup", policy=policy)
    with Engine(model, config, max_batch_size=2) as engine:
        check_all(engine, model, asked)
        with engine.pause():  # the last step has been counted: results are given before
            report = engine.report()
    assert policy.prompts and all(policy.prompts) and policy.rests_asked
    assert report.nodes_per_row[0] >= policy.rows_rested > 0 and report.seconds["verify"] > 0


@pytest.mark.parametrize("config", [SmartSpecConfig("none"), SmartSpecConfig("prompt_lookup", num_nodes=0)])
def test_steps_without_a_source_rest(config, monkeypatch):
    rested, model = [], tiny_llama()
    monkeypatch.setattr(NoSpeculation, "rested", lambda self, *args: rested.append(args))
    hf_smartspec.enable(model)
    model.generate(**prompts([5]), assistant=config, max_new_tokens=6)
    assert len(rested) == 5, "all but the one that reads the prompt"


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


class Seldom(Oracle):
    """Knows the text, and proposes three of its tokens where its length is a multiple of ten, else nothing."""

    num_calls = 0

    def propose(self, request_ids, max_nodes):
        self.num_calls += 1
        return super().propose(request_ids, max_nodes)

    def draft(self, text, limit):
        return super().draft(text, min(limit, 0 if len(text) % 10 else 3))


class Counted(GoodputAuction):
    num_decisions = 0

    def select(self, rows, trees):
        self.num_decisions += 1
        return super().select(rows, trees)


def test_a_source_whose_calls_pay_is_asked_at_every_step_and_the_auction_where_it_finds_something():
    text, policy = np.arange(1000) % 250 + 3, Counted(line())
    source = Seldom([text.tolist()])
    result = SimulatedEngine(line(), source, DraftCost(1e-5)).run([LoadRequest(0.0, text[:15], 900, text[15:])], policy)
    counts = result.statistics
    assert counts.accepted_tokens > 0.95 * 3 * 900 / 10, "every chance is taken"
    assert source.num_calls > 0.95 * counts.forwards
    found, nothing = counts.drafted_tokens / 3, counts.forwards - counts.drafted_tokens / 3
    assert policy.num_decisions < 1.2 * found + nothing / 8 + 20


def test_only_a_step_whose_source_pays_lets_the_next_ones_begin_with_it():
    policy, drafters = GoodputAuction(line()), [Drafter(0.9, cost=CALL)] * 2
    simulate(policy, drafters, line(), steps=8, noise=0)
    assert not policy.asks_first(range(2)), "the first calls are trials"
    simulate(policy, drafters, line(), steps=8, noise=0)
    assert not policy.asks_first(range(3)), "another row has begun"
    for most in (7, 15):
        for _ in range(most):
            assert policy.asks_first(range(2)) and not policy.rests(range(2))
            policy.rested(2, StepSeconds(0.0, 0.02, 0.0))
        assert not policy.asks_first(range(2)), "the auction sees a step without drafts now and then"
        step(policy, drafters)
        policy._num_plain[size_class(2)] = 16  # their price is known
    policy, wrong = resting(CALL)
    assert not policy.asks_first(range(4))
    while not step(policy, wrong).stages[0].asked.any():
        pass
    assert not policy.asks_first(range(4)), "that was a trial"


def test_steps_do_not_begin_with_a_source_for_longer_than_its_calls_pay():
    policy, drafters = GoodputAuction(line()), [Drafter(0.9, cost=CALL)] * 2
    simulate(policy, drafters, line(), steps=16, noise=0)
    policy._num_plain[size_class(2)] = 16
    policy.records[CALL].profits[size_class(2)].mean = 1e-4
    num = 0
    while policy.asks_first(range(2)):
        policy.rested(2, StepSeconds(6e-3, 0.02, 0.0))
        num += 1
    assert 1 <= num < 15 and policy.records[CALL].profits[size_class(2)].mean <= 0


def test_steps_do_not_rest_while_a_source_may_not_be_asked_yet():
    """Such as one that needs hidden states of a prompt of one token."""
    policy, stage = GoodputAuction(line()), Stage(CALL, np.array([0]))
    rows = StepRows([0], np.array([0]), np.array([5]), stages=[stage])
    assert not policy.max_nodes(rows, stage, [DraftTree.empty()]).any()
    policy.select(rows, [DraftTree.empty()])
    assert not policy.rests([0])


def of_two_sources(policy, finds, accuracy, rng):
    """Let a step of a source that finds a token or nothing pass, and of one that drafts by level for the same row."""
    caps, truth, trees = np.array([5]), np.arange(3, 9), [DraftTree.empty()]
    rows = StepRows([0], np.array([200]), caps, stages=[Stage(TEXT, caps), Stage(LEVELS, caps, position=1)])
    for stage in rows.stages:
        stage.asked = np.minimum(policy.max_nodes(rows, stage, trees), caps)
        if stage.asked.any():
            size = min(5 if stage.position else int(finds), int(stage.asked[0]))
            right = rng.random(size) < (accuracy if stage.position else 0.9)
            stage.proposed = [DraftTree.chain(np.where(right, truth[:size], 2), [0.9] * size)]
            stage.seconds = stage.cost.per_call * (size if stage.position else 1)
            trees = join(trees, policy.calibrated(rows, stage, stage.proposed), caps)
    verified = policy.select(rows, trees)
    accepted = len(verified[0].path_along(truth))
    seconds = StepSeconds(0.0, float(line().seconds(*rows.forward_size(len(verified[0])))))
    policy.observe(StepOutcome(rows, trees, verified, [accepted], seconds, [truth[: accepted + 1]]))


@pytest.mark.parametrize("accuracy", [0.9, 0.0])
def test_steps_begin_with_the_first_source_only_while_a_later_one_rests(accuracy):
    policy, rng, allowed = GoodputAuction(line()), np.random.default_rng(0), []
    for number in range(600):
        allowed.append(policy.asks_first([0]))
        of_two_sources(policy, number % 3 == 0, accuracy, rng)
    assert (sum(allowed[200:]) > 100) == (accuracy == 0.0)
    assert accuracy == 0.0 or not any(allowed[200:])


@pytest.mark.parametrize("per_call", [1e-4, 5e-4, 1e-3])
def test_a_source_comes_back_beside_another_whose_trials_are_cheap_and_fail(per_call, monkeypatch):
    monkeypatch.setattr("tests.goodput.test_rests.TEXT", DraftCost(per_call, source="text"))
    policy, rng = GoodputAuction(line()), np.random.default_rng(0)
    for number in range(1600):
        of_two_sources(policy, False, 0.0 if number < 600 else 0.9, rng)
        if number > 600 and policy.records[LEVELS].pays:
            break
    assert number < 800, "its own part of the time pays for a trial of it before"


class Eager(FixedLength):
    """Lets every step begin with the source."""

    def __init__(self):
        super().__init__(4)
        self.num_empty, self.sizes, self.most = 0, [], 4

    def asks_first(self, request_ids):
        return True

    def rested(self, num_rows, seconds):
        assert seconds.draft > 0, "that of asking"
        self.num_empty += 1

    def max_nodes(self, rows, stage, trees):
        return np.minimum(super().max_nodes(rows, stage, trees), self.most)

    def select(self, rows, trees):
        self.sizes.append(max(map(len, trees)))
        return super().select(rows, trees)


class SeldomKnowing(Knowing):
    """Knows the texts, and proposes where their length is a multiple of three."""

    num_calls = 0

    def propose(self, request_ids, max_nodes):
        self.num_calls += 1
        trees = super().propose(request_ids, max_nodes)
        return [
            tree.most_likely(len(tree) * (not len(self._texts[name]) % 3)) for name, tree in zip(request_ids, trees)
        ]


@pytest.mark.parametrize(("sizes", "most"), [([5], 4), ([5, 9, 2], 4), ([5], 1)])
def test_what_was_proposed_first_is_verified_and_asked_for_once(sizes, most):
    model, batch, policy = tiny_llama(), prompts(sizes), Eager()
    policy.most = most
    asked = {**batch, "max_new_tokens": 30, "do_sample": False}
    expected = model.generate(**asked)
    source = SeldomKnowing(expected, batch["attention_mask"])
    with hf_smartspec.enabled(model):
        actual = model.generate(**asked, assistant=SmartSpecConfig(source, policy=policy))
    assert actual.tolist() == expected.tolist()
    assert policy.num_empty > 0 and all(policy.sizes[1:-1]), "the policy decides where something was proposed"
    assert max(policy.sizes) == most, "no more than the policy allows"
    assert source.num_calls <= policy.num_empty + len(policy.sizes), "none is asked twice in a step"


def test_the_time_of_learning_counts_also_where_the_next_step_finds_nothing(monkeypatch):
    model, batch, policy, learning = tiny_llama(), prompts([5]), Eager(), []
    count = Drafting._count_as_drafting
    monkeypatch.setattr(
        Drafting, "_count_as_drafting", lambda self, *args: (learning.append(args[2:]), count(self, *args))[1]
    )
    asked = {**batch, "max_new_tokens": 30, "do_sample": False}
    source = SeldomKnowing(model.generate(**asked), batch["attention_mask"])
    with hf_smartspec.enabled(model):
        model.generate(**asked, assistant=SmartSpecConfig(source, policy=policy))
    seconds = [args[0] for args in learning if args]  # the first is that of the prompt
    assert len(seconds) > 3 and all(number > 0 for number in seconds[2:])


class Choosing(SeldomKnowing):
    """Source that has another one draft for long prompts."""

    def choose(self, requests):
        return [self.other if len(request.prompt) > 6 else self for request in requests]


def test_rows_with_different_sources_are_not_asked_before_the_policy():
    model, batch, policy = tiny_llama(), prompts([5, 9]), Eager()
    asked = {**batch, "max_new_tokens": 30, "do_sample": False}
    expected = model.generate(**asked)
    kinds = Choosing, type("Other", (SeldomKnowing,), {})
    source, other = (cls(expected, batch["attention_mask"]) for cls in kinds)
    source.other, policy.asks_first = other, lambda request_ids: len(request_ids) == 2
    with hf_smartspec.enabled(model):
        actual = model.generate(**asked, assistant=SmartSpecConfig(source, policy=policy))
    assert actual.tolist() == expected.tolist()
    assert source.num_calls and other.num_calls and not policy.num_empty


class Failing(SeldomKnowing):
    def propose(self, request_ids, max_nodes):
        if self.num_calls == 4:
            raise RuntimeError("the source has broken")
        return super().propose(request_ids, max_nodes)


class ByLevel(SeldomKnowing):
    """A later source, which notes its prices."""

    is_autoregressive = heeds_prices = True

    def propose(self, request_ids, max_nodes, price=None):
        self.prices.append(price)
        return super().propose(request_ids, max_nodes)


def test_after_a_failure_the_next_source_is_not_asked_before_the_policy():
    """It drafts by level: the policy sets a price, or does not ask it."""
    model, batch = tiny_llama(), prompts([5])
    asked = {**batch, "max_new_tokens": 30, "do_sample": False}
    expected = model.generate(**asked)
    first, later = (cls(expected, batch["attention_mask"]) for cls in (Failing, ByLevel))
    later.prices, policy = [], Counted(line())
    policy.asks_first = lambda request_ids: True
    with hf_smartspec.enabled(model):
        actual = model.generate(**asked, assistant=SmartSpecConfig([first, later], policy=policy))
    assert actual.tolist() == expected.tolist() and first.num_calls == 4
    assert None not in later.prices


def test_reports_count_the_time_of_asking_as_drafting():
    policy = LoggedPolicy(NoSpeculation())
    policy.rested(2, StepSeconds(0.5, 1.0, 0.25))
    assert policy.report().seconds == {"draft": 0.5, "prefill": 0.0, "verify": 1.0, "other": 0.25}
