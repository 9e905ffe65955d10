"""Profiles: what is measured, where it is kept, and that the model is left alone."""

import json

import numpy as np
import pytest
import torch

from hf_smartspec.commands.main import main
from hf_smartspec.cpu.few_tokens import has_kernels
from hf_smartspec.cpu.screening import has_screening
from hf_smartspec.goodput import CostModel
from hf_smartspec.target_model.cost import profiling
from hf_smartspec.target_model.cost.measuring import Design
from hf_smartspec.target_model.cost.profiling import (
    load_or_profile,
    profile_model,
    profile_path,
)
from hf_smartspec.target_model.forward.packed import PackedForward
from hf_smartspec.target_model.written import written_decoder, written_decoders

from ...models import new_model, shared_model

pytestmark = pytest.mark.usefixtures("few_points")


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


@pytest.mark.skipif(not has_kernels(torch.float32), reason="there is no compiled code for this CPU")
def test_no_step_of_a_model_whose_profile_is_on_disk_tries_out_its_program_or_copies_its_head():
    load_or_profile(new_model("llama", head_dim=16, vocab_size=2**16))
    model = new_model("llama", head_dim=16, vocab_size=2**16)
    load_or_profile(model)
    decoder = written_decoder(model)
    assert decoder is not None and decoder._is_tried
    assert (decoder._compiled.screen.kept is not None) == has_screening(torch.float32)


def test_a_model_that_cannot_be_warmed_up_has_a_profile_all_the_same(monkeypatch):
    cost = load_or_profile(new_model("llama"))

    def fail(model):
        raise RuntimeError("not enough memory")

    monkeypatch.setattr(profiling, "warm_up", fail)
    model = new_model("llama")
    assert load_or_profile(model) == cost and load_or_profile(model) is load_or_profile(model)


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
        measured.append(forward._choose is not None and forward._choose(False) is not None)
        return own(forward, *args)

    monkeypatch.setattr(PackedForward, "_run", noting)
    if written_decoder(model) is not None:  # which is tried out before
        measured.clear()
    cost = load_or_profile(model)
    assert measured and set(measured) == {mode == "written out"}
    assert mode in json.loads(profile_path(model).read_text())["key"]["mode"]
    assert load_or_profile(model) is cost


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

    monkeypatch.setattr(profile, "DESIGN", profiling.DESIGN)
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
