"""The overhead benchmark runs on a small model and reports what it promises."""

import json

import pytest
from transformers import AutoModelForCausalLM, PreTrainedModel

from benchmarks.step.overhead import command as overhead
from benchmarks.step.overhead import host
from hf_smartspec import SmartSpecConfig
from hf_smartspec.target_model.written import written_decoder
from tests.benchmarks.helpers import bench
from tests.models import new_model


@pytest.fixture
def small(monkeypatch):
    """A model of random weights that takes no time, and one row of host time: none of it, with a limit."""
    row = {"drafts": "none", "rows": 1, "nodes_per_row": 0.0, "python_calls": 9.0, "milliseconds": 2.0}
    row |= {"least_milliseconds": 1.0, "limit": 3.0, "is_met": True}
    monkeypatch.setattr(host, "_measured", lambda drafts, num_rows, num_steps: row | {"drafts": drafts})
    monkeypatch.setattr(overhead, "CONTEXT", 8)
    monkeypatch.setattr(overhead, "random_llama", lambda *_: new_model("llama", eos_token_id=None))
    return row


def test_report_holds_every_setting_and_is_written_as_json(small, tmp_path, capsys):
    path = tmp_path / "overhead.json"
    settings = ["--layers", "1", "--batch-sizes", "1", "2", "--widths", "1", "3", "--repeats", "1", "--host-steps", "2"]
    assert bench("overhead", *settings, "--dtype", "float32", "--threads", "1", "--json", path) == 0
    results = json.loads(path.read_text())["results"]
    assert len(results["host"]) == len(host.DRAFTS) * len(host.ROWS)
    forward = list(results["forward"].values())
    assert [(row["batch_size"], row["width"]) for row in forward] == [(1, 1), (1, 3), (2, 1), (2, 3)]
    assert all(row["plain"] > 0 and row["ratio"] == row["packed"] / row["plain"] for row in forward)
    assert all(0 < row["outside_share"] < 1 for row in results["step"].values()) and len(results["step"]) == 3
    (row,) = results["no_speculation"].values()
    assert row["plain_tokens"] == row["engine_tokens"]
    out = capsys.readouterr().out
    assert "packed / plain" in out and "yes every limit is met" in out


def test_a_model_of_ones_own_is_measured(small, folder, tmp_path):
    path = tmp_path / "overhead.json"
    sizes = ["--batch-sizes", "1", "--widths", "1", "--repeats", "1", "--dtype", "float32", "--threads", "1"]
    assert bench("overhead", "--parts", "forward", "--model", folder / "target", *sizes, "--json", path) == 0
    (row,) = json.loads(path.read_text())["results"]["forward"].values()
    assert row["parameters"] == AutoModelForCausalLM.from_pretrained(folder / "target").num_parameters()


def test_a_limit_that_is_missed_fails(small, capsys):
    small |= {"is_met": False}
    assert bench("overhead", "--parts", "host", "--threads", "1") == 1
    assert "NO  every limit is met: missed: none at 1" in capsys.readouterr().out


def test_steps_are_timed_with_decoders_written_out():
    model, draft = (new_model("llama", eos_token_id=None) for _ in range(2))
    written_decoder(model), written_decoder(draft)  # which compares them with their own forwards
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PreTrainedModel, "__call__", _refuse)
        for config in (SmartSpecConfig(draft, num_nodes=4), SmartSpecConfig("prompt_lookup", num_nodes=4)):
            row = overhead.step_overhead(model, draft, config, batch_size=2, repeats=1)
            assert 0 < row["inside"] < row["total"] and row["steps"] > 4


def _refuse(*_, **__):
    raise AssertionError("the model's own forward runs")
