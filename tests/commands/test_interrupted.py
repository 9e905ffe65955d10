"""Commands that are interrupted show and write what they have."""

import json

import pytest

from hf_smartspec.commands import main as cli
from hf_smartspec.commands.overhead import command as overhead
from hf_smartspec.commands.verify import command as verify

from ..folders import save_tiny_models


def interrupt(*_, **__):
    raise KeyboardInterrupt


def test_overhead_shows_what_was_measured(tmp_path, monkeypatch, capsys):
    row = {"batch_size": 1, "width": 4, "plain": 0.2, "packed": 0.1, "ratio": 0.5}
    monkeypatch.setattr(overhead, "forward_overhead", lambda *_: [row])
    monkeypatch.setattr(overhead, "step_overhead", interrupt)
    path = tmp_path / "overhead.json"
    settings = ["--parts", "forward", "step", "--layers", "1"]
    assert cli.main(["bench", "overhead", *settings, "--json", str(path)]) == cli.INTERRUPTED
    assert "median packed / plain: 0.500" in capsys.readouterr().out
    assert json.loads(path.read_text())["forward"] == [row]


def test_verify_shows_what_was_compared_and_that_it_is_not_all(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(verify.Verifier, "check_scores", interrupt)
    folder, path = save_tiny_models(tmp_path), tmp_path / "report.json"
    short = ["--num-prompts", "2", "--batch-sizes", "2", "--max-new-tokens", "8", "--threads", "1"]
    assert cli.main(["verify", str(folder / "target"), *short, "--json", str(path)]) == cli.INTERRUPTED
    assert "interrupted: nothing but what is shown was compared" in capsys.readouterr().out
    assert json.loads(path.read_text())["tokens"]


@pytest.mark.parametrize("arguments", [["--batch-sizes", "0"], ["--device", "gpu9"], ["--json", "/nowhere/x.json"]])
def test_overhead_refuses_bad_arguments_in_one_line(arguments, capsys):
    try:
        status = cli.main(["bench", "overhead", *arguments])
    except SystemExit as error:
        status = error.code
    assert status == 2 and capsys.readouterr().err.count("\n") == 1
