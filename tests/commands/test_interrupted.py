"""Commands that are interrupted show and write what they have."""

import json

from hf_smartspec.commands import main as cli
from hf_smartspec.commands.verify import command as verify
from hf_smartspec.serving.engine import Engine

from ..folders import save_tiny_models
from .helpers import EMBEDDED


def interrupt(*_, **__):
    raise KeyboardInterrupt


def test_verify_shows_what_was_compared_and_that_it_is_not_all(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(verify.Verifier, "check_scores", interrupt)
    folder, path = save_tiny_models(tmp_path), tmp_path / "report.json"
    short = ["--num-prompts", "2", "--batch-sizes", "2", "--max-new-tokens", "8", "--threads", "1"]
    assert cli.main(["verify", str(folder / "target"), *short, "--json", str(path)]) == cli.INTERRUPTED
    assert "interrupted: only the comparisons that are shown were made" in capsys.readouterr().out
    assert json.loads(path.read_text())["tokens"]


def test_what_is_said_about_an_interrupted_answer_begins_a_line(monkeypatch, capsys):
    def outputs(engine, name):
        yield engine.get_result(name)
        interrupt()

    monkeypatch.setattr(Engine, "request_id_iter", outputs)
    words = ["--model", str(EMBEDDED), "--max-new-tokens", "12", "--threads", "1", "--device", "cpu"]
    assert cli.main(["generate", "What is a tree?", *words]) == cli.INTERRUPTED
    captured = capsys.readouterr()
    assert captured.out.strip() and captured.out.endswith("\n") and captured.err == "smartspec: interrupted\n"
