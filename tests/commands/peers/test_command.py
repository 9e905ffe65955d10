"""`smartspec bench peers`: turns, what is compared, and peers that fail while the others go on."""

import json
from pathlib import Path

import pytest

from hf_smartspec.commands import main as cli
from hf_smartspec.commands.peers import command
from hf_smartspec.commands.peers.known import Peer
from hf_smartspec.commands.peers.measuring import agreeing, measure, rows_of
from hf_smartspec.commands.peers.processes import Answer, PeerError
from tests.folders import save_tiny_models


class FakeProcess:
    """A peer that takes a second per row; `calls` has what all were asked, in order."""

    calls: list = []  # noqa: RUF012  a new one for every test

    def __init__(self, name="peer", tokens=(5, 6, 7), failing=()):
        self.name, self.tokens, self.failing = name, list(tokens), failing
        self.ways = {"plain": True, "lookup": False}

    def decode(self, way, first, rows):
        self.calls.append((self.name, way, first, rows))
        if way in self.failing:
            raise PeerError("no kernel")
        return Answer(float(rows), [self.tokens] * rows)

    def close(self):
        self.calls.append((self.name, "closed"))


@pytest.fixture(autouse=True)
def calls(monkeypatch):
    monkeypatch.setattr(FakeProcess, "calls", [])
    return FakeProcess.calls


def test_peers_take_turns_and_the_first_turn_warms_up(calls):
    processes = {"a": FakeProcess("a"), "b": FakeProcess("b")}
    found = measure(processes, [1, 4], num_prompts=2, num_tokens=3, repeats=2, failures={})
    turn = [(peer, way, first, 1) for peer in "ab" for way in ("plain", "lookup") for first in (0, 1)]
    turn += [(peer, "plain", 0, 4) for peer in "ab"]  # lookup takes one row only
    assert calls == turn * 3
    rows = rows_of(found, "a")
    assert [len(row["seconds"]) for row in rows] == [2] * 6
    assert {(row["rows"], row["num_tokens"], row["tokens_per_second"]) for row in rows} == {(1, 6, 3.0), (4, 12, 3.0)}


def test_a_way_that_fails_is_named_and_left_out():
    failures = {}
    processes = {"a": FakeProcess(failing=["lookup"]), "b": FakeProcess(tokens=[5, 6])}
    found = measure(processes, [1], num_prompts=1, num_tokens=3, repeats=1, failures=failures)
    assert [(entry.peer, entry.way) for entry in found] == [("a", "plain")]
    assert failures["a, lookup, batch 1"] == "no kernel"
    assert "decoded [2] tokens in place of 3" in failures["b, plain, batch 1"]


def test_tokens_are_compared_with_the_first_way_of_the_reference():
    processes = {"a": FakeProcess(tokens=[5, 9, 7]), "b": FakeProcess()}
    found = measure(processes, [1], num_prompts=2, num_tokens=3, repeats=1, failures={})
    assert [row["agreeing"] for row in rows_of(found, "b")] == [2, 2, 6, 6]
    assert [row["agreeing"] for row in rows_of(found, "")] == [None] * 4
    assert agreeing([1, 2, 3], [1, 2, 4]) == 2 and agreeing([1], [1]) == 1


@pytest.fixture
def demo(tmp_path, monkeypatch):
    """The demo's, with tiny models, and two peers: one that can be installed, one that cannot."""
    save_tiny_models(tmp_path / "models")
    rows = [{"prompt": f"{n} and {n} and"} for n in range(2)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.setattr(command, "demo_folder", lambda *_: tmp_path)
    jobs = []

    def start(python, module, job, folder, timeout):
        jobs.append(job | {"module": module})
        if module.endswith("broken"):
            raise PeerError("ImportError: no such library")
        return FakeProcess(module, tokens=[1] * job["num_tokens"])

    def refuse(self, name, folder):
        if name == "missing":
            raise PeerError("cannot be installed: no compiler")
        return Path("python")

    monkeypatch.setattr(command, "PeerProcess", start)
    monkeypatch.setattr(Peer, "python", refuse)
    peers = {
        "good": Peer("good", ("model", "gguf")),
        "broken": Peer("broken", ("draft", "draft_gguf"), ("float32",)),
        "missing": Peer("missing", ("model",)),
    }
    for name in list(command.PEERS):
        monkeypatch.delitem(command.PEERS, name)
    for name, peer in peers.items():
        monkeypatch.setitem(command.PEERS, name, peer)
    return jobs


def test_failing_peers_are_named_and_the_others_go_on(demo, calls, tmp_path, capsys):
    out = tmp_path / "out.json"
    options = ["--parameters", "0", "--batch-sizes", "1", "4", "--num-prompts", "2", "--max-new-tokens", "5"]
    options += ["--kinds", "float32", "int8", "--repeats", "1", "--threads", "1", "--json", str(out)]
    assert cli.main(["bench", "peers", "--peers", "good", "broken", "missing", *options]) == 1
    report = json.loads(out.read_text())
    assert report["failures"] == {
        "missing": "cannot be installed: no compiler",
        "float32, broken": "ImportError: no such library",
    }
    assert {kind: len(rows) for kind, rows in report["kinds"].items()} == {"float32": 3, "int8": 3}
    assert ("runners.good", "closed") in calls
    first, _, last = demo
    assert set(first["files"]) == {"model", "gguf", "draft", "draft_gguf"} and set(last["files"]) == {"model", "gguf"}
    assert len(first["prompts"]) == 4 and first["prompts"][:2] == first["prompts"][2:]  # two prompts, a batch of four
    text = capsys.readouterr().out
    assert "cannot be installed: no compiler" in text and "no such library" in text


def test_sizes_below_the_models_own_are_refused(demo, capsys):
    with pytest.raises(SystemExit):
        cli.main(["bench", "peers", "--peers", "good", "--parameters", "10", "--threads", "1"])
    assert "--parameters" in capsys.readouterr().err
