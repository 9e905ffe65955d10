"""Gain of int8 and int4: all models decode the same prompts in every way, and the report has each speed."""

import io
import json

import pytest
import torch
from rich.console import Console

from benchmarks.benches import load_parser
from benchmarks.kit.session import Session
from benchmarks.step.overhead import quantized
from benchmarks.step.overhead.quantized import WAYS
from hf_smartspec import enabled, suffix_trees
from hf_smartspec.cpu.quantized import is_quantized
from tests.benchmarks.helpers import bench
from tests.folders import save_tiny_models
from tests.models import new_model


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The demo's, with tiny models."""
    save_tiny_models(tmp_path / "models")
    rows = [{"prompt": f"{n} and {n} and"} for n in range(3)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.setattr(quantized, "demo_folder", lambda *_: tmp_path)
    return tmp_path


def test_all_models_decode_all_prompts_in_every_way(folder, monkeypatch):
    calls, original = [], quantized._decoding

    def noted(model, prompts, num_tokens, arguments):
        calls.append((is_quantized(model), len(prompts), num_tokens, arguments))
        return original(model, prompts, num_tokens, arguments)

    monkeypatch.setattr(quantized, "_decoding", noted)
    session, output = Session({}), io.StringIO()
    section = quantized.section(None, [5e5], None, "float32", num_prompts=2, num_tokens=5, repeats=1)
    session.run([section], Console(file=output, width=150))
    rows = list(session.rows("quantized").values())
    assert [row["way"] for row in rows] == ["plain", "none", "auto"]
    sizes = (1, quantized._WARMUP), (2, 5)
    assert calls == [
        (kind, *size, arguments) for arguments in WAYS.values() for size in sizes for kind in (False, True, True)
    ]
    for row in rows:
        assert row["parameters"] == pytest.approx(5e5, rel=0.05)
        assert row["ratios"] == {kind: pytest.approx(row[kind] / row["full"]) for kind in ("int8", "int4")}
        assert row["full"] > 0 and row["mib"]["int4"] < row["mib"]["int8"] < 0.5 * row["mib"]["full"]
    assert "int8 / float32" in output.getvalue() and "auto" in output.getvalue()


def test_answers_are_forgotten_before_the_next_repetition():
    model = new_model("llama")
    decode = quantized._decoding(model, [torch.arange(3, 9)[None], torch.arange(9, 3, -1)[None]], 6, WAYS["auto"])
    with enabled(model):
        decode()
        remembered = suffix_trees(model).num_cached_tokens()
        decode()
    assert 0 < remembered == suffix_trees(model).num_cached_tokens()


def test_the_command_measures_it_where_it_is_asked_for(folder, tmp_path):
    path = tmp_path / "overhead.json"
    settings = ["--parts", "quantized", "--max-new-tokens", "4", "--num-prompts", "1"]
    settings += ["--dtype", "float32", "--threads", "1", "--repeats", "1", "--json", path]
    assert bench("overhead", *settings, "--parameters", "5e5") == 0
    assert len(json.loads(path.read_text())["results"]["quantized"]) == 3
    assert bench("overhead", *settings, "--model", folder / "models" / "target") == 0
    assert "quantized" not in load_parser("overhead").parse_args([]).parts


def test_sizes_below_the_targets_are_refused(folder, capsys):
    settings = ["--parts", "quantized", "--max-new-tokens", "4", "--num-prompts", "1", "--dtype", "float32"]
    assert bench("overhead", *settings, "--parameters", "10") == 2
    assert "--parameters 10: `num_parameters` must be at least" in capsys.readouterr().err
