"""Profiles that steps prove wrong, or that were measured in noise: when they are corrected, and measured again."""

import json
import os
from dataclasses import replace
from threading import Event, Lock, Thread
from types import SimpleNamespace

import numpy as np
import pytest

from hf_smartspec.goodput import CostModel
from hf_smartspec.target_model.cost import profiling
from hf_smartspec.target_model.cost.profiling import (
    keep_profile,
    load_or_profile,
    mend_profile,
    profile_path,
)

from ...models import new_model
from ...serving.helpers import TIMEOUT

pytestmark = pytest.mark.usefixtures("few_points")


def wrong_profile():
    """One that has proved wrong about the sizes that were not disturbed while it was measured."""
    cost = CostModel(0.0, 1.0, 1.0)
    prove_wrong(cost)
    return cost


@pytest.fixture
def machine(monkeypatch):
    """Says what is measured (`costs`, one after the other), how often it was, and whether the machine is busy."""
    state = SimpleNamespace(costs=[], num_measured=0, is_busy=False)

    def profile(*_):
        state.num_measured += 1
        return replace(state.costs.pop(0) if len(state.costs) > 1 else state.costs[0])

    monkeypatch.setattr(profiling, "profile_model", profile)
    monkeypatch.setattr(profiling, "is_busy", lambda: state.is_busy)
    return state


RIGHT = CostModel(0.0, 1.0, 1.0)


NOISY = CostModel(0.0, 20.0, 15.0, is_provisional=True)


def prove_wrong(cost, times=100):
    for _ in range(times):
        cost.observe(0, 1, 2.0)
        cost.observe(0, 64, 6.5)
    assert cost.is_wrong


def test_a_profile_that_proves_wrong_is_mended_and_measured_anew_as_soon_as_the_machine_is_quiet(
    monkeypatch, next_process, machine
):
    model, lines, better = new_model("llama"), [], CostModel(0.0, 2.0, 1.0)
    monkeypatch.setattr(profiling.logger, "warning", lines.append)
    machine.costs = [RIGHT, better]
    wrong = load_or_profile(model)
    prove_wrong(wrong)
    for _ in range(3):
        mend_profile(model, wrong)
    assert len(lines) == 1 and "measured anew" in lines[0]
    assert load_or_profile(model) is wrong, "what this process has learnt is not lost"
    next_process()
    machine.is_busy = True
    mended = load_or_profile(model)
    assert mended == replace(wrong.mended(), is_provisional=True) and machine.num_measured == 1
    assert mended.seconds(0, np.array([1, 64])) == pytest.approx([2.0, 6.5], rel=0.05)
    next_process()
    machine.is_busy = False
    assert load_or_profile(model) == better and machine.num_measured == 2
    next_process()
    assert load_or_profile(model) == better and machine.num_measured == 2, "from disk"


def test_a_profile_of_a_busy_machine_is_mended_while_that_stays_busy(next_process, machine):
    model, machine.costs, machine.is_busy = new_model("llama"), [NOISY], True
    cost = load_or_profile(model)
    for _ in range(30):
        cost.observe(0, 1, 2.0)
    mend_profile(model, cost)
    next_process()
    assert load_or_profile(model).seconds(0, 1) == pytest.approx(2.0, rel=0.05) and machine.num_measured == 1
    assert keep_profile(model, NOISY) == load_or_profile(model), (
        "nor does a dearer one of a busy machine take its place"
    )


def test_a_profile_is_mended_as_a_whole_or_not_at_all(monkeypatch, next_process, machine):
    model, machine.costs, replace_file = new_model("llama"), [RIGHT], os.replace

    def fail(*_):
        raise OSError("the disk is full")

    cost = load_or_profile(model)
    prove_wrong(cost)
    monkeypatch.setattr(os, "replace", fail)
    mend_profile(model, cost)
    monkeypatch.setattr(os, "replace", replace_file)
    next_process()
    assert load_or_profile(model) == RIGHT
    assert len(list(profile_path(model).parent.iterdir())) == 1, "no temporary files"


def test_a_model_whose_profiles_always_prove_wrong_is_not_measured_for_ever(next_process, machine):
    model, machine.costs = new_model("llama"), [RIGHT]
    for _ in range(8):
        cost = load_or_profile(model)
        if cost == RIGHT:
            prove_wrong(cost)
        mend_profile(model, cost)
        next_process()
    assert machine.num_measured == profiling._MOST_TIMES
    assert cost != RIGHT and not cost.is_provisional, "what steps have shown stands"
    load_or_profile(model, refresh=True)
    assert machine.num_measured == profiling._MOST_TIMES + 1, "who asks for it gets it"


