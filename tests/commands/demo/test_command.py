"""`smartspec demo`: what cannot be is refused before anything is loaded."""

import socket

import pytest

pytest.importorskip("gradio", reason="the page is made with Gradio")

from ..helpers import call


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
