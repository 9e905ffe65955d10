"""`python -m benchmarks peers`: what is asked, kept and shown, and peers that fail while the others go on."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from benchmarks.decode.peers import command, measuring
from benchmarks.decode.peers.known import Peer
from benchmarks.decode.peers.processes import Answer, PeerError
from tests.benchmarks import helpers
from tests.folders import save_tiny_models

SIZES = ["--parameters", "0", "--batch-sizes", "1", "4", "--num-prompts", "2", "--max-new-tokens", "5"]


class FakeProcess:
    """A peer that says what the model would, and takes a second per row."""

    fails = False

    def __init__(self, folder, job, calls):
        self.job, self.calls = job, calls
        self.model = AutoModelForCausalLM.from_pretrained(folder).eval()
        self.ways, self.about = {"plain": True, "lookup": False}, "some version"

    def decode(self, way, rows):
        self.calls.append((self.job["kind"], way, rows))
        if FakeProcess.fails and way == "lookup":
            raise PeerError("no such way today")
        arguments = {"max_new_tokens": self.job["num_tokens"], "do_sample": False, "eos_token_id": None}
        prompts = [self.job["prompts"][row] for row in rows]
        with torch.no_grad():
            found = [self.model.generate(torch.tensor([ids]), **arguments)[0, len(ids) :].tolist() for ids in prompts]
        return Answer(float(len(rows)), found)

    def close(self):
        self.calls.append("closed")


@pytest.fixture
def demo(tmp_path, monkeypatch):
    """The demo's, with tiny models, and three peers, of which two fail; and what they were asked."""
    save_tiny_models(tmp_path / "models")
    rows = [{"prompt": f"{n} and {n} and", "category": "sql" if n % 2 else "chat"} for n in range(6)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.setattr(command, "demo_folder", lambda *_: tmp_path)
    monkeypatch.setattr(FakeProcess, "fails", False)
    jobs, calls = [], []

    def start(python, module, job, folder, timeout):
        jobs.append(job | {"module": module})
        if module.endswith("broken"):
            raise PeerError("ImportError: no such library")
        return FakeProcess(tmp_path / "models" / "target", job, calls)

    def install(self, name, folder):
        if name == "missing":
            raise PeerError("cannot be installed: no wheel")
        return Path("python")

    monkeypatch.setattr(measuring, "PeerProcess", start)
    monkeypatch.setattr(Peer, "python", install)
    peers = {
        "transformers": Peer("good", ("model", "gguf")),
        "broken": Peer("broken", ("draft", "draft_gguf"), ("float32",)),
        "missing": Peer("missing", ("model",)),
    }
    for name in list(command.PEERS):
        monkeypatch.delitem(command.PEERS, name)
    for name, peer in peers.items():
        monkeypatch.setitem(command.PEERS, name, peer)
    return jobs, calls


@pytest.fixture
def bench(tmp_path, demo):
    def run(*options):
        """Exit status and what was written."""
        path = tmp_path / "out.json"
        peers = () if "--peers" in options else ("--peers", "transformers")
        status = helpers.bench("peers", *SIZES, "--repeats", "1", "--threads", "1", *peers, "--json", path, *options)
        return status, json.loads(path.read_text())

    return run


def rows_of(report):
    """Rows by section and name."""
    return {(section, name): row for section, rows in report["results"].items() for name, row in rows.items()}


def test_failing_peers_are_named_and_the_others_go_on(bench, demo, capsys):
    peers = ("transformers", "broken", "missing")
    status, report = bench("--peers", *peers, "--kinds", "float32", "int8")
    assert status == 1
    assert report["failures"] == {
        "missing": "cannot be installed: no wheel",
        "float32: broken": "ImportError: no such library",
    }
    (first, _, last), calls = demo
    assert set(first["files"]) == {"model", "gguf", "draft", "draft_gguf"} and set(last["files"]) == {"model", "gguf"}
    assert calls.count("closed") == 2 and report["peers"] == {"transformers": "some version"}
    text = capsys.readouterr().out
    assert "cannot be installed: no wheel" in text and "no such library" in text and "x plain" in text


def test_what_failed_once_is_tried_again(bench, demo):
    options = ("--kinds", "float32", "--resume")
    FakeProcess.fails = True
    status, report = bench(*options)
    assert status == 1 and all("lookup" in name for name in report["failures"]) and report["failures"]
    FakeProcess.fails = False
    status, report = bench(*options)
    assert status == 0 and not report["failures"] and len(rows_of(report)) == 5


def test_a_model_of_ones_own_has_no_draft_and_all_kinds_of_its_prompts(bench, demo, tmp_path):
    (jobs, _), target = demo, tmp_path / "models" / "target"
    (tmp_path / "prompts.jsonl").rename(tmp_path / "real_prompts.jsonl")
    peers = ("--peers", "transformers", "broken")
    _, report = bench("--model", target, "--kinds", "float32", "int4", *peers)
    assert {frozenset(job["files"]) for job in jobs} == {frozenset({"model", "gguf"})}
    assert {section.split(", ")[1] for section in report["results"]} == {"chat", "sql", "mixed"}
    bench("--model", target, "--draft", tmp_path / "models" / "draft", "--kinds", "float32", *peers)
    assert set(jobs[-1]["files"]) == {"model", "gguf", "draft", "draft_gguf"}


def test_rows_say_how_fast_and_how_equal(bench, demo):
    status, report = bench("--kinds", "float32")
    rows = rows_of(report)
    assert status == 0 and set(rows) == {
        *(
            (f"float32, {text}, batch 1", f"transformers, {way}")
            for way in ("plain", "lookup")
            for text in ("sql", "chat")
        ),
        ("float32, mixed, batch 4", "transformers, plain"),  # three prompts of a kind make no batch of four
    }
    mixed = rows["float32, mixed, batch 4", "transformers, plain"]
    assert mixed["seconds"] == 4.0 and mixed["tokens_per_second"] == 5.0
    assert all(row["num_same_rows"] == row["num_rows"] for row in rows.values())
    assert all(row["num_same_tokens"] == row["num_tokens"] for row in rows.values())


def test_batches_of_one_kind_where_there_are_enough(bench):
    _, report = bench("--kinds", "float32", "--batch-sizes", "3")
    assert set(report["results"]) == {"float32, sql, batch 3", "float32, chat, batch 3"}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--parameters", "10"], "--parameters"),
        (["--batch-sizes", "7"], "there are 6"),
        (["--heads", "nowhere"], "--heads"),
        (["--heads", "here", "--parameters", "10000"], "--parameters 0"),
        (["--texts", "poems"], "none of chat, sql"),
        (["--python", "nobody=/bin/sh"], "NAME=FILE"),
    ],
)
def test_what_cannot_be_asked_is_refused(demo, tmp_path, capsys, options, words):
    assert helpers.bench("peers", *SIZES, "--threads", "1", "--json", tmp_path / "x.json", *options) == 2
    assert words in capsys.readouterr().err


def test_interpreters_that_are_given_are_used(bench, demo, monkeypatch):
    used = []
    start = measuring.PeerProcess
    monkeypatch.setattr(measuring, "PeerProcess", lambda python, *rest: used.append(python) or start(python, *rest))
    bench("--peers", "missing", "--python", "missing=/bin/sh", "--kinds", "float32")
    assert used == [Path("/bin/sh")]