def test_measurements_that_somebody_asked_for_use_none_of_those_taken_unasked(next_process, machine):
    model, better, machine.costs = new_model("llama"), CostModel(0.0, 2.0, 1.0), [RIGHT]
    for _ in range(2 * profiling._MOST_TIMES):
        cost = load_or_profile(model, refresh=True)
        next_process()
    cost, machine.costs = load_or_profile(model), [better]
    prove_wrong(cost)
    mend_profile(model, cost)
    next_process()
    assert load_or_profile(model) == better


def test_a_profile_that_another_thread_measures_meanwhile_is_not_mended(next_process, machine, monkeypatch):
    model, better, machine.costs = new_model("llama"), CostModel(0.0, 2.0, 1.0), [RIGHT]
    wrong, machine.costs = load_or_profile(model), [better]
    prove_wrong(wrong)
    has_ended_or_waits, read = Event(), profiling.read_profile

    class Watched:
        def __init__(self):
            self.lock = Lock()

        def __enter__(self):
            if not self.lock.acquire(blocking=False):
                has_ended_or_waits.set()
                self.lock.acquire()

        def __exit__(self, *_):
            self.lock.release()

    def refresh():
        load_or_profile(model, refresh=True)
        has_ended_or_waits.set()

    def read_slowly(model):
        found = read(model)
        if not thread.ident:
            thread.start()
            assert has_ended_or_waits.wait(TIMEOUT)
        return found

    thread = Thread(target=refresh)
    monkeypatch.setattr(profiling, "_lock", Watched())
    monkeypatch.setattr(profiling, "read_profile", read_slowly)
    mend_profile(model, wrong)
    thread.join(TIMEOUT)
    assert read(model) == better


def test_a_profile_taken_in_noise_is_used_and_gives_way_to_one_taken_in_quiet(next_process, machine):
    model, machine.costs, machine.is_busy = new_model("llama"), [NOISY, RIGHT], True
    for _ in range(3):
        assert load_or_profile(model) == NOISY and machine.num_measured == 1, "not measured in noise again"
        next_process()
    machine.is_busy = False
    assert load_or_profile(model) == RIGHT
    next_process()
    assert load_or_profile(model) == RIGHT and machine.num_measured == 2


@pytest.mark.parametrize(
    ("kept", "measured", "stands"),
    [
        (RIGHT, NOISY, RIGHT),
        (NOISY, replace(NOISY, delta=30.0), NOISY),
        (NOISY, replace(NOISY, delta=5.0), replace(NOISY, delta=5.0)),
        (NOISY, RIGHT, RIGHT),
        (RIGHT, CostModel(0.0, 1.0, 2.0), CostModel(0.0, 1.0, 2.0)),  # measured in quiet: it is the truth today
        (None, NOISY, NOISY),
    ],
)
def test_of_two_profiles_the_lower_one_stands_unless_a_quiet_one_says_more(
    kept, measured, stands, next_process, machine
):
    model, machine.is_busy = new_model("llama"), True
    if kept is not None:
        keep_profile(model, kept)
    assert keep_profile(model, measured) == stands == load_or_profile(model)


def test_a_good_profile_that_is_used_under_load_stays(next_process, machine):
    """Steps take much longer, those of some sizes more so, and no two are alike."""
    model, machine.costs, rng = new_model("llama"), [RIGHT, NOISY], np.random.default_rng(0)
    cost = load_or_profile(model)
    for _ in range(300):
        for size, factor in ((1, 8.0), (16, 3.0)):
            cost.observe(0, size, float(RIGHT.seconds(0, size)) * factor * rng.lognormal(0, 0.5))
    machine.is_busy = True
    mend_profile(model, cost)
    next_process()
    assert load_or_profile(model) == RIGHT and machine.num_measured == 1
    assert load_or_profile(model, refresh=True) == RIGHT, "nor does noise take its place when somebody asks for it"


def test_what_another_process_has_measured_meanwhile_is_not_mended(next_process, machine):
    model, machine.costs = new_model("llama"), [RIGHT]
    wrong, better = load_or_profile(model), CostModel(0.0, 2.0, 1.0)
    prove_wrong(wrong)
    keep_profile(model, better)
    mend_profile(model, wrong)
    next_process()
    assert load_or_profile(model) == better


def test_a_profile_is_mended_once_in_a_process(monkeypatch, next_process):
    model, wrong, paths = new_model("llama"), wrong_profile(), []
    monkeypatch.setattr(profiling, "profile_model", lambda *_: wrong)
    load_or_profile(model)
    mend_profile(model, wrong)
    monkeypatch.setattr(profiling, "profile_path", paths.append)
    mend_profile(model, wrong)
    mend_profile(model, wrong_profile())  # somebody's own
    assert not paths, "its name is made of all of the model's parameters"


def test_only_a_profile_that_steps_have_proved_wrong_is_mended():
    model = new_model("llama")
    cost = load_or_profile(model)
    mend_profile(model, cost)
    mend_profile(model, wrong_profile())  # somebody's own, of another machine
    assert json.loads(profile_path(model).read_text())["cost"] == json.loads(json.dumps(cost.as_dict()))
