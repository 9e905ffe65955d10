"""The engine's life among other threads, interrupts, changing models and callbacks that misbehave."""

import gc
import threading
import weakref

import pytest
import torch
from transformers.generation.streamers import BaseStreamer

from hf_smartspec import DraftModelCandidates, DraftTree, Engine, FixedLength, SmartSpecConfig
from hf_smartspec.target_model.compat import RequestStatus

from ..generate.helpers import EOS, Oracle, noisy_copy, set_special_tokens, tiny_llama
from ..models import new_model
from .helpers import Asked, all_at_once, random_requests, wait_once
from .test_engine import TIMEOUT, check_all, suffix

LONG = {"max_new_tokens": 400, "eos_token_id": None}


@pytest.fixture
def model():
    return tiny_llama()


def test_changes_that_parameters_do_not_show(model):
    """Weights copied through `.data`, as weight syncing does, count as changed in a pause."""
    other = tiny_llama(seed=7)
    asked = Asked(list(range(3, 30)), {"max_new_tokens": 10})
    with Engine(model, suffix()) as engine:
        check_all(engine, model, [asked])
        with engine.pause():
            for parameter, new in zip(model.parameters(), other.parameters()):
                parameter.data.copy_(new)
        check_all(engine, model, [asked])
        assert asked.alone(model) == asked.alone(other)
        with engine.pause():
            model.double()
        check_all(engine, model, [asked])


@pytest.mark.filterwarnings("ignore:.*maximum length")
def test_requests_beyond_learned_positions_are_refused():
    model = set_special_tokens(new_model("gpt2"), EOS)
    with Engine(model, "none") as engine:
        with pytest.raises(ValueError, match="1024 positions"):
            engine.add_request([3] * 10, max_new_tokens=1016)
        assert engine.add_request([3] * 10, max_new_tokens=1015)
        engine.stop(drain=False)


