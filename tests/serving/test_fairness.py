"""Namespaces that share an engine: which requests are served when, and that none shuts out another."""

import threading
from collections.abc import Callable

import numpy as np
import pytest

from hf_smartspec import Engine, FixedLength, SmartSpecConfig
from hf_smartspec.decoding.prefill import equal_parts
from hf_smartspec.goodput import StepGoodput
from hf_smartspec.serving import scheduler

from ..costs import UnmovedCost
from ..generate.helpers import tiny_llama
from .helpers import TIMEOUT, Asked, all_alone, all_at_once, of, suffix

LONG = {"max_new_tokens": 60, "eos_token_id": None}
SHORT = {"max_new_tokens": 4, "eos_token_id": None}


@pytest.fixture
def model():
    return tiny_llama()


class Steps:
    """
    Counts an engine's steps, and after which of them each request ended. With `act`, it is called in every step before
    the model runs: what happens there happens at its step, however slow the threads are.
    """

    def __init__(self, engine: Engine, act: Callable[[int], None] = lambda number: None):
        self.num, self.ends = 0, {}
        step, answer = engine._runner.loop.step, engine._runner._answer

        def counting():
            self.num += 1
            act(self.num)
            return step()

        def noting(pending, output):
            self.ends[output.request_id] = self.num
            answer(pending, output)

        engine._runner.loop.step, engine._runner._answer = counting, noting


