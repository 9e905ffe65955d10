"""Learning in a thread of its own: on spare capacity, and without being in anybody's way."""

import gc
import os
import signal
import subprocess
import sys
import threading

import pytest
from transformers.generation import BaseStreamer

from hf_smartspec import (
    DraftModelCandidates,
    Engine,
    OnlineDistillation,
    enable,
)
from hf_smartspec.online.learner import Learner

from .helpers import EAGER, TIMEOUT, are_equal, generate, new_drafter, new_target, weights_of


@pytest.fixture
def target():
    return enable(new_target())


@pytest.fixture
def work(monkeypatch):
    """Semaphores of pieces of work: those that have begun, and those that may."""
    begun, allowed = threading.Semaphore(0), threading.Semaphore(0)
    original = Learner._loss

    def loss(self, batch):
        begun.release()
        assert allowed.acquire(timeout=TIMEOUT)
        return original(self, batch)

    monkeypatch.setattr(Learner, "_loss", loss)
    return begun, allowed


class Pausing(BaseStreamer):
    """Holds the engine up in the middle of a request."""

    def __init__(self):
        self.has_begun, self.may_go_on = threading.Event(), threading.Event()

        self.is_prompt = True

    def put(self, value):
        if self.is_prompt:  # comes in the thread that asks
            self.is_prompt = False
            return
        self.has_begun.set()
        assert self.may_go_on.wait(TIMEOUT)

    def end(self):
        pass


def test_it_learns_while_nothing_runs(target, work):
    online, draft = OnlineDistillation(**EAGER), new_drafter("draft", target)
    before = weights_of(draft)
    with Engine(target, draft, online=online) as engine:
        engine.get_result(engine.add_request([5, 6, 7], max_new_tokens=6))
        assert work[0].acquire(timeout=TIMEOUT)
        assert are_equal(before, weights_of(draft))
        work[1].release(100)
        assert online.wait(TIMEOUT)
        # Nobody is drafting: the weights are taken over at once.
        assert not are_equal(before, weights_of(draft))
    online.close()
    assert [(item.updates, item.swaps) for item in online.statistics.values()] == [(1, 1)]


def test_while_requests_run_nothing_is_learnt(target, work):
    in_pieces = EAGER | {"every_requests": 3, "batch_tokens": 9}
    online, draft, streamer = OnlineDistillation(**in_pieces), new_drafter("draft", target), Pausing()
    with Engine(target, draft, online=online) as engine:
        engine.generate([[5, 6, 7]] * 3, max_new_tokens=6)
        assert work[0].acquire(timeout=TIMEOUT)  # an update has begun
        name = engine.add_request([8, 9], max_new_tokens=6, streamer=streamer)
        assert streamer.has_begun.wait(TIMEOUT)
        assert not online.is_idle
        before = weights_of(draft)
        work[1].release(100)  # it may come to its end, but for capacity
        assert not online.wait(0.05)
        assert not work[0].acquire(blocking=False)
        streamer.may_go_on.set()
        engine.get_result(name)
        assert online.wait(TIMEOUT)
        assert not are_equal(before, weights_of(draft))
    online.close()


def test_what_was_learnt_is_taken_over_between_steps(target):
    online, draft, streamer = OnlineDistillation(**EAGER), new_drafter("draft", target), Pausing()
    with Engine(target, draft, online=online) as engine:
        name = engine.add_request([8, 9], max_new_tokens=6, streamer=streamer)
        assert streamer.has_begun.wait(TIMEOUT)
        (learner,) = online._learners.values()
        learner._pending = [item + 1 for item in learner.student.weights()]
        with online._changed:
            online._publish()
        assert learner.has_pending  # a loop may be drafting
        streamer.may_go_on.set()
        engine.get_result(name)
    assert learner.statistics.swaps >= 1
    online.close()


def test_learning_that_is_closed_ends(target, work):
    online = OnlineDistillation(**EAGER)
    with Engine(target, new_drafter("draft", target), online=online) as engine:
        engine.get_result(engine.add_request([5, 6, 7], max_new_tokens=6))
    work[1].release(100)
    online.close()
    assert not online._thread.is_alive()
    generate(target, online, new_drafter("draft", target))


