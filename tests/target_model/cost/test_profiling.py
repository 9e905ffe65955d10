"""Profiles: what is measured, where it is kept, and that the model is left alone."""

import json
import os
from dataclasses import replace
from threading import Event, Lock, Thread
from types import SimpleNamespace
from weakref import WeakKeyDictionary

import numpy as np
import pytest
import torch

from hf_smartspec.commands.main import main
from hf_smartspec.goodput import CostModel
from hf_smartspec.target_model.cost import measuring, profiling
from hf_smartspec.target_model.cost.measuring import Design
from hf_smartspec.target_model.cost.profiling import (
    keep_profile,
    load_or_profile,
    mend_profile,
    profile_model,
    profile_path,
)
from hf_smartspec.target_model.forward.packed import PackedForward
from hf_smartspec.target_model.model_state import ModelState
from hf_smartspec.target_model.written import written_decoder, written_decoders

from ...models import new_model, shared_model

FEW = (Design(1, 8, 1), Design(1, 8, 4), Design(3, 8, 1), Design(3, 16, 2), Design(2, 30, 3))


@pytest.fixture(autouse=True)
def _few_points(monkeypatch, tmp_path):
    monkeypatch.setattr(profiling, "HF_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(profiling, "DESIGN", FEW)
    monkeypatch.setattr(measuring, "_SECONDS", 0.0)
    monkeypatch.setattr(measuring, "_were_disturbed", lambda *_: False)


def test_the_model_and_the_random_states_stay_as_they_are():
    model = new_model("llama").requires_grad_(True).train()
    model.model.layers[0].eval()
    modes = [module.training for module in model.modules()]
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    implementation, state, numbers = model.config._attn_implementation, torch.get_rng_state(), np.random.get_state()
    profile_model(model, progress=False)
    assert [module.training for module in model.modules()] == modes
    assert model.config._attn_implementation == implementation
    assert torch.equal(torch.get_rng_state(), state) and (np.random.get_state()[1] == numbers[1]).all()
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None and parameter.requires_grad for parameter in model.parameters())
    assert torch.is_grad_enabled()


def test_a_profile_is_measured_once_and_kept(monkeypatch):
    model, other = new_model("llama"), new_model("llama")
    cost = load_or_profile(model)
    assert load_or_profile(model) is cost, "one object per model: what it learns is not lost"

    def fail(*_, **__):
        raise AssertionError("measured again")

    monkeypatch.setattr(profiling, "profile_model", fail)
    assert load_or_profile(other) == cost, "from disk"
    with pytest.raises(AssertionError, match="measured again"):
        load_or_profile(model, refresh=True)
    profile_path(other).write_text("{ half a file")
    with pytest.raises(AssertionError, match="measured again"):
        load_or_profile(new_model("llama"))
    assert [path.suffix for path in profile_path(model).parent.iterdir()] == [".json"], "no temporary files"


def test_a_model_in_another_dtype_is_another_model():
    model = new_model("llama")
    cost = load_or_profile(model)
    assert load_or_profile(model.bfloat16()) is not cost
    assert load_or_profile(model.float()) is cost, "what it has learnt is not lost"


def test_another_setting_has_another_profile(monkeypatch):
    model = new_model("llama")
    paths = {profile_path(model), profile_path(new_model("gpt2")), profile_path(new_model("llama").bfloat16())}
    monkeypatch.setattr(torch, "get_num_threads", lambda: 77)
    paths.add(profile_path(model))
    monkeypatch.setattr(torch, "__version__", "99.0")
    paths.add(profile_path(model))
    assert len(paths) == 5
    assert profile_path(new_model("llama")) == profile_path(model)


def test_another_mode_has_another_profile():
    model = new_model("llama")
    cost, path = load_or_profile(model), profile_path(model)
    with written_decoders(False):
        assert profile_path(model) != path and load_or_profile(model) is not cost
        assert "own forward" in json.loads(profile_path(model).read_text())["key"]["mode"]
    assert "written out" in json.loads(path.read_text())["key"]["mode"] and profile_path(model) == path


