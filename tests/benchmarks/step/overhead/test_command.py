"""The overhead benchmark runs on a small model and reports what it promises."""

import argparse
import json

import pytest
from transformers import PreTrainedModel

from benchmarks.step.overhead import command as overhead
from benchmarks.step.overhead.arguments import add_arguments
from hf_smartspec.target_model.written import written_decoder
from tests.models import new_model


def test_report_holds_every_setting_and_is_written_as_json(tmp_path, monkeypatch, capsys):
    host_row = {"drafts": "none", "rows": 1, "nodes_per_row": 0.0, "python_calls": 9.0, "milliseconds": 2.0}
    host_row |= {"least_milliseconds": 1.0, "limit": 3.0, "is_met": True}
    monkeypatch.setattr(overhead, "host_time", lambda num_steps: [host_row] * num_steps)
    monkeypatch.setattr(overhead, "CONTEXT", 8)
    monkeypatch.setattr(overhead, "random_llama", lambda num_layers: new_model("llama", eos_token_id=None))
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    path = tmp_path / "overhead.json"
    settings = ["--layers", "1", "--batch-sizes", "1", "2", "--widths", "1", "3", "--repeats", "1", "--host-steps", "2"]
    assert (
        overhead.run(parser.parse_args([*settings, "--dtype", "float32", "--threads", "1", "--json", str(path)])) == 0
    )

    results = json.loads(path.read_text())
    assert results["host"] == [host_row] * 2
    assert [(row["batch_size"], row["width"]) for row in results["forward"]] == [(1, 1), (1, 3), (2, 1), (2, 3)]
    assert all(row["plain"] > 0 and row["ratio"] == row["packed"] / row["plain"] for row in results["forward"])
    assert all(0 < row["outside_share"] < 1 for row in results["step"].values())
    assert results["no_speculation"]["plain_tokens"] == results["no_speculation"]["engine_tokens"]
    assert "packed / plain" in capsys.readouterr().out

    monkeypatch.setattr(overhead, "host_time", lambda num_steps: [host_row | {"is_met": False}])
    assert overhead.run(parser.parse_args(["--parts", "host"])) == 1, "a limit is missed"


def test_steps_are_timed_with_decoders_written_out():
    model, draft = (new_model("llama", eos_token_id=None) for _ in range(2))
    written_decoder(model), written_decoder(draft)  # which compares them with their own forwards
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PreTrainedModel, "__call__", _refuse)
        results = overhead.step_overhead(model, draft, batch_size=2, repeats=1)
    assert all(0 < row["inside"] < row["total"] and row["steps"] > 4 for row in results.values())


def _refuse(*_, **__):
    raise AssertionError("the model's own forward runs")
