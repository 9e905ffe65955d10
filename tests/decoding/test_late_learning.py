"""What a policy learns of a step while a device runs the next one: when, in which order, and at which seconds."""

import pytest

import hf_smartspec
from benchmarks.step.overhead import host
from hf_smartspec import Engine, SmartSpecConfig
from hf_smartspec.decoding import loop
from hf_smartspec.goodput import FixedLength, GoodputAuction
from hf_smartspec.goodput.report import LoggedPolicy
from hf_smartspec.simulator.clock import EventClock

from ..costs import UnmovedCost
from ..generate.helpers import prompts, tiny_llama
from ..serving.helpers import Asked, check_all

FORWARD = 10.0  # seconds of the device


class Noting(FixedLength):
    """Takes its time to learn, and notes what happens; steps are numbered as they are selected."""

    def __init__(self, learns_late=True, takes=lambda seconds: None, seconds=0.0):
        super().__init__(3)
        self.learns_late, self.takes, self.seconds = learns_late, takes, seconds
        self.events, self.told, self.steps = [], [], []
        self.error = None

    def select(self, rows, trees):
        self.steps.append(rows)
        self.events.append(("select", len(self.steps) - 1))
        return super().select(rows, trees)

    def observe(self, outcome):
        if self.error is not None:
            raise self.error
        (number,) = [number for number, step in enumerate(self.steps) if step is outcome.rows]
        self.events.append(("observe", number))
        self.told.append(outcome.seconds)
        self.takes(self.seconds)

    def forget(self, request_id):
        self.events.append(("forget", request_id))

    def numbers(self, name):
        return [number for kind, number in self.events if kind == name]


@pytest.fixture
def asynchronous(monkeypatch):
    """Forwards of this machine's CPU are taken for a device's."""
    monkeypatch.setattr(loop, "waits_are_free", lambda device: False)


def setting_of(monkeypatch, policy, num_rows=2):
    """Stubs whose forward takes no time of the host, and `FORWARD` until its picks are there."""
    monkeypatch.setattr(host, "_policy", lambda *_: policy)
    setting = host.make_setting("suffix", num_rows, num_steps=8)
    forward, clock = setting.forward, setting.loop.clock
    launch, argmax, done = forward.forward, forward.argmax, []
    policy.takes, forward.clock = clock.advance, EventClock()

    def launched(inputs):
        policy.events.append(("launch", len(done)))
        done.append(clock() + FORWARD)
        return launch(inputs)

    def waited(logits):
        policy.events.append(("wait", len(done) - 1))
        clock.jump(done[-1])
        return argmax(logits)

    forward.forward, forward.argmax = launched, waited
    return setting


def of_step(number, *late):
    return [("select", number), ("launch", number), *late, ("wait", number)]


def test_a_step_is_learnt_between_launch_and_wait_of_the_next(monkeypatch, asynchronous):
    policy = Noting()
    setting = setting_of(monkeypatch, policy)
    for _ in range(3):
        setting.loop.step()
    assert policy.events == of_step(0) + of_step(1, ("observe", 0)) + of_step(2, ("observe", 1))
    for call in list(setting.loop.calls):
        setting.loop.remove(call)
    assert policy.events[11:] == [("observe", 2), ("forget", 0), ("forget", 1)]


@pytest.mark.parametrize("learns_late", [True, False])
def test_what_does_not_run_on_or_is_not_to_be_put_off_is_learnt_at_once(monkeypatch, learns_late):
    if not learns_late:
        monkeypatch.setattr(loop, "waits_are_free", lambda device: False)
    policy = Noting(learns_late)
    setting = setting_of(monkeypatch, policy)
    for _ in range(2):
        setting.loop.step()
    assert policy.events == [*of_step(0), ("observe", 0), *of_step(1), ("observe", 1)]


@pytest.mark.parametrize(("seconds", "expected"), [(3.0, FORWARD), (15.0, 15.0)])
def test_the_time_of_a_forward_is_not_what_is_left_to_wait(monkeypatch, asynchronous, seconds, expected):
    """It is what passes until its results are there, whatever the host does in the meantime."""
    policy = Noting(seconds=seconds)
    setting = setting_of(monkeypatch, policy)
    for _ in range(5):
        setting.loop.step()
    told = [item.forward + item.other for item in policy.told]
    assert told == pytest.approx([FORWARD, *[expected] * 3]), "there is nothing to be learnt in the first"
    counts = setting.loop.statistics
    assert counts.seconds_observe == pytest.approx(4 * seconds)
    assert counts.seconds_verify == pytest.approx(FORWARD + 4 * max(FORWARD - seconds, 0.0))
    assert counts.seconds_total == pytest.approx(FORWARD + 4 * expected), "what overlaps is counted once"


