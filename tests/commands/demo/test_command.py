"""`smartspec demo`: what cannot be is refused before anything is loaded."""

import socket

import pytest

from hf_smartspec.commands.common.models import demo_folder
from hf_smartspec.commands.demo import world
from hf_smartspec.commands.demo.world import AUTO, NONE

from ..helpers import call
from .conftest import GRADIO

pytestmark = GRADIO


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--host", "nowhere.invalid"], "cannot listen at nowhere.invalid"),
        (["--host", ""], "must name an address"),
        (["--port", "99999"], "must be at most 65535, got 99999"),
        (["--prompts", "no/such/file"], "no/such/file"),
        (["--draft", "./nothing"], "no such model folder: './nothing'"),
        (["--parameters", "-5"], "--parameters"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(arguments, message, capsys):
    port = [] if "--port" in arguments else ["--port", "0"]
    assert call("demo", *arguments, *port, "--device", "cpu") == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_a_port_in_use(capsys):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        assert call("demo", "--port", taken.getsockname()[1]) == 2
    assert "in use" in capsys.readouterr().err


def test_the_real_model_is_the_default_and_the_embedded_ones_learn(default_world, monkeypatch):
    from hf_smartspec.commands.demo.app import build_app

    embedded = str(demo_folder() / "models" / "target")
    monkeypatch.setattr(world, "real_model", lambda: embedded)
    monkeypatch.setattr(world, "_REAL", ("eagle3",))
    found = default_world()
    assert found.model.name_or_path == embedded and not found.is_enlarged
    assert set(found.names) == {AUTO, "prompt_lookup", "eagle3", NONE} and not found.draft_models()
    assert list(found.prompts) == ["chat", "summary", "math", "code", "sql", "edit"]
    assert found.learner.draft_models() == ["draft"] and found.learner.worker is found.worker
    assert "embedded models, of which one can learn" in str(build_app(found).get_config_file())
