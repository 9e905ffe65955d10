"""The folder of shared outputs: whatever its files hold, who may read them, and its salt."""

import hashlib
import json
import os
import subprocess
import sys
import threading
import time
from contextlib import suppress

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_smartspec import SuffixTreeCandidates
from hf_smartspec.candidates.text.suffix.files import _MAGIC, packed, unpacked
from hf_smartspec.replicas import SharedOutputs
from hf_smartspec.replicas.sharing.folder import SharedFolder
from hf_smartspec.replicas.sharing.snapshot import SharedOutput, pack, unpack

from ...covering import examples
from ...serving.helpers import TIMEOUT
from .replicas import OPTIONS, TOKENIZER, drafted, held, new_source, replica, serve


def crafted(head, values=b""):
    """A file's contents with a right check sum, whatever stands in it."""
    content = len(head).to_bytes(8, "little") + head + values
    return _MAGIC + hashlib.blake2b(content, digest_size=32).digest() + content


def test_damaged_half_written_and_foreign_files_are_left_alone(tmp_path, caplog):
    shared, source = replica(tmp_path)
    for number in range(3):
        serve(source, number, [1, 2, 3], [10 + number, 20, 30])
        shared.publish(source)
    whole = sorted(path for path in tmp_path.iterdir() if path.suffix == ".outputs")
    assert len(whole) == 3
    data = whole[0].read_bytes()
    whole[0].write_bytes(data[:-5])
    whole[1].write_bytes(data[:60] + bytes([data[60] ^ 1]) + data[61:])
    (tmp_path / f"x-{shared._fingerprint[:8]}.outputs").write_bytes(b"something else")
    late, other = replica(tmp_path)
    assert late.pull(other) == 1 and held(other) == [("", [1, 2, 3, 12, 20, 30])]
    # What was half written is taken once it is whole.
    whole[0].write_bytes(data)
    assert late.pull(other) == 1 and len(held(other)) == 2


def test_what_is_no_readable_file_is_left_alone_and_reported_once(tmp_path, caplog):
    shared, source = replica(tmp_path)
    serve(source, "a", [1, 2, 3], [10, 11, 12])
    shared.publish(source)
    end = f"-{shared._fingerprint[:8]}.outputs"
    (tmp_path / f"folder{end}").mkdir()
    (tmp_path / f"dangling{end}").symlink_to(tmp_path / "nowhere")
    os.mkfifo(tmp_path / f"pipe{end}")
    (tmp_path / f"deep{end}").write_bytes(crafted(b"[" * 100_000))
    (tmp_path / f"locked{end}").write_bytes(b"")
    (tmp_path / f"locked{end}").chmod(0)
    late, other = replica(tmp_path)
    assert late.pull(other) == 1 and held(other) == held(source)
    assert late.pull(other) == 0
    for name in ("folder", "dangling", "pipe", "deep", "locked"):
        assert caplog.text.count(f"{name}{end} is left alone") == 1
    serve(other, "b", [1, 2, 3], [20, 21, 22])
    assert late.publish(other) == 1 and shared.pull(source) == 1


def test_what_dead_writers_left_is_swept_up(tmp_path, monkeypatch):
    shared, source = replica(tmp_path)
    with monkeypatch.context() as patch:  # a process that dies removes nothing
        patch.setattr(shared._folder._fs, "mv", lambda *args: (_ for _ in ()).throw(KeyboardInterrupt))
        patch.setattr(shared._folder._fs, "rm_file", lambda *args: None)
        serve(source, "a", [1, 2, 3], [10, 11, 12])
        with pytest.raises(KeyboardInterrupt):
            shared.publish(source)
    (left,) = tmp_path.iterdir()
    late, other = replica(tmp_path)
    with late.attached(other):
        assert list(tmp_path.iterdir()) == [left], "somebody may be writing it"
    now = time.time_ns()
    monkeypatch.setattr("hf_smartspec.replicas.sharing.folder.time.time_ns", lambda: now + 2 * 3600 * 10**9)
    (tmp_path / ".foreign.tmp").touch()
    with late.attached(other):
        assert [path.name for path in tmp_path.iterdir()] == [".foreign.tmp"]


