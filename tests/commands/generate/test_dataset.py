"""`smartspec generate --dataset`: every row once, whoever kills it, and in parts."""

import json
import signal
import sys

import datasets
import pytest
from transformers import AutoTokenizer

from hf_smartspec.commands.common.answering.speaker import Prompter
from hf_smartspec.commands.generate.rows import Shard, launched_device, launched_shard

from ...serving.helpers import TIMEOUT
from .. import processes
from ..helpers import EMBEDDED, call

SHORT = ["--max-new-tokens", "6", "--threads", "1", "--device", "cpu", "--max-batch-size", "2"]
NUM_ROWS = 9


@pytest.fixture(autouse=True, scope="module")
def _cache(tmp_path_factory):
    """Files are converted into folders of their own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("cache"))
        yield


@pytest.fixture
def data(tmp_path):
    path = tmp_path / "data.jsonl"
    rows = [{"id": f"n{index}", "prompt": f"{'ab' * index}c" if index != 4 else " "} for index in range(NUM_ROWS)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def line(folder, data, output, *arguments):
    model = ["--model", folder / "target", "--temperature", "1", "--seed", "5"]
    return [str(word) for word in ("generate", "--dataset", data, "--output", output, *model, *SHORT, *arguments)]


def read(path):
    return [json.loads(text) for text in path.read_text().splitlines()]


def test_every_row_is_what_generate_says_and_an_empty_one_says_why(folder, data, tmp_path, capsys):
    output, report = tmp_path / "out.jsonl", tmp_path / "report.json"
    assert call(*line(folder, data, output, "--keep", "id", "--keep", "prompt", "--json", report)) == 1
    rows = read(output)
    assert [row["row"] for row in rows] == list(range(NUM_ROWS)) and [row["id"] for row in rows][:2] == ["n0", "n1"]
    assert rows[4]["response"] is None and rows[4]["error"] == "the prompt is empty"
    assert "9 rows, 1 of them without an answer" in capsys.readouterr().err
    assert json.loads(report.read_text())["errors"] == 1
    prompts = [row["prompt"] for row in rows[:4]]  # seeds of prompts are those of rows
    sampling = ["--model", folder / "target", "--temperature", "1", "--seed", "5", *SHORT]
    assert call("generate", *prompts, *sampling, "--json", "-", "--assistant", "none") == 0
    answers = json.loads(capsys.readouterr().out)["answers"]
    assert [row["response"] for row in rows[:4]] == [answer["text"] for answer in answers]


@pytest.mark.parametrize(("prompt", "got"), [(None, "nothing"), (3.5, "3.5")])
def test_a_row_that_holds_no_text_says_so(prompt, got):
    with pytest.raises(ValueError, match=f"a prompt is text or a chat, got {got}"):
        Prompter(None).token_ids(prompt)


@pytest.mark.long
@pytest.mark.end_to_end
def test_killed_three_times_it_goes_on_to_the_same_file(folder, data, tmp_path):
    whole, output = tmp_path / "whole.jsonl", tmp_path / "out.jsonl"
    call(*line(folder, data, whole))
    for moment, num_rows in (("torn", 2), ("before", 2), ("whole", 4)):
        process = processes.start(
            processes.run_killed, line(folder, data, output, "--assistant", "prompt_lookup"), moment
        )
        process.join(TIMEOUT)
        assert process.exitcode == -signal.SIGKILL
        assert output.read_bytes().count(b"\n") == num_rows
        assert output.read_bytes().endswith(b"prom") is (moment == "torn")
    assert call(*line(folder, data, output)) == 1  # whatever drafts; one row has no answer
    assert output.read_bytes() == whole.read_bytes() and len(read(output)) == NUM_ROWS


def test_a_seed_that_nobody_chose_stays(folder, data, tmp_path):
    files = [tmp_path / name for name in ("one.jsonl", "two.jsonl")]
    words = [word for word in line(folder, data, files[0]) if word not in ("--seed", "5")]
    call(*words)
    (tmp_path / "two.jsonl.run.json").write_bytes((tmp_path / "one.jsonl.run.json").read_bytes())
    files[1].write_bytes(files[0].read_bytes()[:300])
    call(*(word.replace("one.jsonl", "two.jsonl") for word in words))
    assert files[0].read_bytes() == files[1].read_bytes()


def test_a_file_of_something_else_is_not_touched(folder, data, tmp_path, capsys):
    output = tmp_path / "out.jsonl"
    output.write_text('{"row": 0}\n')
    assert call(*line(folder, data, output)) == 2
    assert "is there and not of this command" in capsys.readouterr().err and output.read_text() == '{"row": 0}\n'
    (tmp_path / "out.jsonl.run.json").write_text("[1]")
    assert call(*line(folder, data, output)) == 2
    assert "is there and not of this command" in capsys.readouterr().err
    assert call(*line(folder, data, output, "--overwrite", "--limit", "2")) == 0
    before = output.read_bytes()
    assert call(*line(folder, data, output, "--limit", "2", "--max-new-tokens", "7")) == 2
    assert "was begun with max_new_tokens 6, not 7" in capsys.readouterr().err
    output.write_bytes(b"".join(reversed(before.splitlines(keepends=True))))
    assert call(*line(folder, data, output, "--limit", "2")) == 2
    assert "line 1: not from this dataset's rows, or not in their order" in capsys.readouterr().err
    fcntl = pytest.importorskip("fcntl")
    with output.open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert call(*line(folder, data, output, "--limit", "2")) == 2
    assert "is being written by another process" in capsys.readouterr().err


def test_chats_are_answered_without_their_last_answer(tmp_path, capsys):
    chat = [
        {"role": "user", "content": "What is 3 plus 4?"},
        {"role": "assistant", "content": "7"},
        {"role": "user", "content": "And times 2?"},
        {"role": "assistant", "content": "14", "name": None},
    ]
    datasets.Dataset.from_list([{"messages": chat}]).save_to_disk(tmp_path / "saved")
    output = tmp_path / "out.jsonl"
    assert call("generate", "--dataset", tmp_path / "saved", "--column", "messages", "--output", output, *SHORT) == 0
    prompt = AutoTokenizer.from_pretrained(EMBEDDED).apply_chat_template(
        chat[:3], add_generation_prompt=True, tokenize=False
    )
    capsys.readouterr()
    assert call("generate", prompt, "--raw", *SHORT) == 0
    assert capsys.readouterr().out.rstrip("\n") == read(output)[0]["response"].rstrip("\n")


def check_parts(folder, data, tmp_path, environments) -> None:
    """All ranks in this process, one after the other, each in what a launcher tells it."""
    whole, output = tmp_path / "whole.jsonl", tmp_path / "out.jsonl"
    call(*line(folder, data, whole))
    for environment in environments:
        with pytest.MonkeyPatch.context() as patch:
            for name, value in environment.items():
                patch.setenv(name, value)
            assert call(*line(folder, data, output, "--assistant", "none")) == 0
    parts = [tmp_path / f"out-0000{index}-of-00002.jsonl" for index in range(2)]
    assert b"".join(part.read_bytes() for part in parts) == whole.read_bytes()


def test_two_ranks_share_the_rows(folder, data, tmp_path):
    ranks = [{"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"} for rank in range(2)]
    check_parts(folder, data, tmp_path, ranks)


@pytest.mark.long
@pytest.mark.end_to_end
def test_two_processes_of_accelerate_share_the_rows(folder, data, tmp_path):
    note = ["bash", "-c", f"env -0 > {tmp_path}/$RANK.env"]
    words = ["--multi_gpu", "--num_processes", "2", "--main_process_port", "0", "--no_python", *note]
    launcher = processes.start(processes.run_launched, words)
    launcher.join(TIMEOUT)
    assert launcher.exitcode == 0
    told = [(tmp_path / f"{rank}.env").read_text().split("\0") for rank in range(2)]
    check_parts(folder, data, tmp_path, [dict(item.split("=", 1) for item in items if item) for items in told])


def test_parts_have_all_rows_once():
    for num_rows in (0, 1, 5, 12):
        for num in (1, 2, 5, 7):
            ranges = [Shard(index, num).range(num_rows) for index in range(num)]
            assert [row for part in ranges for row in part] == list(range(num_rows))
            assert max(map(len, ranges)) - min(map(len, ranges)) <= 1


def test_launchers_say_which_part_and_which_gpu():
    environment = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1"}
    assert launched_shard(environment) == Shard(3, 4) and launched_shard({}) == Shard(0, 1)
    assert launched_device("cuda", environment) == "cuda:1"
    assert launched_device("cpu", environment) == "cpu" and launched_device("cuda", {}) == "cuda"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--dataset", "{data}"], "--dataset needs --output"),
        (["x", "--output", "{out}"], "--output is for --dataset"),
        (["x", "--dataset", "{data}", "--output", "{out}"], "--dataset takes the place of prompts"),
        (
            ["--dataset", "{data}", "--output", "{out}", "--column", "promt"],
            "no column 'promt', did you mean 'prompt'?",
        ),
        (["--dataset", "{data}", "--output", "{out}", "--keep", "x"], "no column 'x'; there are id, prompt"),
        (["--dataset", "{data}", "--output", "{out}", "--response", "prompt"], "this command writes 'prompt' itself"),
        (["--dataset", "no.jsonl", "--output", "{out}"], "no such file: 'no.jsonl'"),
        (["--dataset", "no/dataset", "--output", "{out}"], "cannot load 'no/dataset'"),
        (["--dataset", "{empty}", "--output", "{out}"], "empty.jsonl' has no rows"),
        (["--dataset", "{data}", "--output", "{out}", "--split", "test"], "cannot load"),
        (["--dataset", "{data}", "--output", "{out}", "--shard", "2/2"], "must be I/N with I from 0 to N - 1"),
        (["--dataset", "{data}", "--output", "/no/folder/out.jsonl"], "no such folder"),
    ],
)
def test_what_cannot_be_done_is_refused_in_one_line(arguments, message, data, tmp_path, capsys):
    (tmp_path / "empty.jsonl").write_text("")
    places = {"data": data, "out": tmp_path / "out.jsonl", "empty": tmp_path / "empty.jsonl"}
    assert call("generate", *(argument.format(**places) for argument in arguments)) == 2
    captured = capsys.readouterr()
    assert message in captured.err and captured.err.count("\n") == 1
    assert not (tmp_path / "out.jsonl").exists()


def test_a_missing_package_is_named(data, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "datasets", None)
    assert call("generate", "--dataset", data, "--output", tmp_path / "out.jsonl") == 2
    assert 'pip install "hf-smartspec[data]"' in capsys.readouterr().err
