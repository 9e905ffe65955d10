"""`python -m benchmarks memory`: the text it repeats, and what it measures."""

import json
from collections import Counter
from itertools import islice

import numpy as np
import pytest

from benchmarks.replay.memory import runs as scale_runs
from benchmarks.replay.memory.runs import TextStream, TreeProbe, take
from hf_smartspec import SuffixTreeCandidates
from hf_smartspec.commands.common.recordings import Recording

from ....commands.replay.test_command import write
from ....folders import byte_tokenizer
from ... import helpers


def outputs(count, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 1000, rng.integers(1, 60)) for _ in range(count)]


def test_the_first_pass_is_the_text_and_later_ones_change_a_tenth_of_it():
    texts = outputs(200)
    found = list(islice(iter(TextStream(texts, [])), 600))
    first, second, third = found[:200], found[200:400], found[400:]
    assert Counter(map(bytes, first)) == Counter(bytes(text.astype(np.int32)) for text in texts)
    assert list(map(len, first)) == list(map(len, second))
    share = np.mean(np.concatenate(first) != np.concatenate(second))
    assert 0.07 < share < 0.13  # 0.1 up to five standard deviations, for 6,000 tokens
    assert any(not np.array_equal(a, b) for a, b in zip(second, third))
    assert set(np.concatenate(second)) <= set(np.concatenate(first))


def test_so_many_tokens_are_taken_as_were_asked_for():
    texts = [np.arange(5), np.arange(4), np.arange(9)]
    assert list(map(len, take(iter(texts), 7))) == [5, 2]
    assert take(iter(texts), 0) == []


def test_the_tree_is_measured_at_the_sizes_asked_for():
    held_out = [Recording(text[:4], np.resize(text, 40)) for text in outputs(3, seed=1)]
    probe = TreeProbe(TextStream(outputs(100), held_out))
    for size in (400, 3000):
        row = probe.measure(size)
        assert row["tokens"] == size and 0 < row["drafted"] <= scale_runs.NUM_NODES
        assert row["batch_drafted"] == pytest.approx(row["drafted"], rel=0.1)  # what is learnt on the way changes them
        assert all(row[key] > 0 for key in ("insert_us_per_token", "draft_us", "batch_draft_us", "remove_us_per_token"))
        left = probe._source.num_cached_tokens()
        assert 0.7 * size - 60 < left <= 0.75 * size  # a quarter was removed again
        assert row["bytes_per_token"] == row["bytes"] / size > 12
        assert row["fill_seconds"] > 0


# --- The command ------------------------------------------------------------------------------------------------------


@pytest.fixture
def bench(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    byte_tokenizer().save_pretrained(tmp_path / "tokenizer")
    rows = [{"prompt": f"count {i}", "response": f"{i}, then {i + 1}, then {i + 2}, at last {i}"} for i in range(90)]
    path = write(tmp_path / "set.jsonl", rows)

    def call(*arguments, file=path):
        small = ["--tokens", "1600", "400", "--datastore-tokens", "2000", "--max-bytes", "60000"]
        words = [file, "--tokenizer", tmp_path / "tokenizer", *small, *arguments]
        return helpers.bench("memory", *words), *capsys.readouterr()

    return call


def test_the_command_prints_and_writes_everything(bench, tmp_path):
    status, out, _ = bench("--json", tmp_path / "report.json")
    shown = ("last / first", "yes the bound of 60,000 bytes holds", "Datastore of 2,000 tokens")
    shown += ("The largest tree: 1,600 tokens in ", "Calculated: 1,000,000,000 tokens take ")
    assert status == 0 and all(text in out for text in shown)
    results = json.loads((tmp_path / "report.json").read_text())["results"]
    assert [row["tokens"] for row in results["suffix tree"].values()] == [400, 1600]
    eviction = results["eviction"]["eviction"]
    assert eviction["largest_bytes"] <= 60_000 and eviction["tokens"] > 0
    assert results["datastore"]["datastore"]["bytes"] > 8 * 2000


def test_the_least_sizes_are_measured(bench, tmp_path):
    least = ["--tokens", "4", "--max-bytes", "64", "--datastore-tokens", "0"]
    status, _, _ = bench(*least, "--json", tmp_path / "report.json")
    results = json.loads((tmp_path / "report.json").read_text())["results"]
    assert [row["tokens"] for row in results["suffix tree"].values()] == [4]
    (eviction,) = results["eviction"].values()
    assert eviction["replace_us_per_token"] > 0 and status == (0 if eviction["holds"] else 1)


def test_a_tree_of_one_token_is_measured():
    held_out = [Recording(text[:4], np.resize(text, 40)) for text in outputs(2, seed=1)]
    assert TreeProbe(TextStream(outputs(9), held_out)).measure(1)["remove_us_per_token"] > 0


def test_a_broken_bound_is_reported(bench, monkeypatch):
    monkeypatch.setattr(SuffixTreeCandidates, "num_bytes", lambda self: 60_001)
    status, out, _ = bench()
    assert status == 1 and "NO  the bound of 60,000 bytes holds" in out


def test_figures_are_drawn(bench, tmp_path):
    pytest.importorskip("matplotlib", reason="figures are optional")
    status, _, _ = bench("--plot", tmp_path / "plot.png", "--datastore-tokens", "0")
    assert status == 0 and (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--tokens", "3"), "at least 4"),
        (("--max-bytes", "63"), "at least 64"),
        (("--plot", "plot.xyz"), "cannot draw into 'plot.xyz': its suffix must be one of"),
        (("--datastore-tokens", "-1"), "at least 0"),
        (("--plot", "/no/such/folder/plot.png"), "cannot write"),
    ],
)
def test_bad_arguments_are_refused(bench, arguments, message):
    status, _, err = bench(*arguments)
    assert status == 2 and message in err


def test_a_small_file_gets_a_smaller_probe_that_says_so(bench, tmp_path):
    rows = [{"prompt": f"{index}", "response": f"{index} is a number, " * 4} for index in range(17)]
    path = tmp_path / "report.json"
    file = write(tmp_path / "small.jsonl", rows)
    status, out, _ = bench("--tokens", "400", "--datastore-tokens", "0", "--json", path, file=file)
    assert status == 0 and "draft, 8 rows" in out and "8 held-out requests" in " ".join(out.split())
    assert json.loads(path.read_text())["text"]["held_out"] == 8


def test_too_little_text_is_refused(bench, tmp_path):
    rows = [{"prompt": "a", "response": "b" * size} for size in (40, 20, 20)]
    status, _, err = bench(file=write(tmp_path / "short.jsonl", rows))
    assert status == 2 and "hold 1 responses of at least 32 tokens; two are needed" in err