@pytest.mark.parametrize("dropout, mode", [(0.1, "own forward"), (0.0, "written out")])
def test_a_model_in_training_is_measured_and_filed_by_the_forward_that_runs_it(monkeypatch, dropout, mode):
    model, measured = new_model("llama", attention_dropout=dropout).train(), []
    own = PackedForward._run

    def noting(forward, *args):
        measured.append(forward._choose is not None and forward._choose() is not None)
        return own(forward, *args)

    monkeypatch.setattr(PackedForward, "_run", noting)
    if written_decoder(model) is not None:  # which is tried out before
        measured.clear()
    cost = load_or_profile(model)
    assert measured and set(measured) == {mode == "written out"}
    assert mode in json.loads(profile_path(model).read_text())["key"]["mode"]
    assert load_or_profile(model) is cost


def wrong_profile():
    """One that has proved wrong about the sizes that were not disturbed while it was measured."""
    cost = CostModel(0.0, 1.0, 1.0)
    prove_wrong(cost)
    return cost


@pytest.fixture
def next_process(monkeypatch):
    """Has nothing in memory."""

    def begin():
        states = WeakKeyDictionary()
        monkeypatch.setattr(profiling, "state_of", lambda model: states.setdefault(model, ModelState(model)))
        monkeypatch.setattr(profiling, "_mended", set())

    begin()
    return begin


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
            assert has_ended_or_waits.wait(60)
        return found

    thread = Thread(target=refresh)
    monkeypatch.setattr(profiling, "_lock", Watched())
    monkeypatch.setattr(profiling, "read_profile", read_slowly)
    mend_profile(model, wrong)
    thread.join(60)
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


def test_files_of_an_older_format_are_measured_anew(monkeypatch, next_process):
    model = new_model("llama")
    monkeypatch.setattr(profiling, "_FORMAT", 1)
    old, cost = profile_path(model), load_or_profile(model)
    monkeypatch.setattr(profiling, "_FORMAT", 2)
    next_process()
    assert profile_path(model) != old and load_or_profile(model) is not cost and profile_path(model).exists()


def test_a_place_that_cannot_be_written_costs_the_file_only(tmp_path):
    (tmp_path / "home").write_text("a file in the way")
    assert isinstance(load_or_profile(new_model("llama")), CostModel)


def test_the_command_prints_draws_and_keeps(tmp_path, capsys, monkeypatch):
    from hf_smartspec.commands.profile import command as profile

    monkeypatch.setattr(profile, "DESIGN", FEW)
    monkeypatch.setattr(profile, "HELD_OUT", (Design(2, 8, 2), Design(1, 20, 3)))
    folder, picture, numbers = tmp_path / "model", tmp_path / "profile.png", tmp_path / "profile.json"
    shared_model("llama").save_pretrained(folder)
    arguments = ["profile", str(folder), "--dtype", "float32", "--device", "cpu", "--json", str(numbers)]
    assert main([*arguments, "--show", str(picture)]) == 0
    printed = capsys.readouterr().out
    assert "measured now" in printed and "ride free" in printed and printed.count("median error") == 2
    assert picture.read_bytes().startswith(b"\x89PNG")
    report = json.loads(numbers.read_text())
    assert [len(report["points"][name]) for name in ("design", "held out")] == [5, 2]
    cost = CostModel.from_dict(report["cost"])
    for point in report["points"]["design"]:
        tokens = point["rows"] * point["width"]
        predicted = cost.seconds(point["rows"] * point["context"], tokens, point["width"])
        assert point["predicted"] == pytest.approx(float(predicted))
    assert json.loads(profile_path(shared_model("llama")).read_text())["times"] == 0, "somebody asked for it"
    assert main(arguments) == 0
    assert "as kept in" in capsys.readouterr().out
    assert json.loads(numbers.read_text())["cost"] == report["cost"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere/at/all"], "no such model folder"),
        (["MODEL", "--show", "no/such/folder/x.png"], "no such folder"),
        (["MODEL", "--parameters", "10"], "--parameters"),
        (["MODEL", "--threads", "0"], "--threads"),
    ],
)
def test_bad_arguments_are_one_line(arguments, message, tmp_path, capsys):
    shared_model("llama").save_pretrained(tmp_path / "model")
    line = ["profile", *(str(tmp_path / "model") if item == "MODEL" else item for item in arguments)]
    try:
        status = main(line)
    except SystemExit as error:
        status = error.code
    assert status == 2
    error = capsys.readouterr().err
    assert message in error and "Traceback" not in error
