"""Commands where the demo's models and prompts are missing, as in a wheel: each says what to pass."""

import pytest

from hf_smartspec.commands.common import models

from ...folders import save_tiny_models
from ..helpers import call


@pytest.fixture(autouse=True)
def _no_demo(monkeypatch):
    monkeypatch.setattr(models, "_PARTS", ("no such file",))


@pytest.mark.parametrize(
    ("arguments", "needed"),
    [
        (["generate", "x"], "--model"),
        (["chat"], "--model"),
        (["bench", "generate"], "FILE and --model"),
        (["bench", "load"], "FILE and --model"),
        (["replay", "{file}"], "--tokenizer"),
        (["tune", "{file}"], "--tokenizer"),
    ],
)
def test_a_command_says_what_to_pass(arguments, needed, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data.jsonl").write_text('{"prompt": "a", "response": "b"}\n')
    assert call(*(argument.format(file="data.jsonl") for argument in arguments)) == 2
    error = capsys.readouterr().err
    remedy = f"name {needed}, or call this in a checkout" if needed else "package: call this in a checkout"
    assert "come with the repository, not the package" in error and remedy in error and error.count("\n") == 1


def test_prompts_are_missing_where_only_the_model_is_named(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert call("bench", "load", "--model", save_tiny_models(tmp_path) / "target") == 2
    assert "name FILE, or call this in a checkout" in capsys.readouterr().err
