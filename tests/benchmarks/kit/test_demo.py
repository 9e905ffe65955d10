"""Benches where the demo's models and prompts are missing: each says what to pass."""

import pytest

from hf_smartspec.commands.common import models

from ..helpers import bench


@pytest.mark.parametrize(
    ("arguments", "needed"),
    [
        (["timeline", "{file}"], "--model"),
        (["batch"], "FILE and --model"),
        (["queue"], "FILE and --model"),
        (["peers"], ""),
        (["memory"], "FILE and --model"),
        (["simulate"], "FILE and --model"),
        (["sources", "{file}"], "--model"),
    ],
)
def test_a_bench_says_what_to_pass(arguments, needed, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(models, "_PARTS", ("no such file",))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data.jsonl").write_text('{"prompt": "a", "response": "b"}\n')
    assert bench(*(argument.format(file="data.jsonl") for argument in arguments)) == 2
    error = capsys.readouterr().err
    remedy = f"name {needed}, or call this in a checkout" if needed else "package: call this in a checkout"
    assert "come with the repository, not the package" in error and remedy in error and error.count("\n") == 1