def test_generate_from_several_threads(model):
    engine, outputs = Engine(model, suffix(), max_batch_size=4), []
    threads = [
        threading.Thread(target=lambda: outputs.extend(engine.generate([[3, 4]], max_new_tokens=3) for _ in range(20)))
        for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    expected = Asked([3, 4], {"max_new_tokens": 3}).alone(model)
    assert [output.generated_tokens for (output,) in outputs] == [expected] * 60
    assert not engine.is_running


def test_generate_that_fails_leaves_nothing_behind(model):
    with Engine(model, suffix()) as engine:
        with pytest.raises(ValueError, match="vocabulary"):
            engine.generate([[3, 4], [10_000]], max_new_tokens=5)
        mine = engine.add_request([3], max_new_tokens=2)
        assert [output.request_id for output in engine] == [mine]


def test_cancelling_a_name_does_not_harm_its_next_bearer(model):
    engine = Engine(model, suffix())
    engine.cancel_request("mine")
    engine.add_request([3, 4], request_id="mine", max_new_tokens=4)
    engine.start()
    assert engine.get_result("mine", timeout=TIMEOUT).status == RequestStatus.FINISHED
    engine.stop()


def test_names_are_made_up_around_those_in_use(model):
    engine = Engine(model, suffix())
    assert engine.add_request([3], request_id="req_0", max_new_tokens=1) == "req_0"
    assert engine.add_request([3], max_new_tokens=1) == "req_1"


def test_who_would_wait_forever_is_told(model):
    engine = Engine(model, suffix())
    name = engine.add_request([3], max_new_tokens=2)
    for wait in (lambda: next(iter(engine)), lambda: engine.request_id_iter(name)):
        with pytest.raises(RuntimeError, match="does not run"):
            wait()
    engine.start().stop()
    assert next(engine.request_id_iter(name)).is_finished(), "it is there"


class Calls(BaseStreamer):
    """Does something in the engine's thread."""

    def __init__(self, action):
        self.action = action

    def put(self, value):
        if value.numel() == 1:
            self.action()

    def end(self):
        pass


@pytest.mark.parametrize("name", ["stop", "get_result", "generate"])
def test_callbacks_that_wait_for_their_own_engine(model, name):
    requests = random_requests(4)
    with Engine(model, suffix(), max_batch_size=3) as engine:
        call = {"stop": engine.stop, "get_result": engine.get_result, "generate": lambda: engine.generate([[3]])}[name]
        bad = engine.add_request([3, 4, 5], streamer=Calls(call), **LONG)
        check_all(engine, model, requests)
        failure = engine.get_result(bad, timeout=TIMEOUT)
    assert "own callbacks" in failure.error


class Leaving(FixedLength):
    """Ends the thread that it is called in, at its last step: it is no request's own code."""

    steps_left = 6

    def max_nodes(self, rows, stage, trees):
        self.steps_left -= 1
        if not self.steps_left:
            raise SystemExit
        return super().max_nodes(rows, stage, trees)


def test_a_thread_that_ends_answers_everybody(model, caplog):
    policy = Leaving(0)
    with Engine(model, SmartSpecConfig(suffix(), policy=policy), max_batch_size=2) as engine:
        waits = wait_once(engine)
        with all_at_once(engine):
            names = [engine.add_request([3, 4, 5], **LONG) for _ in range(4)]
        assert waits.wait(TIMEOUT)
        with all_at_once(engine):
            engine.cancel_request(names[0])
            engine.cancel_request(names[1])
        outputs = [engine.get_result(name, timeout=TIMEOUT) for name in names]
        engine._runner.session.join(TIMEOUT)
        assert not engine.is_running
    assert all(output.status == RequestStatus.FAILED for output in outputs)
    assert "SystemExit" in outputs[-1].error


class Wide(Oracle):
    """Proposes more than it is asked for."""

    def __init__(self):
        super().__init__(torch.zeros(1, 1, dtype=torch.long))

    def _propose(self, text, limit):
        return DraftTree.chain([3] * 10)


class Forgetful(FixedLength):
    def forget(self, request_id):
        raise ArithmeticError("of the policy")


def test_policies_that_fail_when_a_request_leaves(model, caplog):
    with Engine(model, SmartSpecConfig(suffix(), policy=Forgetful(3)), max_batch_size=2) as engine:
        names = [engine.add_request([3, 4], max_new_tokens=3) for _ in range(5)]
        assert all(engine.get_result(name, timeout=TIMEOUT) is not None for name in names)
    assert not engine._runner._pending


def test_bounds_of_requests_hold_whatever_the_source_proposes(model):
    with Engine(model, SmartSpecConfig(Wide(), num_nodes=8)) as engine:
        name = engine.add_request([3, 4], assistant=SmartSpecConfig(Wide(), num_nodes=1), **LONG)
        output = engine.get_result(name, timeout=TIMEOUT)
    assert 0 < output.statistics.drafted_tokens <= output.statistics.steps


def test_one_draft_model_is_one_source(model):
    draft = noisy_copy(model)
    with Engine(model, "none", max_batch_size=4) as engine:
        with engine.pause():
            names = [engine.add_request([3, 4, 5 + i], assistant=draft, max_new_tokens=9) for i in range(4)]
            sources = {pending.call.source for pending in engine._runner._inbox}
        assert len(sources) == 1 and isinstance(sources.pop(), DraftModelCandidates)
        for i, name in enumerate(names):
            expected = Asked([3, 4, 5 + i], {"max_new_tokens": 9}).alone(model)
            assert engine.get_result(name, timeout=TIMEOUT).generated_tokens == expected


def test_handed_out_statistics_stay_as_they_were(model):
    with Engine(model, suffix()) as engine:
        name = engine.add_request([3, 4, 5], streaming=True, max_new_tokens=400, eos_token_id=None)
        outputs = list(engine.request_id_iter(name))
    assert len(outputs) > 1
    for output in outputs:  # every step yields its accepted tokens and one more
        assert len(output.generated_tokens) <= output.statistics.steps + output.statistics.accepted_tokens
    assert outputs[0].statistics.steps < outputs[-1].statistics.steps


def test_pause_during_stop(model):
    engine = Engine(model, "none").start()
    engine.add_request([3, 4], **LONG)
    stopper = threading.Thread(target=lambda: engine.stop(drain=False))
    stopper.start()
    with engine.pause():
        pass
    stopper.join(TIMEOUT)
    assert not stopper.is_alive()


def test_an_engine_that_nobody_holds_stops(model):
    engine = Engine(model, suffix()).start()
    name = engine.add_request(list(range(3, 9)), streaming=True, max_new_tokens=4000, eos_token_id=None)
    runner, results, reference = engine._runner, engine.results, weakref.ref(engine)
    outputs = engine.request_id_iter(name)
    next(outputs)
    del engine
    gc.collect()
    assert reference() is not None and runner.is_running, "somebody reads"
    next(outputs)
    del outputs
    gc.collect()
    runner.session.join(TIMEOUT)
    assert reference() is None and not runner.is_running
    output = results.get(name, 0)
    assert output.finish_reason == "cancelled" and 0 < len(output.generated_tokens) < 4000


def test_who_stops_late_does_not_end_what_another_thread_has_started(model, monkeypatch):
    """All has been answered when both stop the engine; one of them is slow, and comes when it runs again."""
    engine = Engine(model, "none").start()
    waited, may_go, wait = threading.Event(), threading.Event(), engine.results.wait_until_answered

    def wait_long(timeout):
        wait(timeout)
        waited.set()
        assert may_go.wait(TIMEOUT)

    monkeypatch.setattr(engine.results, "wait_until_answered", wait_long)
    late = threading.Thread(target=engine.stop, daemon=True)
    late.start()
    assert waited.wait(TIMEOUT)
    engine.stop(drain=False)
    with engine.start():
        may_go.set()
        late.join(TIMEOUT)
        assert engine.is_running
        monkeypatch.undo()
        check_all(engine, model, [Asked([3, 4, 5], {"max_new_tokens": 4})])