def test_a_folder_that_fails_disturbs_nobody(tmp_path, monkeypatch):
    shared, source = replica(tmp_path)
    serve(source, "a", [1, 2, 3], [10, 11, 12])
    with monkeypatch.context() as patch:
        patch.setattr(SharedFolder, "write", lambda *args: (_ for _ in ()).throw(OSError("no space")))
        with shared.attached(source):
            pass
    assert shared.publish(source) == 1, "what could not be written is written later"


def test_file_systems_without_folders(tmp_path):
    (first, one), (second, two) = replica("memory://shared/here"), replica("memory://shared/here")
    serve(one, "a", [1, 2, 3], [10, 11, 12])
    assert first.publish(one) == 1 and second.pull(two) == 1


def test_object_stores_without_a_file_in_the_folder(monkeypatch):
    """They raise for what is empty."""
    (first, one), (second, two) = replica("memory://store/empty"), replica("memory://store/empty")
    files = first._folder._fs

    def listed(path, detail=False, **kwargs):
        if not (found := [name for name in files.store if name.startswith("/store/empty/")]):
            raise FileNotFoundError(path)
        return found

    monkeypatch.setattr(files, "ls", listed)
    serve(one, "a", [1, 2, 3], [10, 11, 12])
    with first.attached(one):
        pass
    assert second.pull(two) == 1


def test_files_whose_content_makes_no_sense_hold_nobody_up(tmp_path):
    (first, one), (late, two) = replica(tmp_path), replica(tmp_path)
    serve(one, "a", [1, 2, 3], [10, 11, 12])
    first.publish(one)
    item = SharedOutput("x", 1, 1, "", np.array([1, -2], np.int32))
    header = {"kind": "outputs", "fingerprint": first._fingerprint, "names": 3, "replicas": None}
    for number, data in enumerate([pack([item], first._fingerprint), packed(header, {"tokens": item.tokens})]):
        (tmp_path / f"{number}-{first._fingerprint[:8]}.outputs").write_bytes(data)
    assert late.pull(two) == 1 and held(two) == held(one)


def test_what_cannot_be_read_keeps_nobody_from_writing_and_is_reported_once(tmp_path, monkeypatch, caplog):
    shared, source = replica(tmp_path, interval=0.001)
    serve(source, "a", [1, 2, 3], [10, 11, 12])
    (tmp_path / f"0-x-{shared._fingerprint[:8]}.outputs").write_bytes(b"what may not be read")
    attempts, enough = [], threading.Event()

    def refused(self, name):
        attempts.append(name)
        if len(attempts) > 5:
            enough.set()
        raise PermissionError(len(attempts))  # never the same words

    with monkeypatch.context() as patch:
        patch.setattr(SharedFolder, "read", refused)
        with shared.attached(source):
            assert enough.wait(TIMEOUT)
    assert len([item for item in caplog.records if "is left alone" in item.getMessage()]) == 1
    late, other = replica(tmp_path)
    assert late.pull(other) == 1


@pytest.mark.parametrize(
    "url, options, message",
    [
        ("nosuchprotocol://x", {}, "cannot be reached"),
        ("here", {"interval": 0}, "`interval` must be positive"),
        ("here", {"max_files": 0}, "`max_files`"),
    ],
)
def test_errors_before_work_starts(tmp_path, monkeypatch, url, options, message):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=message):
        SharedOutputs(url, TOKENIZER, **options)


@pytest.fixture(params=[0o022, 0o077, 0o000])
def umask(request):
    before = os.umask(request.param)
    yield
    os.umask(before)


def modes(folder):
    return {path.stat().st_mode & 0o7777 for path in folder.iterdir()}


