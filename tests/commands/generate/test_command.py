"""`smartspec generate`: the text that `generate` gives, from wherever prompts come."""

import io
import json
import os
import sys

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from ..helpers import EMBEDDED, call

SHORT = ["--max-new-tokens", "12", "--threads", "1", "--device", "cpu"]


@pytest.fixture(scope="module")
def embedded():
    model = AutoModelForCausalLM.from_pretrained(EMBEDDED, dtype=torch.float32).eval()
    return model, AutoTokenizer.from_pretrained(EMBEDDED)


def plain_text(embedded, prompt, max_new_tokens=12, as_chat=True):
    """What transformers' own `generate` says."""
    model, tokenizer = embedded
    if as_chat:
        turn = [{"role": "user", "content": prompt}]
        inputs = tokenizer.apply_chat_template(turn, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    else:
        inputs = tokenizer(prompt, return_tensors="pt")
    tokens = model.generate(inputs["input_ids"], attention_mask=inputs["attention_mask"], max_new_tokens=max_new_tokens)
    return tokenizer.decode(tokens[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)


def stdin(monkeypatch, text):
    monkeypatch.setattr(sys, "stdin", io.StringIO(text))


@pytest.mark.parametrize("arguments", [[], ["--raw"]])
def test_it_prints_what_the_embedded_model_says(embedded, arguments, capsys):
    assert call("generate", "What is 3 plus 4?", *SHORT, *arguments, "--stats") == 0
    captured = capsys.readouterr()
    want = plain_text(embedded, "What is 3 plus 4?", as_chat=not arguments)
    assert captured.out == want + "\n" * (not want.endswith("\n"))
    assert "12 tokens" in captured.err and "drafted" in captured.err


def test_several_prompts_are_answered_in_their_order(embedded, tmp_path, monkeypatch, capsys):
    (tmp_path / "a.txt").write_text("Write a\npoem.\n")
    (tmp_path / "b.jsonl").write_text('{"prompt": "One"}\n{"prompt": "Two"}\n')
    stdin(monkeypatch, "What is a tree?\n")
    files = ["--file", tmp_path / "a.txt", "--file", tmp_path / "b.jsonl"]
    assert call("generate", "Hello", "-", *files, *SHORT, "--json", tmp_path / "out.json") == 0
    prompts = ["Hello", "What is a tree?", "Write a\npoem.", "One", "Two"]
    report = json.loads((tmp_path / "out.json").read_text())
    assert [row["prompt"] for row in report["answers"]] == prompts
    assert [row["text"] for row in report["answers"]] == [plain_text(embedded, prompt) for prompt in prompts]
    assert report["statistics"]["generated_tokens"] == sum(row["generated_tokens"] for row in report["answers"])
    out = capsys.readouterr().out
    assert "3 of 5: Write a poem." in out and all(row["text"] in out for row in report["answers"])


def test_json_goes_to_standard_output_in_place_of_the_text(folder, monkeypatch, capsys):
    stdin(monkeypatch, "ab")  # is what is answered where nothing is named
    assert call("generate", "--model", folder / "target", *SHORT, "--json", "-") == 0
    report = json.loads(capsys.readouterr().out)
    assert report["answers"][0]["prompt"] == "ab" and report["assistant"] == "auto"


def test_a_seed_says_the_same_again_whatever_drafts(folder, capsys):
    texts = []
    for assistant in ("none", "prompt_lookup", folder / "draft", f"suffix+{folder / 'draft'}"):
        sampling = ["--temperature", "0.9", "--top-k", "40", "--seed", "3"]
        assert (
            call("generate", "abab", "cd", "--model", folder / "target", *SHORT, *sampling, "--assistant", assistant)
            == 0
        )
        texts.append(capsys.readouterr().out)
    assert len(set(texts)) == 1
    assert call("generate", "abab", "cd", "--model", folder / "target", *SHORT, *sampling[:-1], "4") == 0
    assert capsys.readouterr().out != texts[0]


def test_compare_says_what_the_same_tokens_take_without_speculation(folder, tmp_path, capsys):
    line = ["generate", "abab", "cd", "--model", folder / "target", *SHORT, "--temperature", "1", "--compare"]
    assert call(*line, "--assistant", folder / "draft", "--json", tmp_path / "out.json") == 0
    report = json.loads((tmp_path / "out.json").read_text())
    assert report["comparison"]["is_same"] and report["statistics"]["accepted_tokens"] > 0
    assert "s without speculation" in capsys.readouterr().err


def test_a_draft_stands_beside_the_assistant(folder, tmp_path, capsys):
    out = tmp_path / "out.json"
    assert (
        call("generate", "abab", "--model", folder / "target", *SHORT, "--draft", folder / "draft", "--json", out) == 0
    )
    report = json.loads(out.read_text())
    assert report["assistant"] == f"auto+{folder / 'draft'}" and report["statistics"]["accepted_tokens"] > 0


def test_a_stop_string_ends_the_text(embedded, capsys):
    text = plain_text(embedded, "What is 3 plus 4?", 12)
    stop = text[5:9]
    assert call("generate", "What is 3 plus 4?", *SHORT, "--stop", stop) == 0
    assert capsys.readouterr().out == text[: text.index(stop)] + "\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["x", "--model", "./nothing"], "no such model folder: './nothing'"),
        (["x", "--assistant", "sufix"], "Unknown `assistant` preset 'sufix'"),
        (["x", "--file", "/no/file.txt"], "cannot read '/no/file.txt': No such file or directory (see"),
        (["x", "--file", "/no/file.jsonl"], "cannot read '/no/file.jsonl': No such file or directory (see"),
        (["x", " \n"], "prompt 2 is empty"),
        (["x", "--file", os.devnull], f"the prompt in '{os.devnull}' is empty"),
        (["\udcff\udcfe"], "the prompt is no UTF-8 text"),
        (["x", "--system", "a \udcff"], "the prompt is no UTF-8 text"),
        (["x", "--temperature", "0", "--top-p", "0.5"], "--temperature 0 always takes the most probable token"),
        (["x", "--draft", "./nothing"], "no such model folder: './nothing'"),
        (["x", "--stop", ""], "must not be empty"),
        (["x", "--shard", "0/2"], "--shard is for --dataset"),
        (["x", "--overwrite"], "--overwrite is for --dataset"),
        (["x", "--top-p", "1.5"], "must be above 0 and at most 1, got 1.5"),
        (["x", "--json", "/no/folder/x.json"], "cannot write"),
        (
            ["x", "--chat-template", "/no/template"],
            "--chat-template: cannot read '/no/template': No such file or directory (see",
        ),
        (["word " * 2100], "tokens are too many: the model reads and writes 2048"),
    ],
)
def test_what_cannot_be_answered_is_refused_in_one_line(arguments, message, capsys):
    assert call("generate", *arguments, *SHORT) == 2
    captured = capsys.readouterr()
    assert message in captured.err and captured.err.count("\n") == 1 and captured.out == ""


@pytest.mark.parametrize(("text", "message"), [("", "the prompt is empty"), (None, "no prompt: give one")])
def test_no_prompt_at_all(monkeypatch, capsys, text, message):
    stdin(monkeypatch, text or "")
    monkeypatch.setattr(sys.stdin, "isatty", lambda: text is None, raising=False)
    assert call("generate") == 2
    assert message in capsys.readouterr().err
