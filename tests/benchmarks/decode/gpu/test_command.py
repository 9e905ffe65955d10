"""`python -m benchmarks gpu`: all of it on a tiny model without a GPU, what is kept, and what is told of it."""

import json
import os
import signal

import pytest
import torch
from transformers import LlamaForCausalLM
from transformers.utils import logging

from benchmarks.decode.gpu import bandwidth, correctness, serving, verification
from benchmarks.decode.gpu.shapes import Plan
from hf_smartspec.commands.main import INTERRUPTED
from tests.benchmarks.helpers import bench
from tests.folders import save_tiny_models

SECTIONS = ["correctness", "bandwidth", "verification 7B", "acceptance 7B", "text 7B", "waits 7B", "compiled 7B"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A checkout with tiny models, whose target can be enlarged."""
    folder = tmp_path_factory.mktemp("checkout")
    save_tiny_models(folder / "demos" / "models")
    rows = [{"prompt": f"{n} and {n} and" + " so on" * (n % 3), "response": f" {n} and {n}."} for n in range(6)]
    (folder / "demos" / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.fixture(autouse=True)
def _logging_stays_as_it_is():
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()  # transformers' own assisted decoding announces a deprecation of its own
    yield
    logging.set_verbosity(verbosity)
    logging.enable_progress_bar()


@pytest.fixture
def call(folder, monkeypatch, tmp_path):
    monkeypatch.chdir(folder)

    def run(*words):
        path = tmp_path / "gpu.json"
        status = bench("gpu", "--device", "cpu", "--smoke", "--json", path, *words)
        return status, json.loads(path.read_text()) if path.exists() else None

    return run


@pytest.mark.end_to_end
def test_everything_is_measured_and_the_tokens_are_the_same(call, capsys):
    status, report = call()
    assert not report["failures"] and not report["skipped"]
    assert status == 0 and set(report["results"]) == set(SECTIONS)
    checks = report["results"]["correctness"]
    plan = Plan.smoke()
    assert len(checks) == len(plan.correct_sizes) * 2 * 9 + 1 and all(row["is_equal"] for row in checks.values())
    for source in ("suffix", "draft chain", "draft tree", "replayed chain", "replayed tree"):
        assert sum(row["accepted"] for name, row in checks.items() if source in name) > 0
    rows = report["results"]["acceptance 7B"]
    assert {row["tokens"] for name, row in rows.items() if "batch 2" in name} == {2 * plan.new_tokens}
    assert sum(row.get("drafted_tokens", 0) for name, row in rows.items()) > 0
    step = report["results"]["verification 7B"]["batch 1, 16 tokens"]
    rates = report["results"]["bandwidth"].values()
    assert step["limit"] == pytest.approx(step["bytes"] / max(row["bytes"] / row["seconds"] for row in rates))
    assert all(row["per_step"]["operations"] > 0 for row in report["results"]["waits 7B"].values())
    targets = report["targets"]
    assert targets[0]["measured"] == step["times_limit"] and targets[0]["reached"] == (step["times_limit"] <= 1.15)
    shown = rows["batch 1, acceptance 0.7"]["tokens_per_second"] / rows["batch 1, generate"]["tokens_per_second"]
    assert targets[1]["measured"] == pytest.approx(shown)
    assert targets[2]["reached"] is None, "there is no batch of 128"
    out = capsys.readouterr().out
    assert all(name in out for name in SECTIONS) and "not measured" in out


def test_resuming_measures_only_what_is_missing(call, monkeypatch, tmp_path):
    _, first = call("--section", "bandwidth", "verification")
    first["results"]["verification 7B"].pop("batch 1, 16 tokens")
    (tmp_path / "gpu.json").write_text(json.dumps(first))
    asked = []
    monkeypatch.setattr(verification, "_measured", lambda *args: asked.append(args[2:4]) or {"times_limit": 1.0})
    monkeypatch.setattr(bandwidth, "_measured", lambda *_: pytest.fail("is measured already"))
    status, second = call("--section", "verification", "--resume")
    assert status == 0 and asked == [(1, 16)]
    assert second["results"]["bandwidth"] == first["results"]["bandwidth"]
    assert set(second["results"]["verification 7B"]) == {*first["results"]["verification 7B"], "batch 1, 16 tokens"}


def test_results_of_another_machine_are_not_added_to(call, tmp_path, capsys):
    _, report = call("--section", "bandwidth")
    report["environment"]["device"] = "another"
    for text in (json.dumps(report), "{}"):
        (tmp_path / "gpu.json").write_text(text)
        assert call("--section", "bandwidth", "--resume")[0] == 2
        assert (tmp_path / "gpu.json").read_text() == text
        assert "--resume" in capsys.readouterr().err


def test_what_fails_is_told_and_the_rest_is_measured(call, monkeypatch, capsys):
    def fail(*_):
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(bandwidth, "_sum", fail)
    monkeypatch.setattr(correctness.Checks, "_ways", fail)
    status, report = call("--section", "correctness", "bandwidth")
    assert status == 1 and set(report["failures"]) == {"correctness", "bandwidth: sum"}
    assert "no such kernel" in report["failures"]["bandwidth: sum"] and "Traceback" in report["failures"]["correctness"]
    assert set(report["results"]["bandwidth"]) == {"copy", "matrix times vector"}
    assert "no such kernel" in capsys.readouterr().out


def test_other_tokens_are_a_failure(call, monkeypatch, capsys):
    generate = LlamaForCausalLM.generate

    def changed(self, *args, **kwargs):
        output = generate(self, *args, **kwargs)
        if "assistant" not in kwargs:
            output.sequences[:, -1] += 1
        return output

    monkeypatch.setattr(correctness.Checks, "_ways", lambda self: [])
    monkeypatch.setattr(LlamaForCausalLM, "generate", changed)
    status, report = call("--section", "correctness")
    (row,) = report["results"]["correctness"].values()
    assert status == 1 and not report["failures"] and not row["is_equal"] and row["differences"]
    assert "other tokens" in capsys.readouterr().out


def test_what_there_was_no_time_for_is_named(call):
    status, report = call("--seconds", "1e-6", "--section", "bandwidth", "verification")
    assert status == 0 and not any(report["results"].values())
    assert len(report["skipped"]) == 3 + 6
    assert "time of the section was over" in report["skipped"]["bandwidth: copy"]
    status, report = call("--section", "bandwidth", "--resume")
    assert not any(name.startswith("bandwidth") for name in report["skipped"])
    assert len(report["results"]["bandwidth"]) == 3


def test_what_was_measured_before_sigterm_is_kept_and_held_against_targets(call, monkeypatch):
    monkeypatch.setattr(bandwidth, "_sum", lambda data: os.kill(os.getpid(), signal.SIGTERM))
    status, report = call("--section", "bandwidth")
    assert status == INTERRUPTED and list(report["results"]["bandwidth"]) == ["copy"]
    assert report["targets"] and all(item["reached"] is None for item in report["targets"])
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


@pytest.mark.parametrize(
    ("words", "message"),
    [([], "there is no CUDA device here"), (["--device", "cpu"], "needs --smoke"), (["--device", "x"], "cannot use")],
)
def test_without_a_gpu_it_says_what_to_do(words, message, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert bench("gpu", *words) == 2 and message in capsys.readouterr().err


def test_without_a_checkout_there_is_nothing_to_measure(monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("hf_smartspec.commands.common.models.find_demo", lambda: None)
    assert bench("gpu", "--device", "cpu", "--smoke") == 2
    assert "checkout" in capsys.readouterr().err and not list(tmp_path.iterdir())


def test_answers_other_than_the_given_ones_are_no_measurement(call, monkeypatch):
    monkeypatch.setattr(serving.RecordedText, "__call__", lambda self, input_ids, scores: scores.flip(-1))
    status, report = call("--section", "text")
    assert status == 1
    names = {f"text 7B: {text}, batch 1, {way}" for text in ("own", "people's")
             for way in ("assistant_model", "transformers' lookup")}  # fmt: skip
    assert set(report["failures"]) == names
