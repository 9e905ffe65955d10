"""Files that are there as a whole, or not at all: for whoever may read them, and without remains."""

import os
from pathlib import Path

import pytest

from hf_smartspec import TextClassifier
from hf_smartspec.candidates.text.datastore.file import build_datastore
from hf_smartspec.files import replacing
from hf_smartspec.goodput import CostModel
from hf_smartspec.online.checkpoint import Checkpoint
from hf_smartspec.target_model.cost import profiling

from .models import shared_model


def write_profile(path):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(profiling, "profile_path", lambda model: path)
        profiling.keep_profile(shared_model("llama"), CostModel(0.0, 1.0, 1.0))


WRITERS = {
    "datastore": lambda path: build_datastore([[0, 1, 2]], path),
    "classifier": lambda path: TextClassifier(2**8, 1).save(path),
    "checkpoint": lambda path: Checkpoint(path).save([], {}, {}),
    "profile": write_profile,
}


@pytest.mark.parametrize("writer", WRITERS)
def test_other_users_may_read_what_holds_nothing_of_users_texts(tmp_path, writer):
    mask = os.umask(0o022)
    try:
        WRITERS[writer](tmp_path / "file")
    finally:
        os.umask(mask)
    assert (tmp_path / "file").stat().st_mode & 0o777 == (0o644 if writer == "profile" else 0o600)


def write(path):
    with replacing(path) as file:
        file.write(b"new")


def test_what_fails_leaves_the_file_before(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"old")
    with pytest.raises(OSError, match="no space"), replacing(path) as file:
        file.write(b"ne")
        raise OSError("no space")
    assert path.read_bytes() == b"old" and list(tmp_path.iterdir()) == [path]


def test_what_killed_writers_left_goes_with_the_next_file(tmp_path, monkeypatch):
    path, foreign = tmp_path / "a[b]", tmp_path / ".other.1.tmp"
    with monkeypatch.context() as patch:  # a process that is killed removes nothing
        patch.setattr(os, "replace", lambda *args: (_ for _ in ()).throw(KeyboardInterrupt))
        patch.setattr(Path, "unlink", lambda *args, **kwargs: None)
        with pytest.raises(KeyboardInterrupt):
            write(path)
    (left,) = tmp_path.iterdir()
    foreign.touch()
    write(path)
    assert set(tmp_path.iterdir()) == {path, left, foreign}, "somebody may be writing it"
    for file in (left, foreign):
        os.utime(file, (0, 0))
    write(path)
    assert set(tmp_path.iterdir()) == {path, foreign} and path.read_bytes() == b"new"
