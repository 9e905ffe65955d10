"""Benches that are interrupted show and write what they have."""

import json

import pytest

from benchmarks.step.overhead import command as overhead
from hf_smartspec.commands.main import INTERRUPTED

from ..models import new_model
from .helpers import bench


def interrupt(*_, **__):
    raise KeyboardInterrupt


def test_overhead_shows_what_was_measured(tmp_path, monkeypatch, capsys):
    row = {"batch_size": 1, "width": 4, "plain": 0.2, "packed": 0.1, "ratio": 0.5}
    monkeypatch.setattr(overhead, "_model", lambda args: new_model("llama"))
    monkeypatch.setattr(overhead, "forward_overhead", lambda *_: row)
    monkeypatch.setattr(overhead, "step_overhead", interrupt)
    path = tmp_path / "overhead.json"
    settings = ["--parts", "forward", "step", "--batch-sizes", "1", "--widths", "4", "--threads", "1"]
    assert bench("overhead", *settings, "--json", path) == INTERRUPTED
    captured = capsys.readouterr()
    assert "0.500" in captured.out and captured.err == "benchmarks: interrupted\n"
    assert json.loads(path.read_text())["results"]["forward"]["1, 4"]["ratio"] == 0.5


@pytest.mark.parametrize("arguments", [["--batch-sizes", "0"], ["--device", "gpu9"], ["--json", "/nowhere/x.json"]])
def test_overhead_refuses_bad_arguments_in_one_line(arguments, capsys):
    assert bench("overhead", *arguments) == 2 and capsys.readouterr().err.count("\n") == 1