@pytest.mark.parametrize("num_long", [4, 64])
def test_a_short_request_does_not_wait_for_long_ones_of_another(model, num_long):
    """It takes as many steps as it would take alone."""
    prompts = [[3 + number % 30, 4, 5, 6 + number // 30] for number in range(num_long)]
    with Engine(model, "none", max_batch_size=4) as engine:
        short, running, added = {}, [], threading.Event()

        def adding(number):
            if number in (3, 10, 17):
                running.extend(call.namespace for call in engine._runner.loop.calls)
                short[engine.add_request([7, 8, 9], assistant=of("b"), **SHORT)] = number
            if len(short) == 3:
                added.set()

        steps = Steps(engine, adding)
        with all_at_once(engine):
            long = [engine.add_request(prompt, assistant=of("a"), **LONG) for prompt in prompts]
        assert added.wait(TIMEOUT) and set(running) == {"a"}
        for name, now in short.items():
            output = engine.get_result(name, timeout=TIMEOUT)
            assert output.generated_tokens == Asked([7, 8, 9], SHORT).alone(model)
            assert steps.ends[name] - now <= 4
        for waits in long[8:]:
            engine.cancel_request(waits)
        expected = all_alone(model, [Asked(prompt, LONG) for prompt in prompts[:8]])
        for tokens, name in zip(expected, long):
            assert engine.get_result(name, timeout=TIMEOUT).generated_tokens == tokens
        ends = [steps.ends[name] for name in long[:4]]
        assert ends == sorted(ends), "the newest has given way"
    assert engine._runner.num_suspended > 0


def test_memory_is_not_one_namespaces_either(model):
    bytes_per_token = Engine(model)._memory.bytes_per_token
    prompts, other = [[3, 4, 5 + number] for number in range(12)], list(range(3, 33)) * 2
    with Engine(model, "none", max_batch_size=32, max_kv_bytes=4 * 128 * bytes_per_token) as engine:
        steps = Steps(engine)
        with engine.pause():
            long = [engine.add_request(prompt, assistant=of("a"), streaming=True, **LONG) for prompt in prompts]
        next(engine.request_id_iter(long[0]))
        with engine.pause():
            now = steps.num
            name = engine.add_request(other, assistant=of("b"), **SHORT)
        assert engine.get_result(name, timeout=TIMEOUT).generated_tokens == Asked(other, SHORT).alone(model)
        assert steps.ends[name] - now <= 4
        expected = all_alone(model, [Asked(prompt, LONG) for prompt in prompts])
        for tokens, name in zip(expected, long):
            assert engine.get_result(name, timeout=TIMEOUT).generated_tokens == tokens


def test_a_text_that_takes_all_memory_lets_short_requests_in(model):
    """Another's short request waits for four turns and the recomputed text at most, not for an eighth of that text."""
    bytes_per_token = Engine(model)._memory.bytes_per_token
    prompt = np.random.default_rng(0).integers(3, 40, 1800).tolist()
    asked = Asked(prompt, {"max_new_tokens": 300, "eos_token_id": None})
    with Engine(model, "none", max_kv_bytes=2100 * bytes_per_token, max_prefill_tokens=600) as engine:
        short = {}

        def adding(number):
            """The long text has been read by the fourth step; a short request comes when the one before has ended."""
            if number >= 4 and len(short) < 3 and all(name in steps.ends for name in short):
                short[engine.add_request([7, 8, 9 + len(short)], assistant=of("b"), **SHORT)] = number

        steps = Steps(engine, adding)
        long = engine.add_request(prompt, assistant=of("a"), **asked.arguments)
        assert engine.get_result(long, timeout=TIMEOUT).generated_tokens == asked.alone(model)
        assert engine._runner.num_suspended == 3
        for number, (name, now) in enumerate(short.items()):
            output = engine.get_result(name, timeout=TIMEOUT)
            assert output.generated_tokens == Asked([7, 8, 9 + number], SHORT).alone(model)
            assert steps.ends[name] - now <= 4 * scheduler.TURN + 4 + 8, "four steps to read the long text again"


def test_prompts_are_read_in_turns(model):
    """One does not wait until all of another's have been read."""
    rng = np.random.default_rng(0)
    prompts = [rng.integers(3, 40, 64).tolist() for _ in range(12)]
    with Engine(model, "none", max_batch_size=16, max_prefill_tokens=16) as engine:
        steps = Steps(engine)
        with engine.pause():
            for prompt in prompts:
                engine.add_request(prompt, assistant=of("a"), **SHORT)
            name = engine.add_request(prompts[0][:20], assistant=of("b"), **SHORT)
        output = engine.get_result(name, timeout=TIMEOUT)
    assert output.generated_tokens == Asked(prompts[0][:20], SHORT).alone(model)
    assert steps.ends[name] <= 3 + 3, "20 tokens by 8 a step, and three more"


def test_equal_parts():
    assert equal_parts(10, {"a": 100}) == {"a": 10}
    assert equal_parts(10, {"a": 100, "b": 2}) == {"a": 8, "b": 2}
    assert equal_parts(10, {"a": 100, "b": 50, "c": 3}) == {"a": 3, "b": 4, "c": 3}
    assert equal_parts(1, {"a": 9, "b": 8}) == {"a": 0, "b": 1}
    assert equal_parts(10, {"a": 1, "b": 2}) == {"a": 1, "b": 2}
    assert equal_parts(0, {"a": 1}) == {"a": 0} and equal_parts(5, {}) == {}


def test_weights_are_parts_of_places(model):
    with Engine(model, "none", max_batch_size=8, namespace_weights={"a": 3}) as engine:
        running = []

        def adding(number):
            if number == 3:
                names.append(engine.add_request([3], assistant=of("c"), **SHORT))
            if number == 5:
                running.extend(call.namespace for call in engine._runner.loop.calls)

        Steps(engine, adding)
        with all_at_once(engine):
            names = [engine.add_request([3, 4], assistant=of(name), **LONG) for name in "ab" * 8]
        assert engine.get_result(names[0], timeout=TIMEOUT).error is None
        for name in names:
            engine.cancel_request(name)
    assert running.count("a") >= 5 and running.count("b") in (1, 2)


@pytest.mark.parametrize("weights", [[1.0], {"a": 0}, {"a": float("inf")}, {"a": float("nan")}, {"a": "1"}])
def test_bad_weights_are_refused(model, weights):
    with pytest.raises((TypeError, ValueError), match="namespace_weights"):
        Engine(model, namespace_weights=weights)


def test_a_namespace_has_no_more_requests_than_it_may(model):
    with pytest.raises(ValueError, match="max_requests_per_namespace"):
        Engine(model, max_requests_per_namespace=0)
    with Engine(model, "none", max_requests_per_namespace=2) as engine:
        with engine.pause():
            first, _ = (engine.add_request([3], assistant=of("a"), **SHORT) for _ in range(2))
            with pytest.raises(RuntimeError, match="'a' has 2 requests"):
                engine.add_request([3], request_id="third", assistant=of("a"), **SHORT)
            other = engine.add_request([3], assistant=of("b"), **SHORT)
            engine.cancel_request(first)
        assert engine.get_result(first, timeout=TIMEOUT).finish_reason == "cancelled"
        assert engine.get_result(other, timeout=TIMEOUT).finish_reason == "length"
        third = engine.add_request([3], request_id="third", assistant=of("a"), **SHORT)
        assert engine.get_result(third, timeout=TIMEOUT).finish_reason == "length"


class Wide(FixedLength):
    """Drafts as much as it may, and notes how much that is."""

    cost = UnmovedCost(alpha=0.0, gamma=0.1, delta=1.0)

    def __init__(self):
        super().__init__(64)
        self.caps = []

    def max_nodes(self, rows, stage, trees):
        self.caps.append(int(rows.caps.max()))
        return super().max_nodes(rows, stage, trees)


def test_drafts_of_one_do_not_lengthen_the_steps_of_others(model):
    """A step of four rows takes 1.4 s, and at most 2.1 s with drafts, unless all rows are of one namespace."""
    for namespaces, most in (("aaaa", 64), ("aaab", 1)):
        policy, source = Wide(), suffix()
        with Engine(model, SmartSpecConfig(source, policy=policy), max_batch_size=8) as engine:
            with engine.pause():
                choices = [of(name, source, num_nodes=64) for name in namespaces]
                names = [engine.add_request([3, 4, 5], assistant=choice, **LONG) for choice in choices]
            for name in names:
                assert engine.get_result(name, timeout=TIMEOUT).generated_tokens == Asked([3, 4, 5], LONG).alone(model)
        assert max(policy.caps[1:]) == most and engine.statistics.accepted_tokens > 0


def test_a_policy_that_chooses_batches_shuts_out_no_tenant(model):
    """A third row makes steps a thousand times dearer: the policy runs two, both of which another tenant has."""
    cost = UnmovedCost(0.0, 0.0, 0.0, knots=(1, 2, 3, 400), curve=(1e-3, 1e-3, 1.0, 100.0))
    config = SmartSpecConfig("prompt_lookup", policy=StepGoodput(cost))
    with Engine(model, config, max_batch_size=3) as engine:
        steps = Steps(engine)
        with engine.pause():
            long = [
                engine.add_request([3, 4, 5 + number], assistant=of("a"), streaming=True, **LONG) for number in range(6)
            ]
        next(engine.request_id_iter(long[0]))
        with engine.pause():
            now = steps.num
            name = engine.add_request([7, 8, 9], assistant=of("b"), **SHORT)
        output = engine.get_result(name, timeout=TIMEOUT)
        assert output.generated_tokens == Asked([7, 8, 9], SHORT).alone(model)
        assert steps.ends[name] - now <= 4
        for request in long:
            engine.cancel_request(request)
