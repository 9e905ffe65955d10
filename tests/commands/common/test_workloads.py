"""Data sets of the papers by name: rows of their own form become requests."""

import json
from pathlib import Path

import pytest

from hf_smartspec.commands.common.arguments import UsageError
from hf_smartspec.commands.common.outputs import read_rows
from hf_smartspec.commands.common.recordings import Fields, read_requests
from hf_smartspec.commands.common.workloads import WORKLOADS

CHAT = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
ROWS = {
    "sharegpt": {"id": "1", "conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]},
    "arena": {"question_id": "1", "winner": "tie", "conversation_a": CHAT, "conversation_b": CHAT},
    "wildchat": {"model": "m", "conversation": CHAT},
    "spider": {"db_id": "d", "question": "How many?", "query": "SELECT count(*) FROM t"},
    "gsm8k": {"question": "1 + 1?", "answer": "2"},
    "cnn-dailymail": {"id": "1", "article": "Long.", "highlights": "Short."},
    "spec-bench": {"question_id": 1, "category": "writing", "turns": ["One", "Two"], "reference": ["Answer"]},
    "swe-bench": {
        "instance_id": "i",
        "trajectory": [
            {"role": "system", "content": "Rules", "tool_calls": None},
            {"role": "user", "content": "Fix it", "tool_calls": None},
            {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "bash"}}]},
            {"role": "tool", "content": "done", "tool_calls": None},
        ],
    },
    "alpaca": {"instruction": "Sum", "input": "1, 2", "output": "3", "text": "..."},
    "finance-alpaca": {"instruction": "What is a bond?", "input": "", "output": "A loan.", "text": ""},
    "code-search-net": {"func_documentation_string": "Add.", "func_code_string": "def add(): ..."},
}
REQUESTS = {
    "spider": ("Write an SQL query. How many?", "SELECT count(*) FROM t"),
    "gsm8k": ("1 + 1?", "2"),
    "cnn-dailymail": ("Long.\nTL;DR:", "Short."),
    "spec-bench": ("One", "Answer"),
    "swe-bench": ("Rules Fix it", '[{"function": {"name": "bash"}}]'),
    "alpaca": ("Sum\n1, 2", "3"),
    "finance-alpaca": ("What is a bond?", "A loan."),
    "code-search-net": ("Add.", "def add(): ..."),
}


@pytest.mark.parametrize("name", WORKLOADS)
def test_rows_of_a_data_set_become_requests(name, tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps(ROWS[name]) + "\n")
    (request,) = read_requests(Path(f"@{name}={file}"), Fields(), None)
    assert (" ".join(request.context), request.response) == REQUESTS.get(name, ("Hi", "Hello"))


def test_a_conversation_has_its_first_question_as_prompt(tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps(ROWS["swe-bench"]) + "\n")
    ((number, row),) = read_rows(Path(f"@swe-bench={file}"))
    assert (number, row["prompt"], len(row["turns"])) == (1, "Fix it", 4)


def test_conversations_without_an_answer_are_left_out(tmp_path):
    file = tmp_path / "rows.jsonl"
    human, gpt = {"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}
    rows = [[], [human], [gpt, human], [human, human, gpt], [gpt, human, gpt]]
    file.write_text("".join(json.dumps({"conversations": row}) + "\n" for row in rows))
    found = list(read_rows(Path(f"@sharegpt={file}")))
    assert [(number, row["prompt"], row["response"]) for number, row in found] == [
        (4, "Hi", "Hello"),
        (5, "Hi", "Hello"),
    ]


@pytest.mark.parametrize(
    "word, message",
    [
        ("@gsm", "no data set is called 'gsm', did you mean 'gsm8k'?"),
        ("@nothing", "there are sharegpt, arena"),
        ("@gsm8k=/no/such/file.jsonl", "cannot read '@gsm8k=/no/such/file.jsonl'"),
    ],
)
def test_what_cannot_be_read_is_named(word, message):
    with pytest.raises(UsageError, match=message.replace("?", r"\?").replace("*", r"\*")):
        list(read_rows(Path(word)))


def test_other_columns_are_named(tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text('{"a": 1}\n')
    with pytest.raises(UsageError, match="another form than openai/gsm8k: KeyError"):
        list(read_rows(Path(f"@gsm8k={file}")))
