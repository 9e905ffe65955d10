"""The command that builds a datastore from files."""

import argparse
import gzip
import json

import numpy as np
import pytest

from hf_smartspec.candidates.text.datastore.file import Datastore, tokenizer_fingerprint
from hf_smartspec.commands.common.arguments import UsageError
from hf_smartspec.commands.datastore_build import command as datastore_build
from hf_smartspec.commands.datastore_build.arguments import add_arguments

from ..folders import byte_tokenizer

ROWS = [
    {"prompt": "ask", "response": "answer"},
    {"prompt": "no answer"},
    {"prompt": "ask", "response": ""},
    {"prompt": "more", "response": "löst"},
]


@pytest.fixture
def tokenizer(tmp_path):
    tokenizer = byte_tokenizer()
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    return tokenizer


def build(tmp_path, *inputs, options=()):
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    output = tmp_path / "out.sssd"
    arguments = [*inputs, "--tokenizer", tmp_path / "tokenizer", "--output", output, *options]
    assert datastore_build.run(parser.parse_args([str(argument) for argument in arguments])) == 0
    return Datastore.open(output)


def write_rows(path, rows=ROWS):
    text = "".join(json.dumps(row) + "\n\n" for row in rows).encode()
    path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)
    return path


def documents(store, tokenizer):
    """The texts of a datastore."""
    ends = np.flatnonzero(store.tokens < 0)
    return [tokenizer.decode(store.tokens[a:b]) for a, b in zip([0, *(ends[:-1] + 1)], ends)]


def test_files_of_all_kinds(tmp_path, tokenizer, capsys):
    rows, packed = write_rows(tmp_path / "rows.jsonl"), write_rows(tmp_path / "rows.jsonl.gz")
    (tmp_path / "plain.md").write_text("two\nlines\n")
    (tmp_path / "packed.txt.gz").write_bytes(gzip.compress(b"one"))
    np.save(tmp_path / "ids.npy", np.array([*tokenizer("ids").input_ids, -1, *tokenizer("more").input_ids]))
    inputs = [rows, packed, *(tmp_path / name for name in ("plain.md", "packed.txt.gz", "ids.npy"))]
    store = build(tmp_path, *inputs, options=["--json", tmp_path / "out.json"])
    expected = ["answer", "löst", "answer", "löst", "two\nlines\n", "one", "ids", "more"]
    assert documents(store, tokenizer) == expected
    assert store.fingerprint == tokenizer_fingerprint(tokenizer)
    result = json.loads((tmp_path / "out.json").read_text())
    assert result["tokens"] == store.num_tokens == len("".join(expected).encode())
    assert result["bytes"] == (tmp_path / "out.sssd").stat().st_size
    assert f"out.sssd: {store.num_tokens} tokens" in capsys.readouterr().out


def test_fields_are_chosen(tmp_path, tokenizer):
    rows = write_rows(tmp_path / "rows.jsonl")
    store = build(tmp_path, rows, options=["--field", "prompt", "--field", "response"])
    assert documents(store, tokenizer) == ["ask", "answer", "no answer", "ask", "more", "löst"]


@pytest.mark.parametrize(
    ("name", "content", "match"),
    [
        ("missing.txt", None, "no such file"),
        ("empty.txt", b"", "holds no text"),
        ("rows.jsonl", b'{"text": "other"}', r"holds no text under \['response'\]"),
        ("rows.jsonl", b"{", "row 1 is no JSON"),
        ("rows.jsonl", b'\n["list"]', "row 2 is no JSON object"),
        ("rows.jsonl", b'{"response": ["list"]}', "no text under 'response', but list"),
        ("latin.txt", b"\xff", "cannot read.*latin.txt"),
        ("rows.jsonl.gz", b"plain", "cannot read.*rows.jsonl.gz"),
        ("rows.jsonl.gz", gzip.compress(b'{"response": "a"}', mtime=0)[:-9], "cannot read.*rows.jsonl.gz"),
        ("ids.npy", b"text", "cannot read.*ids.npy"),
    ],
)
def test_files_that_cannot_be_used_are_named(tmp_path, tokenizer, name, content, match):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(UsageError, match=match):
        build(tmp_path, tmp_path / name)
    assert not (tmp_path / "out.sssd").exists()


@pytest.mark.parametrize(
    ("ids", "match"),
    [
        (np.zeros((2, 2), np.int64), "one axis"),
        (np.zeros(3), "integer"),
        (np.array([5, 100_000]), "100000"),
    ],
)
def test_token_ids_that_cannot_be_used_are_refused(tmp_path, tokenizer, ids, match):
    np.save(tmp_path / "ids.npy", ids)
    with pytest.raises(UsageError, match=match):
        build(tmp_path, tmp_path / "ids.npy")


def test_a_missing_tokenizer_is_named(tmp_path):
    (tmp_path / "tokenizer").mkdir()
    (tmp_path / "plain.txt").write_text("text")
    with pytest.raises(UsageError, match="cannot load a tokenizer from"):
        build(tmp_path, tmp_path / "plain.txt")


def test_an_output_that_cannot_be_written_is_refused_first(tmp_path, tokenizer):
    with pytest.raises(UsageError, match="cannot write"):
        build(tmp_path, tmp_path / "never read", options=["--output", tmp_path])
