"""`smartspec transformers`: transformers' own command with every model enabled, for as long as it runs."""

import pytest
from transformers import GenerationMixin

from hf_smartspec import generate

from .helpers import call

pytest.importorskip("typer")
pytest.importorskip("fastapi")


@pytest.fixture
def calls(monkeypatch):
    from transformers.cli import transformers as cli
    from transformers.cli.serving import utils

    seen = []

    def app(arguments, prog_name):
        seen.append((arguments, generate._default_of(None).assistant, utils.CBGenerateManager.__name__))
        raise SystemExit(3)

    monkeypatch.setattr(cli, "app", app)
    return seen


def test_every_model_drafts_while_it_runs(calls):
    before = GenerationMixin.generate
    assert call("transformers", "serve", "model", "--port", 80) == 3
    assert call("transformers", "--assistant", "suffix+prompt_lookup", "chat", "--help") == 3
    assert calls == [
        (["serve", "model", "--port", "80"], "auto", "RequestwiseGenerateManager"),
        (["chat", "--help"], ["suffix", "prompt_lookup"], "CBGenerateManager"),
    ]
    assert GenerationMixin.generate is before


def test_errors_are_one_line(calls, capsys):
    assert call("transformers") == 2
    assert "a command of transformers is missing" in capsys.readouterr().err
    assert call("transformers", "--assistant", "nonsense", "serve") == 2
    assert "--assistant: " in capsys.readouterr().err
    assert not calls and generate._default_of(None) is None
