"""What int8 is worth: both models decode the same prompts in every way, and the report says what each reached."""

import argparse
import io
import json

import pytest
import torch
from rich.console import Console

from benchmarks.step.overhead import command as overhead
from benchmarks.step.overhead import int8
from benchmarks.step.overhead.arguments import add_arguments
from benchmarks.step.overhead.int8 import WAYS, int8_speed, print_int8_speed
from hf_smartspec import enabled, suffix_trees
from hf_smartspec.commands.common.arguments import UsageError
from hf_smartspec.cpu.quantized import is_quantized
from hf_smartspec.cpu.quantized.product import has_exact_product
from tests.folders import save_tiny_models
from tests.models import new_model

pytestmark = pytest.mark.skipif(not has_exact_product(), reason="the CPU has no exact int8 product")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The demo's, with tiny models."""
    save_tiny_models(tmp_path / "models")
    rows = [{"prompt": f"{n} and {n} and"} for n in range(3)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.setattr(int8, "demo_folder", lambda *_: tmp_path)
    return tmp_path


def test_both_models_decode_all_prompts_in_every_way(folder, monkeypatch):
    calls, original = [], int8._decoding

    def noted(model, prompts, num_tokens, arguments):
        calls.append((is_quantized(model), len(prompts), num_tokens, arguments))
        return original(model, prompts, num_tokens, arguments)

    monkeypatch.setattr(int8, "_decoding", noted)
    rows = list(int8_speed([5e5], None, "float32", num_prompts=2, num_tokens=5, repeats=1))
    assert [row["way"] for row in rows] == ["plain", "none", "auto"]
    sizes = (1, int8._WARMUP), (2, 5)
    assert calls == [
        (kind, *size, arguments) for arguments in WAYS.values() for size in sizes for kind in (False, True)
    ]
    for row in rows:
        assert row["parameters"] == pytest.approx(5e5, rel=0.05)
        assert row["ratio"] == pytest.approx(row["int8"] / row["full"]) and row["full"] > 0
        assert row["mib"]["int8"] < 0.5 * row["mib"]["full"]
    output = io.StringIO()
    print_int8_speed(Console(file=output, width=150), rows, "float32")
    assert "int8 / float32" in output.getvalue() and "auto" in output.getvalue()


def test_answers_are_forgotten_before_the_next_repetition():
    model = new_model("llama")
    decode = int8._decoding(model, [torch.arange(3, 9)[None], torch.arange(9, 3, -1)[None]], 6, WAYS["auto"])
    with enabled(model):
        decode()
        remembered = suffix_trees(model).num_cached_tokens()
        decode()
    assert 0 < remembered == suffix_trees(model).num_cached_tokens()


def test_what_was_measured_before_an_interruption_is_printed(folder, monkeypatch, capsys):
    def interrupted(*_):
        yield {"parameters": 5e5, "way": "plain", "full": 2.0, "int8": 4.0, "ratio": 2.0, "mib": {"full": 1, "int8": 2}}
        raise KeyboardInterrupt

    monkeypatch.setattr(overhead, "int8_speed", interrupted)
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    with pytest.raises(KeyboardInterrupt):
        overhead.run(parser.parse_args(["--parts", "quantized"]))
    assert "2.00" in capsys.readouterr().out


def test_the_command_measures_it_where_it_is_asked_for(folder, tmp_path):
    parser, path = argparse.ArgumentParser(), tmp_path / "overhead.json"
    add_arguments(parser)
    settings = ["--parts", "quantized", "--parameters", "5e5", "--max-new-tokens", "4", "--num-prompts", "1"]
    settings += ["--dtype", "float32", "--threads", "1", "--repeats", "1", "--json", str(path)]
    assert overhead.run(parser.parse_args(settings)) == 0
    results = json.loads(path.read_text())
    assert len(results["quantized"]) == 3 and "forward" not in results
    assert overhead.QUANTIZED not in parser.parse_args([]).parts


def test_sizes_below_the_targets_are_refused(folder):
    with pytest.raises(UsageError, match="--parameters 10: `num_parameters` must be at least"):
        list(int8_speed([10], None, "float32", num_prompts=1, num_tokens=4, repeats=1))