def test_nobody_refers_to_it_any_more(target):
    online = OnlineDistillation(**EAGER)
    generate(target, online, new_drafter("draft", target))
    assert online.wait(TIMEOUT)
    thread = online._thread
    del online
    gc.collect()
    thread.join(TIMEOUT)
    assert not thread.is_alive()


def test_who_asks_for_an_update_gets_it_whatever_runs(target, work):
    in_pieces = EAGER | {"every_requests": 3, "batch_tokens": 9}
    online, draft, streamer = OnlineDistillation(**in_pieces), new_drafter("draft", target), Pausing()
    with Engine(target, draft, online=online) as engine:
        engine.generate([[5, 6, 7]] * 3, max_new_tokens=6)
        assert work[0].acquire(timeout=TIMEOUT)  # an update has begun
        engine.add_request([8, 9], max_new_tokens=6, streamer=streamer)
        assert streamer.has_begun.wait(TIMEOUT)
        work[1].release(100)
        online.update(only_due=False)
        assert [item.updates for item in online.statistics.values()] == [1]
        streamer.may_go_on.set()
    online.close()


class Halting(BaseStreamer):
    """Holds the engine up at every step."""

    def __init__(self):
        self.num, self.halts, self.may_go_on = 0, threading.Semaphore(0), threading.Semaphore(0)

    def put(self, value):
        self.num += 1
        if self.num > 1:  # the prompt comes first
            self.halts.release()
            assert self.may_go_on.acquire(timeout=TIMEOUT)

    def end(self):
        pass


@pytest.mark.parametrize("end", ["stop", "cancel"])
def test_who_waited_in_vain_keeps_nobody_from_learning(target, end):
    online, streamer = OnlineDistillation(background=False, **EAGER | {"every_requests": 100}), Halting()
    engine = Engine(target, new_drafter("draft", target), max_batch_size=1, online=online).start()
    names = [engine.add_request([5, 6, 7], max_new_tokens=30, streamer=streamer)]
    assert streamer.halts.acquire(timeout=TIMEOUT)
    names += [engine.add_request([5, 6, 7], max_new_tokens=3) for _ in range(2)]
    streamer.may_go_on.release()
    assert streamer.halts.acquire(timeout=TIMEOUT)
    assert list(online._loads.values()) == [(1, 2)]
    if end == "stop":
        engine._runner.ask_to_end()
    else:
        for name in names:
            engine.cancel_request(name)
    streamer.may_go_on.release(100)
    engine.stop(drain=False)
    assert not online._loads and online.is_idle


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_children_of_a_fork_in_the_middle_of_an_update_wait_for_nobody(target, work):
    online = OnlineDistillation(**EAGER)
    draft = new_drafter("draft", target)
    generate(target, online, draft)
    assert work[0].acquire(timeout=TIMEOUT)  # an update has begun
    (learner,) = online._learners.values()
    with online._changed, learner._lock:  # as another thread may, just then
        child = os.fork()
        if not child:
            signal.alarm(int(TIMEOUT))  # ends it, should it hang
            try:
                assert online.wait(TIMEOUT) and learner.statistics.requests == 2 and online._thread is None
                online.recorders([*learner.sources, DraftModelCandidates(draft)])
                assert online._thread.is_alive()
                online.close()
                os._exit(0)
            finally:
                os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    work[1].release(100)
    assert online.wait(TIMEOUT) and learner.statistics.swaps == 1
    online.close()


_EXIT = """
import threading, torch
from hf_smartspec import OnlineDistillation, SmartSpecConfig, enable
from hf_smartspec.online.learner import Learner
from tests.models import new_model

begun, original = threading.Semaphore(0), Learner._loss
Learner._loss = lambda self, batch: begun.release() or original(self, batch)
online = OnlineDistillation(every_requests=1, shadow=0, batch_tokens=8, passes=10**6)
assistant = SmartSpecConfig(new_model("llama", seed=1), num_nodes=2, online=online)
enable(new_model("llama")).generate(torch.tensor([[5, 6, 7]]), assistant=assistant, max_new_tokens=8)
for _ in range(5):
    assert begun.acquire(timeout=600)
"""


@pytest.mark.end_to_end
def test_programs_end_in_the_middle_of_learning():
    found = subprocess.run([sys.executable, "-c", _EXIT], capture_output=True, text=True, timeout=TIMEOUT)
    assert found.returncode == 0, found.stderr