def test_nothing_is_lost_when_a_forward_fails(monkeypatch, asynchronous):
    policy = Noting()
    setting = setting_of(monkeypatch, policy)
    for _ in range(2):
        setting.loop.step()

    def fail(inputs):
        raise ArithmeticError("of the device")

    setting.forward.forward = fail
    with pytest.raises(ArithmeticError):
        setting.loop.run()
    assert policy.numbers("select") == [0, 1, 2] and policy.numbers("observe") == [0, 1]
    assert policy.events[-3:] == [("observe", 1), ("forget", 0), ("forget", 1)]


def test_calls_leave_a_policy_that_fails_to_learn(monkeypatch, asynchronous):
    policy = Noting()
    setting = setting_of(monkeypatch, policy)
    setting.loop.step()
    policy.error = ArithmeticError("of the policy")
    first, second = setting.loop.calls
    with pytest.raises(ArithmeticError):
        setting.loop.remove(first)
    setting.loop.remove(second)
    assert not setting.loop.calls and not setting.loop.running


def test_requests_that_come_and_go(asynchronous):
    model, policy = tiny_llama(eos_token_id=None), Noting()
    requests = [Asked([3, 4, 5, 3, 4, 5 + number], {"max_new_tokens": 4 + 3 * number}) for number in range(5)]
    with Engine(model, SmartSpecConfig("prompt_lookup", policy=policy), max_batch_size=3) as engine:
        check_all(engine, model, requests)
    check_order(policy, len(requests))


def test_rows_of_a_call_that_end_before_others(asynchronous):
    model, policy = tiny_llama(eos_token_id=None), Noting()
    options = prompts([5, 9, 7]) | {"max_new_tokens": 30, "do_sample": False}
    plain = model.generate(**options)
    options["eos_token_id"] = int(plain[1, options["input_ids"].shape[1] + 8])  # the second row's, at the latest
    expected = model.generate(**options).tolist()
    config = SmartSpecConfig("prompt_lookup", policy=policy)
    with hf_smartspec.enabled(model):
        assert model.generate(**options, assistant=config).tolist() == expected
    check_order(policy, num_requests=3)
    first = [kind for kind, _ in policy.events].index("forget")
    assert "observe" in [kind for kind, _ in policy.events[first:]], "no row ended before another"


def check_order(policy, num_requests):
    """Every step is learnt once, in order, some late, and all before any of their requests is forgotten."""
    numbers = policy.numbers("observe")
    assert numbers == policy.numbers("select")
    places = {event: place for place, event in enumerate(policy.events)}
    assert any(places["observe", n] > places["select", n + 1] for n in numbers[:-1]), "nothing was put off"
    gone = set()
    for kind, value in policy.events:
        if kind == "forget":
            gone.add(value)
        elif kind == "observe":
            assert gone.isdisjoint(policy.steps[value].request_ids)
    assert len(gone) == num_requests


def test_the_auction_learns_the_same_of_a_step_once_the_next_is_decided(monkeypatch):
    """What it has decided in a step, and predicted of it, is kept until then."""
    found = []
    for is_late in (False, True):
        if is_late:
            monkeypatch.setattr(loop, "waits_are_free", lambda device: False)
        policy = Watched(GoodputAuction(UnmovedCost(alpha=0.0, gamma=1e-5, delta=1e-2)))
        setting = setting_of(monkeypatch, policy)
        for _ in range(4):
            setting.loop.step()
        for call in list(setting.loop.calls):
            setting.loop.remove(call)
        assert policy.num_late == (3 if is_late else 0) and len(policy.learnt) == 4
        found.append((policy.learnt, list(policy._errors)))
    (learnt, errors), (late, late_errors) = found
    assert [tokens for tokens, _ in learnt] == [tokens for tokens, _ in late] and sum(num for _, num in late) > 0
    assert len(errors) == len(late_errors) == 4
    assert late_errors[0] == errors[0], "of the first step nothing was known in either case"


class Watched(LoggedPolicy):
    """Notes which of its steps are learnt late, and of what drafts."""

    events, num_late = (), 0

    def __init__(self, policy):
        super().__init__(policy)
        self.events, self.learnt, self.latest = [], [], None
        learn = policy._learn_outcomes

        def noting(plan, rows, stage, forest, tokens):
            assert plan.rows is rows
            self.num_late += self.latest is not rows
            self.learnt.append(([line.tolist() for line in tokens], forest.num_nodes))
            learn(plan, rows, stage, forest, tokens)

        policy._learn_outcomes = noting

    def select(self, rows, trees):
        self.latest = rows
        return super().select(rows, trees)
