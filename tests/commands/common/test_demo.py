"""Commands where the demo's models and prompts are missing, as in a wheel: each says what to pass."""

import pytest

from hf_smartspec.commands.common import models

from ...folders import save_tiny_models
from ..helpers import call, check_demo_is_needed


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
    check_demo_is_needed(call, arguments, needed, tmp_path, monkeypatch, capsys)


def test_prompts_are_missing_where_only_the_model_is_named(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(models, "_PARTS", ("no such file",))
    monkeypatch.chdir(tmp_path)
    assert call("bench", "load", "--model", save_tiny_models(tmp_path) / "target") == 2
    assert "name FILE, or call this in a checkout" in capsys.readouterr().err
