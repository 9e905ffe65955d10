"""Load and learning without a browser."""

import threading

import pytest

from hf_smartspec.commands.demo import load
from hf_smartspec.commands.demo.learning import RANDOM, LearningSettings, learning_html, run_learning
from hf_smartspec.commands.demo.load import LoadSettings, load_html, run_load
from hf_smartspec.commands.demo.world import AUTO, RefusedError


def test_a_load_is_served_without_speculation_and_with_it(world, monkeypatch):
    monkeypatch.setattr(load, "_PATIENCE", 1000.0)  # a busy machine takes its time
    settings = LoadSettings(AUTO, ["sql"], rate=8.0, seconds=0.5, max_new_tokens=12)
    frames = [
        (doing, runs, load_html(doing, settings, runs)) for doing, runs in run_load(world, settings, threading.Event())
    ]
    plain, drafted = frames[-1][1]
    for run in (plain, drafted):
        assert run.num_sent == len(run.outputs) == 4 and not run.was_cut and len(run.latencies) == 4
        assert run.num_tokens >= sum(len(item.generated_tokens) for item in run.outputs)
        times = [time for time, *_ in run.buckets()]
        assert times == sorted(times) and sum(item[3] for item in run.buckets()) == pytest.approx(run.num_tokens)
    texts = [sorted((tuple(x.prompt_ids), tuple(x.generated_tokens)) for x in run.outputs) for run in (plain, drafted)]
    assert texts[0] == texts[1]
    assert sum(step[2] for step in plain.steps) == 0
    page = frames[-1][2]
    assert page.count("<svg") == 3 and "4 / 4" in page and "Draft nodes:" in page


def test_a_load_is_stopped(world):
    stop = threading.Event()
    stop.set()
    settings = LoadSettings(AUTO, ["sql"], rate=8.0, seconds=5.0, max_new_tokens=12)
    *_, (_, runs) = run_load(world, settings, stop)
    assert not runs and "Stopped" in load_html("", settings, runs)


@pytest.mark.parametrize(
    "changes, words", [({"categories": []}, "at least one kind"), ({"rate": 500.0}, "lower the rate")]
)
def test_loads_that_cannot_be_are_refused(world, changes, words):
    settings = LoadSettings(**{"source": AUTO, "categories": ["sql"]} | changes)
    with pytest.raises(RefusedError, match=words):
        next(run_load(world, settings, threading.Event()))


def test_a_draft_model_learns_before_ones_eyes(world):
    before = [item.detach().clone() for item in world.drafters.loaded(world.names["draft"]).parameters()]
    settings = LearningSettings("draft", RANDOM, ["sql"], num_requests=8, interval=2, max_new_tokens=12)
    *_, (doing, learnt) = run_learning(world, settings, threading.Event())
    assert not doing and len(learnt.rates) == len(learnt.lengths) == 8
    assert learnt.statistics.updates == len(learnt.updates) == 4 and learnt.updates[0][0] == 2
    assert {kind for _, kind in learnt.updates} <= {"taken", "dropped"} and "taken" in {
        kind for _, kind in learnt.updates
    }
    page = learning_html("", learnt)
    assert page.count("<svg") == 2 and page.count('class="mark') == 8 and page.count("<circle") == 16
    after = world.drafters.loaded(world.names["draft"]).parameters()
    assert all(bool((one == other).all()) for one, other in zip(before, after)), "a copy has learnt"


def test_learning_needs_a_draft_model(world):
    assert world.draft_models() == ["draft"]
    with pytest.raises(RefusedError, match="Only draft models"):
        next(run_learning(world, LearningSettings("medusa", RANDOM, ["sql"]), threading.Event()))
