"""Commands that are interrupted show and write what they have."""

import json

from hf_smartspec.commands import main as cli
from hf_smartspec.commands.verify import command as verify

from ..folders import save_tiny_models


def interrupt(*_, **__):
    raise KeyboardInterrupt


def test_verify_shows_what_was_compared_and_that_it_is_not_all(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(verify.Verifier, "check_scores", interrupt)
    folder, path = save_tiny_models(tmp_path), tmp_path / "report.json"
    short = ["--num-prompts", "2", "--batch-sizes", "2", "--max-new-tokens", "8", "--threads", "1"]
    assert cli.main(["verify", str(folder / "target"), *short, "--json", str(path)]) == cli.INTERRUPTED
    assert "interrupted: only the comparisons that are shown were made" in capsys.readouterr().out
    assert json.loads(path.read_text())["tokens"]