def test_texts_are_their_owners_alone(tmp_path, umask):
    shared, source = replica(tmp_path / "new" / "folder")
    serve(source, "a", [1, 2, 3], [10, 11, 12])
    shared.publish(source)
    shared._folder.salt()
    folder = tmp_path / "new" / "folder"
    assert folder.stat().st_mode & 0o777 == 0o700 and modes(folder) == {0o600}
    source.save(tmp_path / "trees")
    source.save(tmp_path / "trees")
    assert (tmp_path / "trees").stat().st_mode & 0o777 == 0o600


def test_in_a_groups_folder_its_group_may_read(tmp_path, umask):
    folder = tmp_path / "group"
    folder.mkdir()
    folder.chmod(0o2770)
    shared, source = replica(folder)
    serve(source, "a", [1, 2, 3], [10, 11, 12])
    shared.publish(source)
    source.save(folder / "trees")
    assert modes(folder) == {0o640} and folder.stat().st_mode & 0o7777 == 0o2770


@pytest.mark.parametrize("protocol", ["", "memory://"])
def test_a_folder_has_one_salt(tmp_path, protocol):
    url, found, barrier = f"{protocol}{tmp_path}/salted", [], threading.Barrier(8)

    def ask():
        folder = SharedFolder(url)
        barrier.wait()
        found.append(folder.salt())

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8 and len(set(found)) == 1 and len(found[0]) == 32
    assert not any(name.startswith(".") for name in SharedFolder(url)._all())


@pytest.mark.end_to_end
def test_processes_that_come_at_once_find_one_salt(tmp_path):
    folder = "from hf_smartspec.replicas.sharing.folder import SharedFolder as Folder"
    code = f"{folder}; print(Folder({str(tmp_path)!r}).salt().hex())"
    begun = [subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) for _ in range(2)]
    assert len({process.communicate()[0] for process in begun}) == 1


def test_a_damaged_salt_is_no_salt(tmp_path):
    (tmp_path / "salt").write_bytes(b"short")
    with pytest.raises(ValueError, match="must hold 32 bytes, got 5"):
        SharedFolder(str(tmp_path)).salt()


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 5) | st.floats(allow_nan=False) | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)
arrays_of_files = st.dictionaries(
    st.sampled_from(
        ["tokens", "lengths", "namespaces", "used", "served", "numbers", "times", "cells", "weights", "likely"]
    ),
    st.tuples(
        st.sampled_from(["<i4", "<i8", "<f4", "<u1", "|O", "<U3", "(,)i4", "nonsense"]),
        st.lists(st.integers(-2, 5), max_size=3),
    ),
)


@settings(max_examples=examples(300), deadline=None)
@given(st.data())
def test_whatever_a_file_holds_it_is_taken_or_refused_in_one_way(tmp_path_factory, data):
    """Headers and arrays that were made on purpose, with a right check sum, instead of a real file's."""
    source = new_source()
    serve(source, "a", [1, 2, 3], [10, 11, 12], namespace="tenant")
    path = tmp_path_factory.mktemp("crafted") / "trees"
    source.save(path)
    header, arrays = unpacked(path.read_bytes(), "trees")
    for kind in ("outputs", "learnt", None):
        changed = header | {"kind": kind, "fingerprint": "x", "names": ["", "a"], "replicas": ["r"]}
        changed |= data.draw(
            st.dictionaries(st.sampled_from(["names", "replicas", "lines", "fingerprint", "kind"]), json_values)
        )
        own = {key: (array.dtype.str, list(array.shape)) for key, array in arrays.items()} | data.draw(arrays_of_files)
        changed["arrays"] = own if data.draw(st.booleans()) else data.draw(json_values)
        changed["version"] = data.draw(st.just(1) | json_values)
        values = b"".join(array.tobytes() for array in arrays.values()) + data.draw(st.binary(max_size=64))
        content = crafted(json.dumps(changed).encode(), values)
        path.write_bytes(content)
        try:
            loaded = SuffixTreeCandidates.load(path, progress=False, **OPTIONS)
        except ValueError:
            pass
        else:
            assert len(drafted(loaded, [9, 10, 11], "a")) <= 8
        with suppress(ValueError):
            unpack(content, "x", "name")
