"""`smartspec chat`, with its input from a pipe."""

import io
import json
import sys

import pytest
from transformers import AutoTokenizer

from hf_smartspec.commands.chat.session import Session

from ..helpers import EMBEDDED, call

SHORT = ["--max-new-tokens", "10", "--threads", "1", "--device", "cpu"]


def chat(monkeypatch, *lines, arguments=SHORT):
    """Exit status."""
    monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
    return call("chat", *arguments)


def test_answers_are_those_of_generate_given_all_that_was_said(monkeypatch, tmp_path, capsys):
    file = tmp_path / "chat.json"
    assert chat(monkeypatch, "What is 3 plus 4?", "And \\", "times 2?", arguments=[*SHORT, "--json", file]) == 0
    captured = capsys.readouterr()
    messages = json.loads(file.read_text())["messages"]
    assert [item["role"] for item in messages] == ["user", "assistant", "user", "assistant"]
    assert messages[2]["content"] == "And \ntimes 2?"
    assert captured.out == "".join(
        item["content"].rstrip("\n") + "\n" for item in messages if item["role"] == "assistant"
    )
    tokenizer = AutoTokenizer.from_pretrained(EMBEDDED)
    prompt = tokenizer.apply_chat_template(messages[:3], add_generation_prompt=True, tokenize=False)
    assert call("generate", prompt, "--raw", *SHORT) == 0
    assert capsys.readouterr().out.rstrip("\n") == messages[3]["content"].rstrip("\n")


def test_verbs_change_what_is_said_next(folder, monkeypatch, tmp_path, capsys):
    arguments = [*SHORT, "--model", folder / "target", "--json", tmp_path / "chat.json", "--seed", "1"]
    lines = ["/temperature 1.5", "ab", "/reset", "ab", "/reset", "/assistant none", "ab", "/reset", "/seed 2", "ab"]
    assert chat(monkeypatch, *lines, "/stats", "/system Be brief", arguments=arguments) == 0
    captured = capsys.readouterr()
    first, again, undrafted, other = captured.out.splitlines()
    assert first == again == undrafted != other
    assert "accepted of drafted" in captured.err
    report = json.loads((tmp_path / "chat.json").read_text())
    assert report["messages"][0] == {"role": "system", "content": "Be brief"} and report["assistant"] == "none"


def test_a_turn_reads_what_is_new_only(folder, monkeypatch):
    reused, stop = [], Session.stop

    def stop_and_look(session):
        reused.append(session._engine._memory.num_reused)
        stop(session)

    monkeypatch.setattr(Session, "stop", stop_and_look)
    assert chat(monkeypatch, "ab" * 20, "cd", arguments=[*SHORT, "--model", folder / "target"]) == 0
    assert reused[-1] >= 40  # the first turn, at least


def test_ctrl_c_ends_a_chat_that_is_piped_in(folder, monkeypatch, tmp_path, capsys):
    """Nobody sits there to go on."""
    follow, interrupts = Session._follow, []

    def interrupted(session, request_id, growing):
        if len(session.conversation.messages) == 3:
            interrupts.append(request_id)
            raise KeyboardInterrupt
        return follow(session, request_id, growing)

    monkeypatch.setattr(Session, "_follow", interrupted)
    arguments = [*SHORT, "--model", folder / "target", "--json", tmp_path / "chat.json"]
    assert chat(monkeypatch, "ab", "cd", "ef", arguments=arguments) == 130
    assert len(interrupts) == 1
    messages = json.loads((tmp_path / "chat.json").read_text())["messages"]
    assert [item["role"] for item in messages] == ["user", "assistant"]


def test_ctrl_c_before_an_answer_begins_takes_the_turn_back(folder, monkeypatch, tmp_path, capsys):
    def interrupted(session):
        raise KeyboardInterrupt

    monkeypatch.setattr(Session, "_ask", interrupted)
    arguments = [*SHORT, "--model", folder / "target", "--json", tmp_path / "chat.json"]
    assert chat(monkeypatch, "ab", arguments=arguments) == 130
    assert json.loads((tmp_path / "chat.json").read_text())["messages"] == []


def test_exit_leaves_what_follows_unread(folder, monkeypatch, capsys):
    assert chat(monkeypatch, "/exit", "ab", arguments=[*SHORT, "--model", folder / "target"]) == 0
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("/asistant none", "no such command: /asistant; did you mean /assistant?"),
        ("/what", "no such command: /what; /help lists them"),
        ("/assistant sufix", "/assistant: Unknown `assistant` preset 'sufix'"),
        ("/temperature hot", "/temperature: 'hot' is no number"),
        ("/seed -1", "/seed: must be at least 0, got -1"),
        ("word " * 300, "1516 tokens are too many: the model reads and writes 256: /reset"),
        ("a \udcff", "the prompt is no UTF-8 text"),
    ],
)
def test_a_bad_line_is_told_and_the_chat_goes_on(folder, monkeypatch, line, message, capsys):
    status = chat(monkeypatch, line, "ab", arguments=[*SHORT, "--model", folder / "target"])
    assert status == (1 if line.startswith(("word", "a ")) else 0)
    captured = capsys.readouterr()
    assert message in captured.err and captured.out.strip()


def test_help_names_every_verb(folder, monkeypatch, capsys):
    assert chat(monkeypatch, "/help", arguments=[*SHORT, "--model", folder / "target"]) == 0
    err = capsys.readouterr().err
    assert all(verb in err for verb in ("/stats", "/reset", "/system", "/assistant", "/seed", "/temperature", "/exit"))


def test_without_a_chat_template_lines_of_both_are_continued(folder, monkeypatch, capsys):
    assert chat(monkeypatch, "ab", "cd", arguments=[*SHORT, "--model", folder / "target", "--system", "Hi."]) == 0
    captured = capsys.readouterr()
    assert captured.err.count("no chat template") == 1
    assert call("generate", "Hi.\nUser: ab\nAssistant:", *SHORT, "--model", folder / "target", "--stop", "\nUser:") == 0
    assert capsys.readouterr().out == captured.out.splitlines(keepends=True)[0]
