"""`python -m benchmarks batching`: run end to end on a tiny model."""

import json

import pytest

from .. import helpers


@pytest.fixture(scope="module")
def data(folder):
    rows = [{"prompt": f"{n} and {n} and" + " so on" * (n % 3), "response": f" {n}."} for n in range(5)]
    (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder / "data.jsonl"


def bench(folder, data, *arguments):
    tiny = ["--dtype", "float32", "--device", "cpu", "--max-new-tokens", "10", "--max-batch-size", "3"]
    return helpers.bench("batching", data, "--model", folder / "target", *tiny, "--repetitions", "1", *arguments)


def test_both_return_the_same_tokens_and_the_server_what_was_asked(
    folder, data, tmp_path, capsys, deprecated_by_itself
):
    for package in ("openai", "fastapi", "uvicorn"):
        pytest.importorskip(package)
    path = tmp_path / "batching.json"
    options = ["--serve", "--requests", "9", "--clients", "3", "--json", path]
    assert bench(folder, data, "--assistant", "suffix", *options) == 0
    report = json.loads(path.read_text())
    assert len({tuple(row["checksums"]) for row in report["results"]["generate_batch"].values()}) == 1
    served = report["results"]["serve"]
    assert served["suffix"]["as_asked"] == served["suffix"]["num_checked"] == 8
    assert served["transformers"]["as_asked"] < 8
    out = capsys.readouterr().out
    assert "5 / 5" in out and "8 / 8" in out and "yes" in out


def test_refusals(folder, data, capsys):
    assert bench(folder, data, "--replay") == 2
    assert "--replay: " in capsys.readouterr().err
    assert bench(folder, data, "--assistant", "draft") == 2
    assert "needs --draft" in capsys.readouterr().err
    assert bench(folder, data, "--assistant", "draft", "--serve", "--draft", folder / "draft") == 2
    assert "--serve: the server drafts with presets" in capsys.readouterr().err
