"""`smartspec generate --dataset --replicas`: several engines write the file of a single one, whoever kills them."""

import json
import os
import signal
import subprocess
import sys
import time
from argparse import Namespace
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("ray.data")
import psutil

from hf_smartspec.commands.common.models import UsageError
from hf_smartspec.commands.generate import answering
from hf_smartspec.commands.generate.answering import Replicas, RowWorker

from ..helpers import call

REPOSITORY = Path(__file__).parents[3]
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


def started(arguments):
    """A command with all that it starts in a session of its own."""
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, "-m", "hf_smartspec.commands.main", *arguments],
        cwd=REPOSITORY, env=environment, start_new_session=True, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def kill_all(process):
    """At once, and all that it has started."""
    for item in [*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)]:
        with suppress(psutil.NoSuchProcess):
            item.send_signal(signal.SIGKILL)
    process.wait()


def num_lines(path):
    return path.read_bytes().count(b"\n") if path.exists() else 0


@pytest.mark.long
def test_a_job_that_is_killed_goes_on_to_the_file_of_a_single_engine(data, tmp_path):
    alone, output = tmp_path / "alone.jsonl", tmp_path / "out.jsonl"
    assert call(*line(data, alone)) == 1  # one row has no answer
    first = started(line(data, output, "--replicas", "2"))
    try:
        while not num_lines(output):
            assert first.poll() is None, first.stderr.read()
            time.sleep(0.02)  # a file has no event
    finally:
        kill_all(first)
    num_before = num_lines(output)
    second = started(line(data, output, "--replicas", "2"))
    _, report = second.communicate(timeout=300)
    assert second.returncode == 1, report
    assert f"{NUM_ROWS} rows, {num_before} of them from before, 1 of them without an answer" in report
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
