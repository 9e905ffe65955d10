"""`smartspec generate --dataset --replicas`: several engines write the file of a single one, whoever kills them."""

import json
import signal
from argparse import Namespace

import numpy as np
import pytest

pytest.importorskip("ray.data")

from hf_smartspec.commands.common.arguments import UsageError
from hf_smartspec.commands.generate import answering
from hf_smartspec.commands.generate.answering import Replicas, RowWorker

from .. import processes
from ..helpers import call

NUM_ROWS = 40


@pytest.fixture
def data(tmp_path):
    path = tmp_path / "data.jsonl"
    rows = [{"prompt": f"{index}, {index + 1}, {index + 2}," if index != 5 else " "} for index in range(NUM_ROWS)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def line(data, output, *more):
    options = ["--max-new-tokens", "24", "--threads", "1", "--device", "cpu", "--max-batch-size", "2"]
    sampling = ["--temperature", "1", "--seed", "5", "--assistant", "suffix"]
    return ["generate", "--dataset", str(data), "--output", str(output), *options, *sampling, *more]


@pytest.mark.long
@pytest.mark.exhaustive  # starts Ray four times: minutes
def test_a_job_that_is_killed_goes_on_to_the_file_of_a_single_engine(data, tmp_path):
    """Every run has a process of its own: a Ray that tests have imported is not the private one that commands start."""
    alone, output = tmp_path / "alone.jsonl", tmp_path / "out.jsonl"
    assert call(*line(data, alone)) == 1  # one row has no answer
    for moment in ("torn", "whole", "torn"):  # each time two rows further
        killed = processes.start(processes.run_killed, line(data, output, "--replicas", "2"), moment)
        killed.join()
        assert killed.exitcode == -signal.SIGKILL and output.read_bytes().endswith(b"\n") == (moment == "whole")
    last = processes.start(processes.run_logged, line(data, output, "--replicas", "2"), tmp_path / "said")
    last.join()
    said = (tmp_path / "said").read_text()
    assert last.exitcode == 1, said  # as above
    assert f"{NUM_ROWS} rows, 6 of them from before, 1 of them without an answer" in said
    assert output.read_bytes() == alone.read_bytes()


def namespace(data, monkeypatch):
    """The arguments as the command has read them."""
    kept = {}

    class KeptError(Exception):
        pass

    def keep(args):
        kept["args"] = args
        raise KeptError

    monkeypatch.setattr("hf_smartspec.commands.generate.command.load_speaker", keep)
    with pytest.raises(KeptError):
        call(*line(data, data.with_name("out.jsonl")))
    return kept["args"]


def test_a_worker_answers_its_rows_and_says_what_it_has_done(data, monkeypatch):
    worker = RowWorker(namespace(data, monkeypatch), seed=5)
    first, second = worker({"item": np.array([3, 5])}), worker({"item": np.array([0])})
    rows = [json.loads(text) for text in (*first["line"], *second["line"])]
    assert [row["row"] for row in rows] == [3, 5, 0] and rows[1]["error"] == "the prompt is empty"
    assert first["so_far"][0] == "" and first["worker"] == [second["worker"][0]] * 2
    counts = [json.loads(batch["so_far"][-1])["generated_tokens"] for batch in (first, second)]
    assert counts == [rows[0]["generated_tokens"], rows[0]["generated_tokens"] + rows[2]["generated_tokens"]]


def test_nothing_is_asked_for_where_nothing_is_missing():
    assert list(Replicas(Namespace(replicas=2, threads=1), 0).rows([])) == []


def test_what_is_wrong_is_said_in_a_line(data, tmp_path, capsys, monkeypatch):
    assert call("generate", "--replicas", "2", "text") == 2
    assert "--replicas is for --dataset" in capsys.readouterr().err
    monkeypatch.setattr("hf_smartspec.commands.common.ray_cluster.find_spec", lambda name: None)
    assert call(*line(data, tmp_path / "out.jsonl", "--replicas", "2")) == 2
    assert 'pip install "hf-smartspec[ray]"' in capsys.readouterr().err
    with pytest.raises(UsageError, match="--system"):
        answering.prompter_of(Namespace(raw=True, system="x"), Namespace(tokenizer=Namespace(chat_template=None)))
